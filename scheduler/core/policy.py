"""Whether, and after how long, a failed attempt is tried again. Total: no input raises or overflows."""

from __future__ import annotations

import math
from random import Random

from schemas.limits import DURATION_MS_MAX
from schemas.messages import Backoff, Jitter, RetryPolicy, TaskError, Verdict


def is_permanent(policy: RetryPolicy, error: TaskError) -> bool:
    """Whether trying again is pointless: by the handler's word, else the policy's lists, else a guess by the class.

    The lists hold class names; one matches the error's class or any of its bases, qualified or not. With a `retry_on`
    list, what is not on it is permanent.
    """
    if error.verdict in (Verdict.PERMANENT, Verdict.RETRYABLE):
        return error.verdict is Verdict.PERMANENT
    names = _names(error)
    if names.intersection(policy.give_up_on):
        return True
    if policy.retry_on:
        return not names.intersection(policy.retry_on)
    return error.verdict is Verdict.LIKELY_PERMANENT


def _names(error: TaskError) -> set[str]:
    qualified = {error.type, *error.bases}
    return qualified | {name.rpartition(".")[2] for name in qualified}


def retry_delay_ms(policy: RetryPolicy, retry: int, last_delay_ms: int, rng: Random) -> int:
    """Milliseconds before retry number `retry` (from 1), with jitter; never above the cap.

    Jitter as in M. Brooker, "Exponential Backoff And Jitter" (AWS Architecture Blog, 2015): full draws from 0 to the
    delay, equal from half of it, decorrelated from the base to three times the last delay.
    """
    cap = min(policy.cap_ms, DURATION_MS_MAX)
    base = min(policy.delay_ms, cap)
    if policy.jitter is Jitter.DECORRELATED:
        return min(cap, rng.randint(base, max(base, 3 * max(last_delay_ms, base))))
    delay = backoff_ms(policy, retry)
    if policy.jitter is Jitter.FULL:
        return rng.randint(0, delay)
    if policy.jitter is Jitter.EQUAL:
        return delay - delay // 2 + rng.randint(0, delay // 2)
    return delay


def backoff_ms(policy: RetryPolicy, retry: int) -> int:
    """The delay of retry `retry` (from 1) before jitter: exponential `delay·factor^(k-1)`, linear `delay·k`, fixed."""
    cap = min(policy.cap_ms, DURATION_MS_MAX)
    if policy.backoff is Backoff.FIXED or policy.delay_ms <= 0:
        return max(0, min(policy.delay_ms, cap))
    if policy.backoff is Backoff.LINEAR:
        return min(policy.delay_ms * retry, cap)
    # The power is compared with the cap as a logarithm first: 2.0 ** 1024 would overflow.
    growth = (retry - 1) * math.log(max(policy.factor, 1.0))
    if growth >= math.log(max(cap, 1) / policy.delay_ms):
        return cap
    return min(cap, round(policy.delay_ms * policy.factor ** (retry - 1)))
