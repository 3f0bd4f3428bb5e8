"""Whatever decodes is decided: no record, of whatever values, can stop its shard.

Each history is a few requests and reports with values from the whole range of their types, most of them about the same
two tasks, so that they meet tasks in every status. All that follows from them must be possible to write.
"""

from __future__ import annotations

import typing
from random import Random
from typing import Any, NamedTuple

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.core.desk import Effects, Source
from scheduler.core.shard import Shard, ShardSettings
from schemas.codec import Codec
from schemas.messages import (
    AttemptStarted,
    DiscardTask,
    Message,
    RedriveTask,
    Replies,
    Report,
    Request,
    RetryPolicy,
    Status,
    SubmitTask,
    TaskSpec,
    WorkerHeartbeat,
)
from schemas.topics import TASK_REPORTS, TASK_REQUESTS
from tests.samples import strategy

CODEC = Codec.builtin()
NOW = 1_780_315_200_000_000
IDS = ("a", "b.c")
REQUESTS = typing.get_args(Request)
REPORTS = typing.get_args(Report)


def aimed(message: Any, shard: Shard, task_id: str, number: int) -> Any:
    """The message, such that it fits the task as it stands: about its attempt, with what is looked at made acceptable.

    The higher `number`, the more of a submission is acceptable.
    """
    replace = msgspec.structs.replace
    known = shard.known(task_id)
    version, attempt = (known.version, known.attempt) if known else (1, 0)
    if isinstance(message, WorkerHeartbeat):
        return replace(message, worker_id="w")
    if isinstance(message, RedriveTask | DiscardTask):
        shown = replace(message.task, task_id=task_id, status=Status.DEAD, spec=acceptable(message.task.spec, number))
        if number > 1:
            shown = replace(shown, version=version, attempt=attempt)
        return replace(message, task=shown, view_offset=2**40)
    if isinstance(message, SubmitTask):
        return replace(message, task_id=task_id, spec=acceptable(message.spec, number))
    attempt += isinstance(message, AttemptStarted)
    given = {
        "task_id": task_id,
        "attempt": attempt,
        "worker_id": "w",
        "task_version": version,
        "expected_version": None,
    }
    return replace(message, **{name: value for name, value in given.items() if hasattr(message, name)})


def acceptable(spec: TaskSpec, number: int) -> TaskSpec:
    """The specification with more or fewer of its values."""
    replace = msgspec.structs.replace
    spec = replace(spec, task_type="t", queue="q", tenant_id="t", metadata={}, idempotency_key=None)
    if number > 1:
        spec = replace(spec, timeout_ms=None, total_timeout_ms=None, lease_ms=5_000)
    if number > 2:
        spec = replace(spec, retry=RetryPolicy(delay_ms=0), scheduled_at=None)
    return TaskSpec(task_type="t", queue="q") if number > 3 else spec


class Step(NamedTuple):
    """An input, the task at which it is aimed, if it is, and how much time passes afterwards."""

    message: Message
    task_id: str | None
    number: int
    passes_us: int


STEPS = st.builds(
    Step,
    st.one_of([strategy(of) for of in (*REQUESTS, *REPORTS, SubmitTask, AttemptStarted)]),
    st.sampled_from((None, "a", "a", "b.c", "b.c", "forgotten")),
    st.integers(1, 6),
    st.sampled_from((0, 1_000, 10**9, 10**14)),
)


def written(shard: Shard, effects: Effects, offset: int, now: int) -> None:
    """Write all that follows; what has no room in Avro raises."""
    for event in effects.events:
        CODEC.encode(event)
    for _, reply in effects.replies:
        CODEC.encode(Replies(replies=(reply,)))
    for _, message in effects.messages:
        CODEC.encode(message)
    for signal in effects.signals:
        CODEC.encode(signal)
    shard.acknowledged(effects.events, offset, now)
    for _, ready in shard.dispatch(now, lambda _queue, _priority: 4):
        CODEC.encode(ready)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(STEPS, min_size=1, max_size=30))
def test_every_input_is_decided_and_what_follows_can_be_written(steps: list[Step]) -> None:
    shard, now = Shard(0, ShardSettings(), Random(1), NOW), NOW
    shard.on_loaded(now, -1)
    for number, task_id in enumerate(IDS):
        spec = TaskSpec(task_type="t", queue="q", retry=RetryPolicy(delay_ms=0, max_attempts=1_000))
        request = SubmitTask(request_id="r", spec=spec, submitted_at=0, task_id=task_id)
        start = AttemptStarted(task_id=task_id, task_version=1, attempt=1, worker_id="w", started_at=0)
        written(shard, shard.handle(request, Source(TASK_REQUESTS, number), now), number, now)
        written(shard, shard.handle(start, Source(TASK_REPORTS, number), now), number, now)
    for offset, step in enumerate(steps, start=len(IDS)):
        message = aimed(step.message, shard, step.task_id, step.number) if step.task_id else step.message
        topic = TASK_REQUESTS if isinstance(message, Request) else TASK_REPORTS
        written(shard, shard.handle(message, Source(topic, offset, b"key", CODEC.encode(message)), now), offset, now)
        now += step.passes_us
        shard.drained_at = now
        written(shard, shard.fire_timers(now), offset, now)
        shard.forget_ended(now)
    for task in (*shard.state.tasks.values(), *shard.state.ended.values()):
        CODEC.encode(task)
