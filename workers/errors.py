"""What a handler can say by raising, and what can be wrong with a handler or its arguments.

What a handler raises decides what comes next:

PermanentError   trying again is pointless: the task fails
RetryableError   the same attempt may succeed later (and, if it says so, not before `after`)
Snooze           not now: call me again later; this uses up no attempt
TaskCancelled    I stopped because I was told to

What is said to the one who writes or calls a handler:

RegistrationError   the handler can't be registered like this
ArgumentError       the arguments don't fit the handler; permanent
NotSerialisable     the value can't be stored as JSON
"""

from __future__ import annotations

import math
from datetime import timedelta

from schemas.limits import DURATION_MS_MAX


class PermanentError(Exception):
    """Trying again is pointless: the task ends as FAILED."""


class RetryableError(Exception):
    """The same attempt may succeed later; `after` (seconds or a timedelta) replaces the delay of the retry policy."""

    def __init__(self, message: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(message)
        self.after_ms = None if after is None else milliseconds(after, "after")


class Snooze(Exception):
    """Call the handler again in `delay` (seconds or a timedelta); this uses up no attempt."""

    def __init__(self, delay: float | timedelta, reason: str | None = None) -> None:
        super().__init__(reason or f"snoozed for {delay}")
        self.delay_ms = milliseconds(delay, "delay")
        self.reason = reason


class TaskCancelled(BaseException):
    """The running task is to stop. Not an `Exception`, so that a handler's `except Exception` lets it through."""


class RegistrationError(ValueError):
    """A handler can't be registered like this; the message names it and says what is allowed."""


class ArgumentError(ValueError):
    """The arguments don't fit the handler's parameters; the message names the parameter."""


class NotSerialisable(ValueError):
    """A value can't be stored as JSON; the message says why."""


def milliseconds(duration: float | timedelta, field: str) -> int:
    """A duration in seconds, or a timedelta, as whole milliseconds. ValueError names `field` and what is allowed."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    if not math.isfinite(seconds) or not 0 <= seconds * 1000 <= DURATION_MS_MAX:
        raise ValueError(f"{field}: {duration!r} is not allowed; seconds or a timedelta, from 0 to 366 days")
    return round(seconds * 1000)
