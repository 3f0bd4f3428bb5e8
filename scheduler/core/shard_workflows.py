"""The workflows of one shard: which nodes become tasks, are skipped or cancelled as others end. See `core.graph`.

What is decided here is derived from the folded state: after a load it is found again, and what is there already is not
done twice, since the id of a node's task can be used once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from scheduler.core import decisions, workflow
from scheduler.core.decisions import Decision
from scheduler.core.desk import LOST, Desk, Effects, Source, name_or_nothing, rejected
from scheduler.core.graph import End, Move, Progress
from scheduler.core.task import deadline_of
from scheduler.core.timers import Timers
from schemas.messages import (
    CancelTask,
    EndedTask,
    Event,
    EventBody,
    OnFailure,
    Outcome,
    Reply,
    Status,
    SubmitWorkflow,
    Task,
    TaskSkipped,
    TaskSubmitted,
    Workflow,
    WorkflowEnded,
    WorkflowRequest,
    WorkflowStatus,
    WorkflowStopped,
)

WORKFLOW = "workflow/"  # begins the keys of workflows in checkpoints
STUCK_US = 1_000_000  # until it is tried again to submit a node for which there was no room
FORGET = "forget "  # begins the keys of timers of workflows that have ended


class _Run:
    """How far a workflow is: derived from its graph, and from what is known of its nodes."""

    def __init__(self, running: Workflow) -> None:
        self.nodes = running.spec.nodes
        self.numbers = {node.name: number for number, node in enumerate(self.nodes)}
        self.progress = Progress(workflow.graph_of(running.spec))
        self.live: set[int] = set()
        self.to_move: deque[tuple[int, Move]] = deque()
        self.to_cancel: deque[int] = deque()
        self.failed: str | None = None  # the first node that did

    def is_over(self) -> bool:
        return self.progress.is_over() and not self.to_move

    def has_work(self) -> bool:
        return bool(self.to_move or self.to_cancel) or self.progress.is_over()


class ShardWorkflows:
    """What a shard does about workflows. Their nodes are tasks of its desk, which tells of their ends."""

    def __init__(
        self, desk: Desk, workflows: dict[str, Workflow], workflows_max: int, kept_us: Mapping[bool, int]
    ) -> None:
        """`kept_us`: for how long an ended one is remembered, without and with a fingerprint."""
        self.workflows = workflows
        self._desk, self._max, self._kept_us = desk, workflows_max, kept_us
        self._runs: dict[str, _Run] = {}
        self._due: dict[str, None] = {}  # workflows with something to be decided, in their order
        self._released: dict[str, list[str]] = {}  # tasks of workflows whose end is not acknowledged yet
        self._timers = Timers()
        self._stuck_until: int | None = None
        self._is_loaded = False

    def __contains__(self, workflow_id: str) -> bool:
        return workflow_id in self.workflows

    def is_node(self, task_id: str) -> bool:
        """Whether a task is one of a workflow that has not ended."""
        known = self.workflows.get(workflow.workflow_of(task_id) or "")
        return known is not None and known.status is WorkflowStatus.RUNNING

    # --- facts ---------------------------------------------------------------------------------------------------

    def evolve(self, event: Event) -> None:
        """Fold an event of a workflow, if it is its next one."""
        workflow_id = event.entity_id
        before = self.workflows.get(workflow_id)
        if event.version != (1 if before is None else before.version + 1):
            return
        after = self.workflows[workflow_id] = workflow.evolve(before, event, self._kept_us)
        self._desk.note_changed(WORKFLOW + workflow_id)
        if isinstance(event.body, WorkflowEnded) and before is not None:
            released = [workflow.node_id(workflow_id, node.name) for node in before.spec.nodes]
            for task_id in released:
                self._desk.release(task_id, event.at)
            if self._is_loaded:
                self._released[workflow_id] = released
        if self._is_loaded:
            self._follow(after)

    def _follow(self, after: Workflow) -> None:
        workflow_id = after.workflow_id
        if after.status is not WorkflowStatus.RUNNING:
            self._runs.pop(workflow_id, None)
            self._due.pop(workflow_id, None)
            self._timers.cancel(workflow_id)
            if after.keep_until is not None:
                self._timers.set(FORGET + workflow_id, after.keep_until)
            return
        if workflow_id not in self._runs:
            self._begin(after)
        if after.stopped_as is not None:
            self._timers.cancel(workflow_id)
            run = self._runs[workflow_id]
            run.to_cancel = deque(sorted(run.live))
            self._due[workflow_id] = None

    def _begin(self, running: Workflow) -> None:
        """Derive how far it is: from nothing, or after a load from what is known of its nodes."""
        workflow_id = running.workflow_id
        run = self._runs[workflow_id] = _Run(running)
        known = {
            number: found
            for number, node in enumerate(run.nodes)
            if (found := self._desk.known(workflow.node_id(workflow_id, node.name))) is not None
        }
        run.to_move.extend((number, Move.RUN) for number in run.progress.resume(known))
        for number, found in known.items():
            if isinstance(found, Task):
                run.live.add(number)
            else:
                self._note_end(run, number, found)
        if running.deadline_at is not None:
            self._timers.set(workflow_id, running.deadline_at)
        self._due[workflow_id] = None

    def note(self, task_id: str, known: Task | EndedTask | None) -> None:
        """A task of some workflow, by its id, has changed."""
        workflow_id, _, name = task_id.partition(".")
        run = self._runs.get(workflow_id)
        number = None if run is None else run.numbers.get(name)
        if run is None or number is None:
            return
        if isinstance(known, Task):
            run.live.add(number)
        elif known is not None:
            run.live.discard(number)
            self._note_end(run, number, known)
            self._due[workflow_id] = None

    def _note_end(self, run: _Run, number: int, ended: EndedTask) -> None:
        end = _end_of(ended)
        if end is End.FAILED and run.failed is None:
            run.failed = run.nodes[number].name
        run.to_move.extend(run.progress.ended(number, end))

    def restore(self, kept: Workflow) -> None:
        """Take a workflow from a checkpoint."""
        self.workflows[kept.workflow_id] = kept

    def derive(self) -> Iterator[None]:
        """All facts are known: find how far each workflow is, one a step."""
        self._is_loaded = True
        for kept in list(self.workflows.values()):
            self._follow(kept)
            yield

    def acknowledged(self, workflow_id: str) -> list[str]:
        """The end of a workflow is in the log: the ids of its tasks, which are remembered for it no more."""
        return self._released.pop(workflow_id, [])

    # --- requests ------------------------------------------------------------------------------------------------

    def handle(self, request: WorkflowRequest, source: Source, now: int) -> Effects:
        """Decide a request about a workflow."""
        workflow_id = request.workflow_id
        known = self.workflows.get(workflow_id)
        if isinstance(request, SubmitWorkflow):
            decision = self._decide_submit(known, request, now)
        else:
            decision = workflow.decide_cancel(known, request)
        if decision.body is None:
            is_kept = request.reply_to is None and decision.outcome in LOST
            body = rejected(type(request).__name__, decision, source, is_kept=is_kept)
            event = self._desk.event(name_or_nothing(workflow_id), "", 0, body, now, source)
        else:
            tenant_id = request.spec.tenant_id if isinstance(request, SubmitWorkflow) else known.spec.tenant_id  # type: ignore[union-attr]
            version = 1 if known is None else known.version + 1
            event = self._desk.event(workflow_id, tenant_id, version, decision.body, now, source)
        effects = self._desk.happened(event)
        if request.reply_to is not None:
            effects.replies.append((request.reply_to, self._reply(request, decision, now)))
        return effects

    def _decide_submit(self, known: Workflow | None, request: SubmitWorkflow, now: int) -> Decision:
        if known is None and len(self.workflows) >= self._max:
            return Decision(None, Outcome.OVERLOADED, f"the shard holds {self._max:,} workflows")
        decision = workflow.decide_submit(known, request, now)
        if decision.body is not None:
            if (kind := self._desk.kind_of(request.workflow_id)) is not None:
                return Decision(None, Outcome.CONFLICT, f"there is a {kind} with this id")
            ids = (workflow.node_id(request.workflow_id, node.name) for node in request.spec.nodes)
            if taken := next((task_id for task_id in ids if self._desk.known(task_id) is not None), None):
                return Decision(None, Outcome.CONFLICT, f"there is a task with the id {taken}")
        return decision

    def _reply(self, request: WorkflowRequest, decision: Decision, now: int) -> Reply:
        known = self.workflows.get(request.workflow_id)
        return Reply(
            request_id=request.request_id,
            outcome=decision.outcome,
            task_id=request.workflow_id,
            version=known.version if known else 0,
            created_at=known.created_at if known else None,
            decided_at=now,
            detail=decision.detail,
        )

    # --- what follows --------------------------------------------------------------------------------------------

    def act(self, now: int, limit: int) -> Effects:
        """Decide what follows from ends, stops and time; of much of it a part."""
        effects = Effects.none()
        for key in self._timers.pop_due(now, limit):
            if key.startswith(FORGET):
                workflow_id = key.removeprefix(FORGET)
                self.workflows.pop(workflow_id, None)
                self._desk.unstore(WORKFLOW + workflow_id)
            elif (running := self.workflows.get(key)) is not None and running.stopped_as is None:
                self._stop(running, WorkflowStatus.FAILED, "the workflow's time was over", effects, now)
        if self._stuck_until is not None and now < self._stuck_until:
            return effects
        self._stuck_until = None
        while self._due and limit > 0 and self._stuck_until is None:
            workflow_id = next(iter(self._due))
            limit -= self._go_on(workflow_id, effects, now, limit)
        return effects

    def _go_on(self, workflow_id: str, effects: Effects, now: int, limit: int) -> int:
        """Decide on one workflow up to so many times; how often it was."""
        count, run = 0, self._runs[workflow_id]
        running = self.workflows[workflow_id]
        if run.failed is not None and running.stopped_as is None and running.spec.on_failure is OnFailure.CANCEL:
            self._stop(running, WorkflowStatus.FAILED, f"{run.failed} has failed", effects, now)
        while count < limit and run.to_cancel:
            self._cancel(workflow_id, run.nodes[run.to_cancel.popleft()].name, effects, now)
            count += 1
        while count < limit and run.to_move:
            if not self._move(workflow_id, run, effects, now):
                self._stuck_until = now + STUCK_US
                return count
            count += 1
        if run.is_over():
            running = self.workflows[workflow_id]
            failed = WorkflowStatus.FAILED if run.progress.has_failed() else WorkflowStatus.SUCCEEDED
            self._happens(running, WorkflowEnded(status=running.stopped_as or failed), effects, now)
        elif not run.has_work():
            self._due.pop(workflow_id, None)
        return count + 1

    def _move(self, workflow_id: str, run: _Run, effects: Effects, now: int) -> bool:
        """Let a node become a task, or end without; False: there is no room now."""
        number, move = run.to_move[0]
        running, node = self.workflows[workflow_id], run.nodes[number]
        task_id = workflow.node_id(workflow_id, node.name)
        known = self._desk.known(task_id)
        if known is not None:  # an earlier owner did it
            run.to_move.popleft()
            self.note(task_id, known)
            return True
        tenant_id = running.spec.tenant_id
        body: EventBody
        if move is Move.RUN and running.stopped_as is None:
            spec = workflow.task_spec(running, node)
            if self._desk.is_full(spec, now) is not None:
                return False
            deadline_at = deadline_of(spec.total_timeout_ms, now)
            body = TaskSubmitted(spec=spec, status=Status.PENDING, next_run_at=now, deadline_at=deadline_at)
        else:
            body = _skipped(move, running)
        run.to_move.popleft()
        effects.extend(self._desk.happened(self._desk.event(task_id, tenant_id, 1, body, now, None)))
        return True

    def _cancel(self, workflow_id: str, name: str, effects: Effects, now: int) -> None:
        task = self._desk.known(workflow.node_id(workflow_id, name))
        if isinstance(task, Task) and task.cancel_requested_at is None:
            request = CancelTask(request_id="", task_id=task.task_id, reason=self.workflows[workflow_id].reason)
            effects.extend(self._desk.applied(task, decisions.decide_cancel(task, request), None, now))

    def _stop(self, running: Workflow, status: WorkflowStatus, reason: str, effects: Effects, now: int) -> None:
        self._happens(running, WorkflowStopped(status=status, reason=reason), effects, now)

    def _happens(self, running: Workflow, body: EventBody, effects: Effects, now: int) -> None:
        event = self._desk.event(running.workflow_id, running.spec.tenant_id, running.version + 1, body, now, None)
        effects.extend(self._desk.happened(event))

    def next_at(self) -> int | None:
        """When there is something to be decided without any news."""
        if self._due:
            return self._stuck_until or 0
        return self._timers.next_at()

    def memory(self) -> int:
        """How many workflows are known."""
        return len(self.workflows)


def _end_of(ended: EndedTask) -> End:
    if ended.status is Status.SUCCEEDED:
        return End.SUCCEEDED
    if ended.is_skipped:
        return End.SKIPPED
    # A node that was never an attempt's, and not skipped for want of a wish: something before it has failed.
    return End.UPSTREAM_FAILED if ended.version == 1 else End.FAILED


def _skipped(move: Move, running: Workflow) -> TaskSkipped:
    if running.stopped_as is not None and move is not Move.SKIP:
        return TaskSkipped(is_failure=True, reason=running.reason or "")
    if move is Move.FAIL:
        return TaskSkipped(is_failure=True, reason="what it needs has failed")
    return TaskSkipped(is_failure=False, reason="its rule does not want it")
