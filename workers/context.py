"""What a handler can know of, and say to, the attempt that it runs in. The same in every executor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar, Token
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

from schemas.limits import CHECKPOINT_MAX
from schemas.messages import ReadyTask
from workers.errors import NotSerialisable, TaskCancelled
from workers.values import decode_json, encode_json

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

SaveCheckpoint = Callable[[ReadyTask, bytes], None]


class _Done(Awaitable[None]):
    """Lets `await context.checkpoint(…)` and a plain call mean the same."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


class Context:
    """One attempt, as its handler sees it. A parameter annotated `Context` is given it; else `current_context()`.

    A handler of batches has one for each item, in their order: a parameter annotated `list[Context]` is given them.
    """

    __slots__ = ("_ends_at", "_is_cancelled", "_ready", "_save")

    def __init__(self, ready: ReadyTask, ends_at: int | None, save: SaveCheckpoint) -> None:
        self._ready = ready
        self._ends_at = ends_at
        self._save = save
        self._is_cancelled = False

    @property
    def task_id(self) -> str:
        """The task."""
        return self._ready.task_id

    @property
    def task_type(self) -> str:
        """The name under which the handler is registered."""
        return self._ready.task_type

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1: the fencing token for what the handler writes elsewhere."""
        return self._ready.attempt

    @property
    def max_attempts(self) -> int:
        """How many failed attempts the retry policy allows."""
        return self._ready.max_attempts

    @property
    def failure_count(self) -> int:
        """How many attempts failed before this one."""
        return self._ready.failure_count

    @property
    def crash_count(self) -> int:
        """How many attempts were lost before this one, since their worker or process went away."""
        return self._ready.crash_count

    @property
    def queue(self) -> str:
        """The queue that the task came through."""
        return self._ready.queue

    @property
    def tenant_id(self) -> str:
        """On whose behalf the task runs."""
        return self._ready.tenant_id

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the submitter attached to the task."""
        return MappingProxyType(self._ready.metadata)

    @property
    def idempotency_key(self) -> str | None:
        """The key that the task was submitted with, if any."""
        return self._ready.idempotency_key

    @property
    def scheduled_at(self) -> datetime:
        """When the task was due."""
        return _instant(self._ready.scheduled_at)

    @property
    def deadline(self) -> datetime | None:
        """When this attempt is ended by force: by its timeout or the task's total time, whichever comes first."""
        return None if self._ends_at is None else _instant(self._ends_at)

    @property
    def last_checkpoint(self) -> Any:
        """What an earlier attempt saved last, as plain JSON; None if nothing was saved."""
        content = self._ready.checkpoint
        return None if content is None else decode_json(content)

    def checkpoint(self, value: object) -> Awaitable[None]:
        """Save how far the work came, for the next attempt. May be awaited, need not be.

        It is sent on in order with the outcome and not waited for: of several in quick succession only the last is
        kept. Raises NotSerialisable, naming the limit, if `value` can't be stored.
        """
        try:
            content = encode_json(value, CHECKPOINT_MAX)
        except NotSerialisable as error:
            raise NotSerialisable(f"checkpoint: {error}") from error
        self._save(self._ready, content)
        return _DONE

    @property
    def is_cancelled(self) -> bool:
        """Whether the attempt is to stop: cancelled, timed out, or its worker is shutting down."""
        return self._is_cancelled

    def check_cancelled(self) -> None:
        """Raise TaskCancelled if the attempt is to stop; for loops that have no other place to notice."""
        if self._is_cancelled:
            raise TaskCancelled(f"task {self.task_id} is to stop")

    def mark_cancelled(self) -> None:
        """For executors: from now on the handler sees that it is to stop. Callable from any thread."""
        self._is_cancelled = True


_current: ContextVar[Context] = ContextVar("tidewheel_context")


def current_context() -> Context:
    """The context of the handler that calls this, however deep in its call stack.

    RuntimeError outside of one, and in a handler of batches, which runs in as many attempts as it has items.
    """
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError(
            "current_context() is for code that a task handler calls; no task runs here, or a batch of them, "
            "whose contexts come by a parameter annotated list[Context]"
        ) from None


def enter(context: Context) -> Token[Context]:
    """For executors: make `context` the current one of this thread or coroutine."""
    return _current.set(context)


def leave(token: Token[Context]) -> None:
    """For executors: undo `enter`."""
    _current.reset(token)


def _instant(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)
