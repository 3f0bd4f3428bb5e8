"""From what a handler did to what is reported. Pure: no clock, chance, threads or logging; total: nothing raises.

    returned value ─► succeeded ─┐
    exception ──────► failed ────┼─► Outcome ─► report ─► message
    time over, crash ────────────┘

An Outcome crosses process boundaries, so it holds text and bytes only, never the exception or the value itself.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import TypeAlias

import msgspec

from schemas.limits import DURATION_MS_MAX, RESULT_MAX
from schemas.messages import (
    AttemptCancelled,
    AttemptCrashed,
    AttemptFailed,
    AttemptReturned,
    AttemptSnoozed,
    AttemptStarted,
    AttemptSucceeded,
    ErrorKind,
    ReadyTask,
    TaskError,
    Verdict,
)
from workers.errors import ArgumentError, NotSerialisable, PermanentError, RetryableError, Snooze
from workers.values import encode_json

MESSAGE_MAX = 4 * 1024  # bytes of UTF-8; a report with all its texts stays far below a record's limit
TRACEBACK_MAX = 16 * 1024
TRACEBACK_HEAD = 4 * 1024  # the first causes; the rest of the room is for the end, where the error is
NAME_MAX = 256
BASES_MAX = 32
KNOWN_TYPES_MAX = 20  # task types that a message lists

_CALLER = "workers.calls"  # the module that calls handlers
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_RETRYABLE_STATUS = {408, 425, 429}


class Succeeded(msgspec.Struct, frozen=True, tag=True):
    """The handler returned, and its result can be stored."""

    result: bytes


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The handler raised, its result can't be stored, or its time was over."""

    error: TaskError
    retry_after_ms: int | None = None


class Snoozed(msgspec.Struct, frozen=True, tag=True):
    """The handler asked to be called later."""

    delay_ms: int
    reason: str | None = None


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The handler stopped because it was told to."""


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """The process that ran the handler died."""

    detail: str


class GivenBack(msgspec.Struct, frozen=True, tag=True):
    """The worker stopped the attempt for its own reasons."""

    reason: str


Outcome: TypeAlias = Succeeded | Failed | Snoozed | Cancelled | Crashed | GivenBack
EndReport: TypeAlias = (
    AttemptSucceeded | AttemptFailed | AttemptSnoozed | AttemptCancelled | AttemptCrashed | AttemptReturned
)


# --- outcomes ---------------------------------------------------------------------------------------------------------


def succeeded(value: object) -> Succeeded | Failed:
    """What a returned value means: success, unless it can't be stored."""
    try:
        return Succeeded(encode_json(value, RESULT_MAX))
    except NotSerialisable as error:
        message = f"result not serialisable: {error}"
    return Failed(
        TaskError(
            kind=ErrorKind.RESULT,
            type="tidewheel.NotSerialisable",
            message=storable(message, MESSAGE_MAX),
            bases=("ValueError", "Exception", "BaseException"),
            verdict=Verdict.PERMANENT,
        )
    )


def misfit(returned: object, count: int) -> Failed | None:
    """What is wrong with what a batch handler returned for `count` items, for each of them; None: it fits."""
    if not isinstance(returned, list | tuple):
        message = f"a batch handler must return a list of {count} results, one for each item, not {_kind(returned)}"
    elif len(returned) != count:
        message = f"a batch handler returned {len(returned)} results for {count} items"
    else:
        return None
    return Failed(
        TaskError(
            kind=ErrorKind.RESULT,
            type="tidewheel.WrongBatchResult",
            message=message,
            bases=("ValueError", "Exception", "BaseException"),
            verdict=Verdict.PERMANENT,
        )
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type_name(type(value))}"


def failed(error: BaseException, now: int) -> Failed | Snoozed:
    """What a raised exception means; `now` (µs) is for a Retry-After that is a date."""
    try:
        return _failed(error, now)
    except BaseException as problem:  # an exception class can sabotage anything, even isinstance
        name = type_name(type(error))
        message = f"(the error can't be described: {type_name(type(problem))})"
        return Failed(TaskError(kind=ErrorKind.RAISED, type=name, message=message))


