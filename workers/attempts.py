"""The attempts that a worker runs: which slot each occupies, and when the clock has a word in it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import Enum, auto

from workers.calls import Call, Unit
from workers.execution import Outcome
from workers.intake import Key
from workers.registry import ExecutorKind


class Alarm(Enum):
    """What happens to an attempt at a given time, if it still runs."""

    TIME_UP = auto()  # its timeout, or the task's total time
    GRACE_OVER = auto()  # it was asked to stop and did not
    KILL = auto()  # it was made to stop and did not


class Attempt:
    """An attempt from its start until its slot is free.

    Its outcome is what the executor delivers, unless `sealed` decided before. `is_disowned`: nothing is reported.
    `is_awaited`: its start must be in the log before its handler is called.
    """

    __slots__ = ("call", "is_awaited", "is_disowned", "kind", "sealed")

    def __init__(self, call: Call, is_awaited: bool) -> None:
        self.call = call
        self.is_awaited = is_awaited
        self.kind = call.handler.executor
        self.sealed: Outcome | None = None
        self.is_disowned = False

    @property
    def key(self) -> Key:
        """What reports and signals name."""
        return self.call.ready.task_id, self.call.ready.attempt


class Attempts:
    """All attempts that occupy a slot. `busy`: how many units they are, by kind; those that share a call are one."""

    def __init__(self) -> None:
        self.busy = dict.fromkeys(ExecutorKind, 0)
        self._shares: dict[Unit, int] = {}  # how many attempts of a batch are left
        self._by_call: dict[Call, Attempt] = {}
        self._owned: dict[Key, Attempt] = {}
        self._alarms: list[tuple[int, int, Attempt, Alarm]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_call)

    def begin(self, call: Call, *, is_awaited: bool) -> Attempt:
        """Occupy a slot."""
        attempt = Attempt(call, is_awaited)
        self._by_call[call] = attempt
        self._owned[attempt.key] = attempt
        if call.batch is None or call.batch not in self._shares:
            self.busy[attempt.kind] += 1
        if call.batch is not None:
            self._shares[call.batch] = self._shares.get(call.batch, 0) + 1
        return attempt

    def owned(self) -> Iterable[Attempt]:
        """The attempts that this worker vouches for."""
        return self._owned.values()

    def find(self, key: Key) -> Attempt | None:
        """The attempt that this worker vouches for under `key`."""
        return self._owned.get(key)

    def disown(self, attempt: Attempt) -> None:
        """It belongs to somebody else, or to nobody; it occupies its slot until it ends."""
        attempt.is_disowned = True
        if self._owned.get(attempt.key) is attempt:
            del self._owned[attempt.key]

    def end(self, call: Call) -> Attempt | None:
        """Free the slot of a call; None if that was done before: then this is a late word, to be ignored."""
        attempt = self._by_call.pop(call, None)
        if attempt is not None:
            if self._is_last(call):
                self.busy[attempt.kind] -= 1
            if not attempt.is_disowned:
                del self._owned[attempt.key]
        return attempt

    def _is_last(self, call: Call) -> bool:
        """Whether nothing is left of the unit that a call is, or belongs to."""
        if call.batch is None:
            return True
        left = self._shares.pop(call.batch) - 1
        if left:
            self._shares[call.batch] = left
        return not left

    def is_running(self, attempt: Attempt) -> bool:
        """Whether it still occupies its slot."""
        return attempt.call in self._by_call

    def set_alarm(self, at: int, attempt: Attempt, alarm: Alarm) -> None:
        """Have `pop_due` give the attempt at `at`, if it runs so long."""
        self._serial += 1
        heapq.heappush(self._alarms, (at, self._serial, attempt, alarm))
        if len(self._alarms) > 64 + 4 * len(self._by_call):
            # Most attempts end long before their timeout; so the heap is bounded by what runs, not by what ran.
            self._alarms = [entry for entry in self._alarms if entry[2].call in self._by_call]
            heapq.heapify(self._alarms)

    def pop_due(self, now: int) -> list[tuple[Attempt, Alarm]]:
        """The alarms whose time has come, of attempts that still run."""
        due = []
        while self._alarms and self._alarms[0][0] <= now:
            _, _, attempt, alarm = heapq.heappop(self._alarms)
            if attempt.call in self._by_call:
                due.append((attempt, alarm))
        return due

    def next_at(self) -> int | None:
        """When the next alarm is; perhaps of an attempt that ended already."""
        return self._alarms[0][0] if self._alarms else None
