"""C15: the delay of retry k is min(cap, base·factor^(k-1)) for every k, and nothing overflows.

Chosen: a policy has always a cap, one hour unless another one is given; the longest that is accepted is 366 days.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.desk import Source
from scheduler.core.policy import backoff_ms, retry_delay_ms
from scheduler.core.shard import Shard, ShardSettings
from schemas.limits import ATTEMPTS_MAX, DURATION_MS_MAX
from schemas.messages import (
    AttemptFailed,
    AttemptStarted,
    Backoff,
    ErrorKind,
    Jitter,
    Report,
    RetryPolicy,
    Status,
    SubmitTask,
    TaskError,
    TaskSpec,
)
from schemas.topics import TASK_REPORTS, TASK_REQUESTS
from tests.cases.shard_stage import open_slots
from tests.harness import TASKS, Api, running

NOW = 1_780_315_200_000_000
DOUBLING = RetryPolicy(delay_ms=1_000, factor=2.0, cap_ms=3_600_000, jitter=Jitter.NONE, max_attempts=ATTEMPTS_MAX)
ERROR = TaskError(kind=ErrorKind.RAISED, type="ConnectionError", message="refused")
JITTERS = st.sampled_from(list(Jitter))


@pytest.mark.parametrize(
    ("retry", "seconds"),
    [(1, 1), (2, 2), (12, 2048), (13, 3600), (47, 3600), (1_025, 3600), (2_000, 3600), (100_000, 3600)],
)
def test_the_delay_follows_the_formula_up_to_the_cap(retry: int, seconds: int) -> None:
    assert retry_delay_ms(DOUBLING, retry, 0, Random(15)) == seconds * 1_000


def test_the_largest_cap_is_a_documented_bound() -> None:
    policy = RetryPolicy(delay_ms=1_000, factor=5.0, cap_ms=DURATION_MS_MAX, jitter=Jitter.NONE)
    assert backoff_ms(policy, 10) == 5**9 * 1_000
    assert backoff_ms(policy, 17) == DURATION_MS_MAX
    with running(None, port=0) as engine, Api(engine.address) as api:
        days = DURATION_MS_MAX / 86_400_000
        accepted = {"task_type": "t", "retry_cap_seconds": days * 86_400, "retry_factor": 5}
        assert api("POST", TASKS, json=accepted).status_code == 202
        for field, value in (("retry_cap_seconds", days * 86_400 + 1), ("retry_factor", 1e308), ("retry_factor", 0.5)):
            answer = api("POST", TASKS, json={"task_type": "t", field: value})
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


@given(
    st.builds(
        RetryPolicy,
        backoff=st.sampled_from([Backoff.EXPONENTIAL, Backoff.LINEAR, Backoff.FIXED]),
        jitter=JITTERS,
        delay_ms=st.integers(0, DURATION_MS_MAX),
        factor=st.floats(1, 1000),
        cap_ms=st.integers(0, DURATION_MS_MAX),
    ),
    st.integers(1, ATTEMPTS_MAX),
    st.integers(0, DURATION_MS_MAX),
    st.randoms(use_true_random=False),
)
def test_every_policy_gives_a_delay_within_its_cap(policy: RetryPolicy, retry: int, last_ms: int, rng: Random) -> None:
    assert 0 <= backoff_ms(policy, retry) <= policy.cap_ms
    assert 0 <= retry_delay_ms(policy, retry, last_ms, rng) <= policy.cap_ms


@given(st.integers(1, 200), st.randoms(use_true_random=False))
def test_without_jitter_a_delay_never_shrinks(retry: int, rng: Random) -> None:
    assert retry_delay_ms(DOUBLING, retry, 0, rng) <= retry_delay_ms(DOUBLING, retry + 1, 0, rng)


def test_a_task_that_failed_two_thousand_times_still_waits_for_its_next_attempt() -> None:
    shard, now, offset = Shard(0, ShardSettings(), Random(15), NOW), NOW, 0
    shard.on_loaded(now, -1)
    request = SubmitTask(request_id="r", task_id="t", spec=TaskSpec(task_type="t", retry=DOUBLING), submitted_at=now)
    shard.handle(request, Source(TASK_REQUESTS, 0), now)

    def tell(report: Report) -> None:
        nonlocal offset
        shard.handle(report, Source(TASK_REPORTS, offset), now)
        offset += 1

    for attempt in range(1, 2_001):
        task = shard.state.tasks["t"]
        started = AttemptStarted(task_id="t", task_version=task.version, attempt=attempt, worker_id="w", started_at=now)
        tell(started)
        tell(AttemptFailed(task_id="t", attempt=attempt, worker_id="w", finished_at=now, error=ERROR))
        task = shard.state.tasks["t"]
        assert task.status is Status.RETRYING
        assert task.next_run_at == now + min(3_600, 2 ** (attempt - 1)) * 1_000_000
        now = task.next_run_at or 0
        open_slots(shard, now)
        shard.fire_timers(now)
    assert shard.state.tasks["t"].failure_count == 2_000
