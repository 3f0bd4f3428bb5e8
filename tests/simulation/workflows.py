"""Workflows in the simulation: what clients ask for, and what must be true of what became of them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from scheduler.core import workflow
from scheduler.core.graph import End
from scheduler.core.task import TERMINAL
from schemas.messages import (
    CancelWorkflow,
    Event,
    JoinRule,
    OnFailure,
    Request,
    RetryPolicy,
    Status,
    SubmitWorkflow,
    Task,
    TaskSkipped,
    TaskSpec,
    Workflow,
    WorkflowNode,
    WorkflowSpec,
    WorkflowStatus,
    WorkflowSubmitted,
)
from tests.graphs import FAILURES, wanted_of

_KEPT_US = {False: 0, True: 0}


def request_of(rng: Random, request_id: str, now: int, number: int) -> Request:
    """The workflow of this number, or its end."""
    workflow_id = f"flow-{number}"
    if rng.random() < 0.15:
        return CancelWorkflow(request_id=request_id, workflow_id=workflow_id, reply_to=0)
    templates = tuple(
        TaskSpec(
            task_type="work",
            tenant_id="t",
            queue=queue,
            lease_ms=5_000,
            retry=RetryPolicy(max_attempts=2, delay_ms=rng.choice((0, 500, 40_000))),
        )
        for queue in ("default", "bulk")
    )
    nodes = []
    for number in range(rng.randint(1, 6)):
        needs = tuple(rng.sample(range(number), rng.randint(0, min(number, 3))))
        join = rng.choice([one for one in JoinRule if one is not JoinRule.UNKNOWN]) if needs else JoinRule.ALL_SUCCEEDED
        at_least = rng.randint(1, len(needs)) if join is JoinRule.AT_LEAST else 0
        template = rng.randrange(len(templates))
        nodes.append(
            WorkflowNode(name=f"n{number}", template=template, payload=b"", needs=needs, join=join, at_least=at_least)
        )
    spec = WorkflowSpec(
        name=workflow_id,
        tenant_id="t",
        specs=templates,
        nodes=tuple(nodes),
        on_failure=rng.choice((OnFailure.CONTINUE, OnFailure.CANCEL)),
        timeout_ms=rng.choice((None, None, 30_000)),
    )
    return SubmitWorkflow(
        request_id=request_id, workflow_id=workflow_id, spec=spec, submitted_at=now, fingerprint="f", reply_to=0
    )


class Flows:
    """The workflows as the log tells of them."""

    def __init__(self) -> None:
        self.known: dict[str, Workflow] = {}
        self.specs: dict[str, WorkflowSpec] = {}
        self.skipped: dict[str, TaskSkipped] = {}

    def fold(self, event: Event, tasks: Mapping[str, Task]) -> bool:
        """Whether the event counts. AssertionError: it must not have happened."""
        if isinstance(event.body, TaskSkipped):
            if event.entity_id in self.skipped:
                return False
            assert event.entity_id not in tasks, f"{event.entity_id} is skipped, and was begun"
            self.skipped[event.entity_id] = event.body
            return True
        before = self.known.get(event.entity_id)
        if before is not None and before.status is not WorkflowStatus.RUNNING:
            before = before if event.version != 1 or event.at == before.created_at else None
        if event.version != (1 if before is None else before.version + 1):
            return False
        if isinstance(event.body, WorkflowSubmitted):
            assert event.entity_id not in self.specs, f"{event.entity_id} was accepted twice"
            self.specs[event.entity_id] = event.body.spec
        self.known[event.entity_id] = workflow.evolve(before, event, _KEPT_US)
        return True

    def problem(self, tasks: Mapping[str, Task]) -> str | None:
        """What is wrong at the end."""
        for workflow_id, one in self.known.items():
            if one.status is WorkflowStatus.RUNNING:
                return f"{workflow_id} never ended"
            ends = {
                number: self._end(workflow.node_id(workflow_id, node.name), tasks)
                for number, node in enumerate(self.specs[workflow_id].nodes)
            }
            if missing := [number for number, end in ends.items() if end is None]:
                return f"nodes {missing} of {workflow_id} never ended"
            if problem := self._rule_problem(one, {n: end for n, end in ends.items() if end is not None}):
                return problem
        return None

    def _end(self, task_id: str, tasks: Mapping[str, Task]) -> End | None:
        if (skipped := self.skipped.get(task_id)) is not None:
            return End.UPSTREAM_FAILED if skipped.is_failure else End.SKIPPED
        task = tasks.get(task_id)
        if task is None or task.status not in TERMINAL:
            return None
        return End.SUCCEEDED if task.status is Status.SUCCEEDED else End.FAILED

    def _rule_problem(self, one: Workflow, ends: Mapping[int, End]) -> str | None:
        """Each node was run or not as its rule says of its parents, but for those of workflows that were stopped."""
        nodes = workflow.graph_of(self.specs[one.workflow_id])
        for number, node in enumerate(nodes):
            wanted, end = wanted_of(node, [ends[parent] for parent in node.needs]), ends[number]
            was_run = end in (End.SUCCEEDED, End.FAILED)
            is_right = was_run if wanted is None else end is wanted
            if not is_right and not (one.stopped_as is not None and end is End.UPSTREAM_FAILED):
                return f"{one.workflow_id}: {node} is {end}, its parents {[ends[parent] for parent in node.needs]}"
        inner = {parent for node in nodes for parent in node.needs}
        has_failed = any(end in FAILURES for number, end in ends.items() if number not in inner)
        expected = one.stopped_as or (WorkflowStatus.FAILED if has_failed else WorkflowStatus.SUCCEEDED)
        return None if one.status is expected else f"{one.workflow_id} is {one.status}, not {expected}"
