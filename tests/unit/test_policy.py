"""When a failed attempt is tried again: the formulas, their bounds, and who is told apart."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler.core.policy import backoff_ms, is_permanent, retry_delay_ms
from schemas.limits import DURATION_MS_MAX
from schemas.messages import Backoff, ErrorKind, Jitter, RetryPolicy, TaskError, Verdict

POLICY = RetryPolicy(delay_ms=60_000, jitter=Jitter.NONE)


def test_the_default_is_60_120_240_seconds() -> None:
    assert [retry_delay_ms(POLICY, retry, 0, Random(0)) // 1000 for retry in (1, 2, 3)] == [60, 120, 240]


@pytest.mark.parametrize(
    ("backoff", "seconds"),
    [(Backoff.FIXED, [60, 60, 60]), (Backoff.LINEAR, [60, 120, 180]), (Backoff.EXPONENTIAL, [60, 120, 240])],
)
def test_backoff_grows_as_it_says(backoff: Backoff, seconds: list[int]) -> None:
    policy = replace(POLICY, backoff=backoff)
    assert [backoff_ms(policy, retry) // 1000 for retry in (1, 2, 3)] == seconds


policies = st.builds(
    RetryPolicy,
    backoff=st.sampled_from(Backoff),
    jitter=st.sampled_from(Jitter),
    delay_ms=st.integers(0, DURATION_MS_MAX),
    factor=st.floats(1, 1000),
    cap_ms=st.integers(0, DURATION_MS_MAX),
)


@given(policy=policies, retry=st.integers(1, 10**6), last=st.integers(0, DURATION_MS_MAX), seed=st.integers())
def test_a_delay_is_between_zero_and_the_cap_whatever_is_asked(
    policy: RetryPolicy, retry: int, last: int, seed: int
) -> None:
    assert 0 <= retry_delay_ms(policy, retry, last, Random(seed)) <= policy.cap_ms


@given(policy=policies, retry=st.integers(1, 200), seed=st.integers())
def test_jitter_stays_in_its_range(policy: RetryPolicy, retry: int, seed: int) -> None:
    plain, rng = backoff_ms(policy, retry), Random(seed)
    low = {Jitter.NONE: plain, Jitter.EQUAL: plain // 2, Jitter.FULL: 0}
    if policy.jitter in low:
        assert low[policy.jitter] <= retry_delay_ms(policy, retry, 0, rng) <= plain
    else:
        base = min(policy.delay_ms, policy.cap_ms)
        last = retry_delay_ms(policy, retry, 0, rng)
        assert base <= last <= min(policy.cap_ms, 3 * base) or last == policy.cap_ms
        assert retry_delay_ms(policy, retry, last, rng) <= min(policy.cap_ms, max(3 * last, 3 * base))


def error(verdict: Verdict = Verdict.UNKNOWN) -> TaskError:
    return TaskError(
        kind=ErrorKind.RAISED,
        type="shop.errors.OutOfStock",
        bases=("shop.errors.OrderError", "builtins.Exception"),
        message="",
        verdict=verdict,
    )


@pytest.mark.parametrize(
    ("retry_on", "give_up_on", "verdict", "expected"),
    [
        ((), (), Verdict.UNKNOWN, False),
        ((), ("OutOfStock",), Verdict.UNKNOWN, True),
        ((), ("shop.errors.OrderError",), Verdict.UNKNOWN, True),
        ((), ("OrderErr",), Verdict.UNKNOWN, False),
        (("OrderError",), (), Verdict.UNKNOWN, False),
        (("TimeoutError",), (), Verdict.UNKNOWN, True),
        (("OrderError",), ("OutOfStock",), Verdict.UNKNOWN, True),
        ((), ("OutOfStock",), Verdict.RETRYABLE, False),
        (("OutOfStock",), (), Verdict.PERMANENT, True),
        ((), (), Verdict.LIKELY_PERMANENT, True),
        (("OrderError",), (), Verdict.LIKELY_PERMANENT, False),
        ((), ("OrderError",), Verdict.LIKELY_RETRYABLE, True),
        (("TimeoutError",), (), Verdict.LIKELY_RETRYABLE, True),
    ],
)
def test_what_is_permanent(
    retry_on: tuple[str, ...], give_up_on: tuple[str, ...], verdict: Verdict, expected: bool
) -> None:
    policy = replace(POLICY, retry_on=retry_on, give_up_on=give_up_on)
    assert is_permanent(policy, error(verdict)) is expected
