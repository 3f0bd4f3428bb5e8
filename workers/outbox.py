"""Reports on their way to the log: sent in batches, and again where losing one would matter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from scheduler.ports import Entry, Log
from schemas.errors import Retriable, TidewheelIOError
from workers.intake import Progress

log = logging.getLogger(__name__)

BATCH_MAX = 1_000  # entries of one append: far below what any adapter buffers
RETRY_US = 100_000  # pause after the log refused an append
LINGER_COUNT = 64  # so many reports do not wait for more


class IfLost(Enum):
    """What to do with an entry of which it isn't known whether the log has it."""

    REPEAT = auto()  # reports are idempotent by attempt
    FORGET = auto()  # the next one says it all
    TELL = auto()  # the runtime decides


class Outgoing(NamedTuple):
    """An entry; once it is in the log, the ready record at `offset` is settled."""

    entry: Entry
    if_lost: IfLost
    progress: Progress | None = None
    offset: int = -1
    subject: object = None
    is_awaited: bool = False  # tell when it is in the log


class Outbox:
    """Appends entries in the order they were added. Belongs to the thread that polls the log."""

    def __init__(
        self, log_: Log, on_stored: Callable[[object], None], on_lost: Callable[[object], None], linger_ms: int
    ) -> None:
        """`on_stored` is called with the subject of an awaited entry, `on_lost` with that of a lost TELL entry."""
        self._on_stored = on_stored
        self._log = log_
        self._linger_us = linger_ms * 1000
        self._on_lost = on_lost
        self._waiting: list[Outgoing] = []
        self._returned = 0  # how many at the head came back since the last append
        self._retry_at = 0
        self._send_at: int | None = None  # of the oldest that waits; None: not looked at yet
        self._is_refused = False
        self._is_urgent = False
        self.unacknowledged = 0
        self.failure: TidewheelIOError | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the log took less than it was given; then nothing new should be begun."""
        return self._is_refused

    @property
    def is_settled(self) -> bool:
        """Whether all that was added is in the log."""
        return not self._waiting and not self.unacknowledged

    def add(self, outgoing: Outgoing, *, is_urgent: bool) -> None:
        """Send it with the next `send`; if it is not urgent, a little later with what comes until then."""
        self._waiting.append(outgoing)
        self._is_urgent |= is_urgent

    def send(self, now: int) -> None:
        """Append what is due. What the log refuses now is sent again later."""
        if self.failure is not None:
            raise self.failure
        if not self._waiting:
            return
        if self._send_at is None:
            self._send_at = now + self._linger_us
        if now < self._send_at and not self._is_urgent and len(self._waiting) < LINGER_COUNT:
            return
        self.flush(now)

    def flush(self, now: int) -> None:
        """Append all that waits, unless the log refused some a moment ago."""
        while self._waiting and now >= self._retry_at:
            batch = self._waiting[:BATCH_MAX]
            try:
                self._log.append([outgoing.entry for outgoing in batch], partial(self._acknowledged, batch))
            except Retriable as error:
                log.warning("the log takes no reports now, %d wait: %s", len(self._waiting), error)
                self._retry_at = now + RETRY_US
                break
            del self._waiting[: len(batch)]
            self._returned = 0
            self.unacknowledged += len(batch)
        self._is_refused = bool(self._waiting)
        if not self._waiting:
            self._send_at, self._is_urgent = None, False

    def next_at(self) -> int | None:
        """When to send (again), if something is left."""
        if not self._waiting:
            return None
        return self._retry_at if self._is_refused else self._send_at

    def _acknowledged(self, batch: Sequence[Outgoing], result: Sequence[int] | TidewheelIOError) -> None:
        self.unacknowledged -= len(batch)
        if isinstance(result, TidewheelIOError):
            self._lost(batch, result)
            return
        for outgoing in batch:
            if outgoing.progress is not None:
                outgoing.progress.settle(outgoing.offset)
            if outgoing.is_awaited:
                self._on_stored(outgoing.subject)

    def _lost(self, batch: Sequence[Outgoing], error: TidewheelIOError) -> None:
        if not isinstance(error, Retriable):
            self.failure = error
            return
        log.warning("the log may have lost %d reports: %s", len(batch), error)
        again = [outgoing for outgoing in batch if outgoing.if_lost is IfLost.REPEAT]
        self._waiting[self._returned : self._returned] = again  # behind those of the batch before, which was lost too
        self._returned += len(again)
        for outgoing in batch:
            if outgoing.if_lost is IfLost.TELL:
                if outgoing.progress is not None:
                    outgoing.progress.settle(outgoing.offset)
                self._on_lost(outgoing.subject)