def _failed(error: BaseException, now: int) -> Failed | Snoozed:
    if isinstance(error, Snooze):
        return Snoozed(error.delay_ms, None if error.reason is None else storable(str(error.reason), MESSAGE_MAX))
    verdict = verdict_of(error)
    is_retryable = verdict in (Verdict.RETRYABLE, Verdict.LIKELY_RETRYABLE)
    retry_after_ms = _retry_after_ms(error, now) if is_retryable else None
    return Failed(error_of(error, verdict), retry_after_ms)


def timed_out(limit_ms: int) -> Failed:
    """The attempt used up its time."""
    return Failed(
        TaskError(
            kind=ErrorKind.TIMEOUT,
            type="tidewheel.AttemptTimeout",
            message=f"the attempt was stopped after its timeout of {limit_ms} ms",
            bases=("TimeoutError", "OSError", "Exception", "BaseException"),
            verdict=Verdict.LIKELY_RETRYABLE,
        )
    )


def deadline_passed() -> Failed:
    """The time that the task has in total is over. What follows is for the shard to say."""
    return Failed(
        TaskError(
            kind=ErrorKind.DEADLINE,
            type="tidewheel.DeadlineExceeded",
            message="the attempt was stopped because the task's total time is over",
            bases=("TimeoutError", "OSError", "Exception", "BaseException"),
        )
    )


def unknown_type(task_type: str, known: Iterable[str]) -> Failed:
    """No handler of this worker has the name; another one's may, for instance during a rolling deployment."""
    names = sorted(known)
    listed = ", ".join(names[:KNOWN_TYPES_MAX]) or "none"
    more = f" and {len(names) - KNOWN_TYPES_MAX} more" if len(names) > KNOWN_TYPES_MAX else ""
    return Failed(
        TaskError(
            kind=ErrorKind.UNKNOWN_TYPE,
            type="tidewheel.UnknownTaskType",
            message=storable(f"task type {task_type!r} is not known here; known are: {listed}{more}", MESSAGE_MAX),
            verdict=Verdict.RETRYABLE,
        )
    )


# --- reports ----------------------------------------------------------------------------------------------------------


def started(ready: ReadyTask, worker_id: str, at: int) -> AttemptStarted:
    """The report that an attempt begins."""
    return AttemptStarted(
        task_id=ready.task_id,
        task_version=ready.task_version,
        attempt=ready.attempt,
        worker_id=worker_id,
        started_at=at,
    )


def given_back(ready: ReadyTask, worker_id: str, at: int, reason: str) -> AttemptReturned:
    """The report that an attempt was not begun here."""
    return AttemptReturned(
        task_id=ready.task_id,
        attempt=ready.attempt,
        worker_id=worker_id,
        returned_at=at,
        is_started=False,
        reason=reason,
    )


def report(ready: ReadyTask, outcome: Outcome, worker_id: str, at: int) -> EndReport:
    """The report that an attempt ended."""
    task_id, attempt = ready.task_id, ready.attempt
    match outcome:
        case Succeeded(result=result):
            return AttemptSucceeded(
                task_id=task_id, attempt=attempt, worker_id=worker_id, finished_at=at, result=result
            )
        case Failed(error=error, retry_after_ms=retry_after_ms):
            return AttemptFailed(
                task_id=task_id,
                attempt=attempt,
                worker_id=worker_id,
                finished_at=at,
                error=error,
                retry_after_ms=retry_after_ms,
            )
        case Snoozed(delay_ms=delay_ms, reason=reason):
            return AttemptSnoozed(
                task_id=task_id, attempt=attempt, worker_id=worker_id, finished_at=at, delay_ms=delay_ms, reason=reason
            )
        case Cancelled():
            return AttemptCancelled(task_id=task_id, attempt=attempt, worker_id=worker_id, finished_at=at)
        case Crashed(detail=detail):
            return AttemptCrashed(task_id=task_id, attempt=attempt, worker_id=worker_id, finished_at=at, detail=detail)
        case GivenBack(reason=reason):
            return AttemptReturned(
                task_id=task_id, attempt=attempt, worker_id=worker_id, returned_at=at, is_started=True, reason=reason
            )


# --- errors -----------------------------------------------------------------------------------------------------------


def error_of(error: BaseException, verdict: Verdict) -> TaskError:
    """An exception as bounded, storable text: whatever its class, its `str`, or its chain of causes do."""
    names = [type_name(base) for base in type(error).__mro__[: BASES_MAX + 1] if base is not object]
    return TaskError(
        kind=ErrorKind.RAISED,
        type=names[0],
        message=storable(_message(error), MESSAGE_MAX),
        bases=tuple(names[1:]),
        traceback=storable(_traceback(error), TRACEBACK_MAX, TRACEBACK_HEAD),
        verdict=verdict,
    )


