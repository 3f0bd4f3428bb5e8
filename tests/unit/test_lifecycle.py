"""The table of transitions is the law: whatever it does not name is refused and changes nothing."""

from __future__ import annotations

import itertools
import typing

import pytest
from msgspec.structs import replace

from scheduler.core.schedule import SCHEDULE_BODIES
from scheduler.core.task import NOT_KNOWN, TERMINAL, TRANSITIONS, IllegalTransition, evolve
from scheduler.core.workflow import BODIES as WORKFLOW_BODIES
from schemas.messages import (
    Event,
    EventBody,
    LimitChanged,
    RequestForwarded,
    ShardOpened,
    Status,
    Task,
    TaskRejected,
    TaskSkipped,
    TaskSpec,
    TaskSucceeded,
)
from tests.samples import full, minimal

STATUSES = [NOT_KNOWN, *(status for status in Status if status not in (Status.UNKNOWN, Status.SUBMITTED))]
OTHERS = {TaskRejected, RequestForwarded, ShardOpened, LimitChanged, TaskSkipped, *SCHEDULE_BODIES, *WORKFLOW_BODIES}
BODIES = [body for body in typing.get_args(EventBody) if body not in OTHERS]


def a_task(status: Status | None) -> Task | None:
    if status is None:
        return None
    spec = TaskSpec(task_type="t")
    return Task(task_id="a", spec=spec, status=status, version=3, created_at=1, updated_at=2, attempt=1, worker_id="w")


def an_event(body: typing.Any) -> Event:
    return Event(entity_id="a", tenant_id="default", version=4, epoch=1, at=10, body=body)


def test_the_table_names_every_event_of_a_task() -> None:
    assert set(TRANSITIONS) == set(BODIES)


@pytest.mark.parametrize(("body", "status"), list(itertools.product(BODIES, STATUSES)))
def test_an_event_is_refused_unless_the_table_allows_it(body: type, status: Status | None) -> None:
    row = TRANSITIONS[body]
    for sample in (minimal(body), full(body)):
        if status in row.before:
            try:
                after = evolve(a_task(status), an_event(sample))
            except IllegalTransition:
                continue  # a sample that leads where the table does not let it
            assert after.status in row.after
            assert (after.version, after.updated_at) == (4, 10)
        else:
            with pytest.raises(IllegalTransition):
                evolve(a_task(status), an_event(sample))


def test_only_an_operator_brings_an_ended_task_back() -> None:
    revived = {body.__name__ for body, row in TRANSITIONS.items() if row.before & TERMINAL}
    assert revived == {"TaskRedriven", "TaskDiscarded"}


def test_events_that_change_no_task_are_refused() -> None:
    with pytest.raises(IllegalTransition):
        evolve(a_task(Status.PENDING), an_event(ShardOpened(owner="x")))


def test_folding_leaves_the_old_task_as_it_was() -> None:
    before = a_task(Status.RUNNING)
    assert before is not None
    copy = replace(before)
    evolve(before, an_event(full(TaskSucceeded)))
    assert before == copy
