"""Workflows in one shard: nodes become tasks as their rules are met, whatever crashes between any two events."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from scheduler.core.desk import Effects
from scheduler.core.graph import End, Node
from scheduler.core.shard import Entity, Shard, ShardSettings
from schemas.messages import (
    CancelWorkflow,
    CreateSchedule,
    EndedTask,
    Event,
    JoinRule,
    OnFailure,
    Outcome,
    Reply,
    RetryPolicy,
    ScheduleSpec,
    Status,
    SubmitWorkflow,
    Task,
    TaskCancelRequested,
    TaskSkipped,
    TaskSpec,
    TaskSubmitted,
    Workflow,
    WorkflowEnded,
    WorkflowNode,
    WorkflowSpec,
    WorkflowStatus,
)
from tests.cases.shard_stage import START, ShardStage
from tests.unit.test_graph import _random, reference

ONE_TRY = TaskSpec(task_type="t", retry=RetryPolicy(max_attempts=1))
DIAMOND = {"a": "", "b": "a", "c": "a", "d": "b c"}
KEPT_MS = ShardSettings().ended_kept_us // 1_000


def node(name: str, needs: Sequence[int] = (), **fields: Any) -> WorkflowNode:
    return WorkflowNode(name=name, template=0, payload=f'"{name}"'.encode(), needs=tuple(needs), **fields)


def nodes_of(**needs: str) -> tuple[WorkflowNode, ...]:
    names = list(needs)
    return tuple(node(name, [names.index(parent) for parent in needs[name].split()]) for name in names)


class Stage(ShardStage):
    """A shard of which another owner may take over at any event."""

    def __init__(self, settings: ShardSettings | None = None) -> None:
        self._settings = settings or ShardSettings()
        super().__init__(self._shard())

    def _shard(self) -> Shard:
        return Shard(0, self._settings, Random(1), START)

    def take_over(self, cut: int | None = None, checkpoint: Sequence[Entity] = ()) -> None:
        """Another owner has the events below `cut`, and reads the inputs behind them again."""
        del self.events[len(self.events) if cut is None else cut :]
        self.shard = self._shard()
        for entity in checkpoint:
            self.shard.restore(entity)
        for event in self.events:
            self.shard.evolve(event)
        self.shard.on_loaded(self.now, len(self.events) - 1)

    def start_workflow(self, nodes: Sequence[WorkflowNode], workflow_id: str = "w", **fields: Any) -> Reply:
        spec = WorkflowSpec(name="etl", specs=(ONE_TRY,), nodes=tuple(nodes), **fields)
        request = SubmitWorkflow(
            request_id="r",
            workflow_id=workflow_id,
            spec=spec,
            submitted_at=self.now,
            reply_to=0,
            fingerprint="f",
        )
        return answer(self.request(request))

    def cancel_workflow(self, workflow_id: str = "w", reason: str | None = None) -> Reply:
        return answer(self.request(CancelWorkflow(request_id="r", workflow_id=workflow_id, reason=reason, reply_to=0)))

    def pending(self) -> list[str]:
        tasks = self.shard.state.tasks.snapshot()
        return sorted(task.task_id.partition(".")[2] for task in tasks if task.status is Status.PENDING)

    def end(self, name: str, end: End = End.SUCCEEDED) -> None:
        """Let a node start and end like this, and what follows follow."""
        task_id = f"w.{name}"
        self.start(task_id)
        self.succeed(task_id) if end is End.SUCCEEDED else self.fail(task_id)
        self.let_time_work()

    @property
    def workflow(self) -> Workflow:
        return self.shard.state.workflows["w"]

    def known(self, name: str) -> Task | EndedTask | None:
        return self.shard.known(f"w.{name}")


def answer(effects: Effects) -> Reply:
    (_, reply), *_ = effects.replies
    return reply


def started(nodes: Sequence[WorkflowNode], **fields: Any) -> Stage:
    at = Stage()
    assert at.start_workflow(nodes, **fields).outcome is Outcome.ACCEPTED
    at.let_time_work()
    return at


def test_a_diamond_runs_from_its_root_to_its_join() -> None:
    at = started(nodes_of(**DIAMOND))
    assert at.pending() == ["a"]
    at.end("a")
    assert at.pending() == ["b", "c"]
    at.end("c")
    assert at.pending() == ["b"] and str(at.workflow.status) == "RUNNING"
    at.end("b")
    assert at.task("w.d").spec.payload == b'"d"'
    at.end("d")
    assert at.workflow.status is WorkflowStatus.SUCCEEDED
    assert [type(event.body).__name__ for event in at.events if event.entity_id == "w"] == [
        "WorkflowSubmitted",
        "WorkflowEnded",
    ]


def test_the_next_node_is_decided_in_the_turn_in_which_the_last_one_ended() -> None:
    at = started(nodes_of(a="", b="a"))
    at.start("w.a")
    at.succeed("w.a")
    assert at.shard.next_at() == 0, "the loop must not wait"


def test_what_a_failure_makes_impossible_is_skipped_and_the_rest_goes_on() -> None:
    at = started(nodes_of(a="", b="a", c="b", other="", last="other"))
    at.end("a", End.FAILED)
    skipped = [at.known("b"), at.known("c")]
    assert all(isinstance(one, EndedTask) and one.status is Status.CANCELLED for one in skipped)
    assert at.pending() == ["other"]
    at.end("other")
    at.end("last")
    assert at.workflow.status is WorkflowStatus.FAILED


def test_a_workflow_that_is_to_end_at_the_first_failure_cancels_the_rest() -> None:
    at = started(nodes_of(a="", b="", c="a b"), on_failure=OnFailure.CANCEL)
    at.start("w.b")
    at.end("a", End.FAILED)
    assert at.workflow.stopped_as is WorkflowStatus.FAILED
    assert at.workflow.reason == "a has failed"
    assert any(isinstance(event.body, TaskCancelRequested) and event.entity_id == "w.b" for event in at.events)
    at.succeed("w.b")
    at.let_time_work()
    assert at.workflow.status is WorkflowStatus.FAILED


def test_a_failure_branch_runs_in_place_of_what_failed() -> None:
    at = started([node("a"), node("mend", [0], join=JoinRule.ONE_FAILED), node("b", [1])])
    at.end("a", End.FAILED)
    assert at.pending() == ["mend"]
    at.end("mend")
    at.end("b")
    assert at.workflow.status is WorkflowStatus.SUCCEEDED


def test_what_is_not_wanted_is_no_failure() -> None:
    at = started([node("a"), node("mend", [0], join=JoinRule.ONE_FAILED)])
    at.end("a")
    known = at.known("mend")
    assert isinstance(known, EndedTask) and known.is_skipped
    assert at.workflow.status is WorkflowStatus.SUCCEEDED


def test_a_cancel_ends_what_waits_tells_what_runs_and_skips_what_had_not_begun() -> None:
    at = started(nodes_of(runs="", waits="", later="runs waits"))
    at.start("w.runs")
    assert at.cancel_workflow(reason="not needed").outcome is Outcome.CANCEL_REQUESTED
    assert at.cancel_workflow().detail == "it is ending already: not needed"
    at.let_time_work()
    assert at.known("waits").status is Status.CANCELLED  # type: ignore[union-attr]
    assert at.task("w.runs").cancel_requested_at is not None
    at.fail("w.runs")
    at.let_time_work()
    assert at.workflow.status is WorkflowStatus.CANCELLED
    later = next(event.body for event in at.events if event.entity_id == "w.later")
    assert later == TaskSkipped(is_failure=True, reason="not needed")
    assert at.cancel_workflow().outcome is Outcome.DUPLICATE


def test_a_workflow_has_a_time() -> None:
    at = started(nodes_of(a="", b="a"), timeout_ms=60_000)
    at.advance(59_999)
    at.let_time_work()
    assert at.workflow.stopped_as is None
    at.advance(1)
    at.let_time_work()
    assert (at.workflow.status, at.workflow.reason) == (WorkflowStatus.FAILED, "the workflow's time was over")


def test_it_is_forgotten_with_its_tasks() -> None:
    at = started(nodes_of(**DIAMOND))
    for name in DIAMOND:
        at.end(name)
    assert at.shard.memory()["ended"] == 4
    at.advance(KEPT_MS + 1)
    at.let_time_work()
    assert at.shard.memory()["ended"] == 0
    at.advance(25 * 3_600_000)
    at.let_time_work()
    assert set(at.shard.memory().values()) == {0}


def test_tasks_of_a_long_workflow_are_remembered_until_its_end() -> None:
    at = started(nodes_of(a="", b="a", c="a b"))
    at.end("a")
    at.advance(7 * 86_400_000)
    at.let_time_work()
    at.take_over()
    at.end("b")
    assert at.pending() == ["c"]


# --- requests ---------------------------------------------------------------------------------------------------------


def test_the_first_submission_under_an_id_wins() -> None:
    at = started(nodes_of(a=""))
    assert at.start_workflow(nodes_of(a="")).outcome is Outcome.DUPLICATE
    spec = WorkflowSpec(name="other", specs=(ONE_TRY,), nodes=nodes_of(a=""))
    other = SubmitWorkflow(request_id="r", workflow_id="w", spec=spec, submitted_at=1, reply_to=0, fingerprint="g")
    assert answer(at.request(other)).outcome is Outcome.CONFLICT


def test_ids_of_its_tasks_are_its_own() -> None:
    at = Stage()
    at.submit("w.b")
    refused = at.start_workflow(nodes_of(a="", b="a"))
    assert (refused.outcome, refused.detail) == (Outcome.CONFLICT, "there is a task with the id w.b")
    at = started(nodes_of(a="", b="a"))
    assert answer(at.submit("w.b")).detail == "task_id begins like those of the tasks of a workflow"


def test_a_workflow_and_a_schedule_do_not_share_an_id() -> None:
    at = started(nodes_of(a=""))
    spec = ScheduleSpec(name="s", task=ONE_TRY, every_ms=60_000)
    for schedule_id, said in (("w", "there is a workflow with this id"), ("s", None)):
        request = CreateSchedule(request_id="r", schedule_id=schedule_id, spec=spec, reply_to=0)
        assert answer(at.request(request)).detail == said
    assert at.start_workflow(nodes_of(a=""), workflow_id="s").detail == "there is a schedule with this id"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"workflow_id": "a.b"}, "workflow_id must be"),
        ({"nodes": ()}, "nodes: there is no task"),
        ({"nodes": nodes_of(a="a")}, "nodes[0].dependencies: these wait for each other: a -> a"),
        ({"nodes": (node("a"), node("a"))}, "nodes[1].name a is there twice"),
        ({"nodes": (node("a", [5]),)}, "nodes[0].needs must be numbers of nodes"),
        ({"nodes": (node("a"), node("b", [0, 0]))}, "nodes[1].needs must be numbers of nodes, each once"),
        ({"nodes": (node("a b"),)}, "nodes[0].name must be"),
        ({"timeout_ms": 0}, "timeout_ms must be from 1"),
        ({"on_failure": OnFailure.UNKNOWN}, "on_failure is not known here"),
        ({"metadata": {"a": "x" * 5_000}}, "metadata must have at most"),
    ],
)
def test_what_cannot_run_is_refused_with_the_field(fields: dict[str, Any], said: str) -> None:
    at = Stage()
    nodes = fields.pop("nodes", nodes_of(a=""))
    refused = at.start_workflow(nodes, **fields)
    assert refused.outcome is Outcome.INVALID
    assert said in (refused.detail or "")


def test_a_shard_without_room_lets_nodes_wait() -> None:
    at = Stage(ShardSettings(tasks_max=2))
    at.start_workflow(nodes_of(a="", b="", c=""))
    at.let_time_work()
    assert at.pending() == ["a", "b"]
    at.end("a")
    at.advance(1_000)
    at.let_time_work()
    assert at.pending() == ["b", "c"]


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_between_any_two_events_changes_nothing() -> None:
    """Each prefix of the log is taken over, and played to its end."""
    whole = started(nodes_of(**DIAMOND, e="d", f="c"))
    for name in ("a", "b", "c", "d", "e", "f"):
        whole.end(name)
    for cut in range(1, len(whole.events)):
        at = Stage()
        at.events = list(whole.events)
        at.now = whole.now
        at.take_over(cut)
        play(at, dict.fromkeys("abcdef", End.SUCCEEDED))
        assert at.workflow.status is WorkflowStatus.SUCCEEDED, cut
        check_once(at.events)


def play(at: Stage, wanted: dict[str, End]) -> None:
    """Let all that is there run to its end."""
    for _ in range(200):
        at.let_time_work()
        live = [task for task in at.shard.state.tasks.snapshot() if task.status in (Status.PENDING, Status.RUNNING)]
        if not live:
            return
        task = live[0]
        if task.status is Status.PENDING:
            at.start(task.task_id)
        name = task.task_id.partition(".")[2]
        at.succeed(task.task_id) if wanted[name] is End.SUCCEEDED else at.fail(task.task_id)
    raise AssertionError("it does not end")


def check_once(events: Sequence[Event]) -> None:
    begun = [event.entity_id for event in events if isinstance(event.body, TaskSubmitted | TaskSkipped)]
    assert len(begun) == len(set(begun)), "a node was begun twice"
    assert sum(isinstance(event.body, WorkflowEnded) for event in events) == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_with_crashes_end_as_the_rules_say(seed: int) -> None:
    """Against the reference of the graph's tests; now and then another owner loads the log, or a checkpoint."""
    rng = Random(seed)
    graph: list[Node] = list(_random(rng))
    wanted = {number: rng.choice((End.SUCCEEDED, End.SUCCEEDED, End.FAILED)) for number in range(len(graph))}
    expected = reference(graph, wanted)
    at = started([node(one.name, one.needs, join=one.join, at_least=one.at_least) for one in graph])
    for _ in range(400):
        at.let_time_work()
        live = [task for task in at.shard.state.tasks.snapshot() if task.status in (Status.PENDING, Status.RUNNING)]
        if not live:
            break
        task = rng.choice(live)
        if task.status is Status.PENDING:
            at.start(task.task_id)
        elif wanted[int(task.task_id.partition(".")[2])] is End.SUCCEEDED:
            at.succeed(task.task_id)
        else:
            at.fail(task.task_id)
        if rng.random() < 0.3:
            at.take_over(max(1, len(at.events) - rng.randrange(3)))
        elif rng.random() < 0.1:
            from_checkpoint(at)
    ends = {int(one.name): ended_as(at.known(one.name)) for one in graph}
    assert ends == expected
    has_children = {parent for one in graph for parent in one.needs}
    failed = any(end in (End.FAILED, End.UPSTREAM_FAILED) for n, end in expected.items() if n not in has_children)
    assert at.workflow.status is (WorkflowStatus.FAILED if failed else WorkflowStatus.SUCCEEDED)
    check_once(at.events)


def from_checkpoint(at: Stage) -> None:
    """Another owner loads what a checkpoint has, and no event."""
    state = at.shard.state
    entities: list[Entity] = [*state.tasks.snapshot(), *state.ended.values(), *state.workflows.values()]
    at.shard = at._shard()
    for entity in entities:
        at.shard.restore(entity)
    at.shard.on_loaded(at.now, len(at.events) - 1)


def ended_as(known: Task | EndedTask | None) -> End:
    assert isinstance(known, EndedTask)
    if known.status is Status.SUCCEEDED:
        return End.SUCCEEDED
    if known.is_skipped:
        return End.SKIPPED
    return End.FAILED if known.attempt else End.UPSTREAM_FAILED


def test_a_wide_fan_is_begun_in_portions() -> None:
    at = Stage()
    at.start_workflow([node("root"), *(node(f"n{number}", [0]) for number in range(2_000))])
    at.let_time_work()
    at.start("w.root")
    at.succeed("w.root")
    assert len(at.shard.fire_timers(at.now).events) <= 600