def type_name(cls: type) -> str:
    """The name of an exception class in errors and retry policies: `ValueError`, `shop.errors.SoldOut`."""
    try:
        module, name = str(cls.__module__), str(cls.__qualname__)
    except BaseException:  # a metaclass can make even this fail
        return "unknown"
    if module == "workers.errors":
        module = "tidewheel"
    return storable(name if module == "builtins" else f"{module}.{name}", NAME_MAX)


def verdict_of(error: BaseException) -> Verdict:
    """Whether the same attempt may succeed later: the handler's word, else a guess by HTTP status or class."""
    if isinstance(error, RetryableError):
        return Verdict.RETRYABLE
    if isinstance(error, PermanentError | ArgumentError):
        return Verdict.PERMANENT
    status = _http_status(error)
    if status is not None and status >= 400:
        is_retryable = status >= 500 or status in _RETRYABLE_STATUS
        return Verdict.LIKELY_RETRYABLE if is_retryable else Verdict.LIKELY_PERMANENT
    if isinstance(error, msgspec.ValidationError) or _is_pydantic_validation(error):
        return Verdict.LIKELY_PERMANENT
    if isinstance(error, TimeoutError | ConnectionError):
        return Verdict.LIKELY_RETRYABLE
    return Verdict.UNKNOWN


def storable(text: str, size_max: int, head: int | None = None) -> str:
    """`text` with NUL and lone surrogates replaced, cut to `size_max` bytes of UTF-8.

    With `head`, the first `head` bytes and the end are kept, else the beginning.
    """
    # Cut roughly first, since a message may have many megabytes; what is left is still too long, so it is cut again.
    rough = text if len(text) <= 2 * size_max else text[:size_max] + text[-size_max:]
    content = _UNSTORABLE.sub("\ufffd", rough).encode()
    if len(content) <= size_max:
        return content.decode()
    mark = " …" if head is None else "\n…\n"
    room = size_max - len(mark.encode())
    first = room if head is None else head
    end = content[len(content) - (room - first) :]
    return content[:first].decode(errors="ignore") + mark + end.decode(errors="ignore")


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as problem:
        return f"(the error's text can't be had: its __str__ raised {type_name(type(problem))})"


def _traceback(error: BaseException) -> str:
    try:
        frames = error.__traceback__
        # The frame that called the handler says nothing to the reader. An error that was returned does not have it.
        if frames is not None and frames.tb_next and frames.tb_frame.f_globals.get("__name__") == _CALLER:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))
    except BaseException as problem:
        return f"(the traceback can't be had: {type_name(type(problem))})"


def _attribute(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, None)
    except BaseException:  # an attribute of somebody else's exception may be a property that raises anything
        return None


def _http_status(error: BaseException) -> int | None:
    response = _attribute(error, "response")
    for owner, name in ((response, "status_code"), (response, "status"), (error, "status_code"), (error, "status")):
        status = _attribute(owner, name)
        if isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 599:
            return int(status)
    return None


def _retry_after_ms(error: BaseException, now: int) -> int | None:
    if isinstance(error, RetryableError):
        return error.after_ms
    for owner in (_attribute(error, "response"), error):
        headers = _attribute(owner, "headers")
        try:
            text = headers.get("Retry-After") or headers.get("retry-after")  # type: ignore[attr-defined]
        except BaseException:  # not a mapping of headers after all
            continue
        delay_ms = _parse_retry_after(text, now)
        if delay_ms is not None:
            return delay_ms
    return None


def _parse_retry_after(text: object, now: int) -> int | None:
    """RFC 9110, 10.2.3: seconds, or an HTTP date."""
    if not isinstance(text, str):
        return None
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return min(int(text) * 1000, DURATION_MS_MAX)
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0, round(at * 1000) - now // 1000), DURATION_MS_MAX)


def _is_pydantic_validation(error: BaseException) -> bool:
    return any(
        base.__name__ == "ValidationError" and str(base.__module__).partition(".")[0] in ("pydantic", "pydantic_core")
        for base in type(error).__mro__
    )
