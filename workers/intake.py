"""Ready records between the log and the executors: what waits for a slot, and how far each partition is settled.

Records for a handler of batches collect here, in a lane of their own, until they are called together. They are not
begun meanwhile: whatever happens to the worker, nothing happened to them. Time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from schemas.messages import Priority, ReadyTask
from schemas.priorities import DEFAULT_WEIGHTS, PRIORITIES, WeightedChoice, Weights
from workers.batches import Batch
from workers.registry import ExecutorKind, Handler
from workers.settings import SLOTS_MAX

Key = tuple[str, int]  # task id and attempt: what reports and signals name
Version = tuple[str, int, int]  # task id, attempt and task version: what a signal calls void
Stamp = tuple[int, int]  # when the task was accepted, and its version: of two records with one key the newer has more


class Progress:
    """Which records of one partition are settled. `position` is never beyond one that isn't.

    Records below `fresh_from` were there before the partition was begun.
    """

    __slots__ = ("_open", "_settled", "committed", "fresh_from", "position")

    def __init__(self, fresh_from: int = 0) -> None:
        self.fresh_from = fresh_from
        self._open: deque[int] = deque()
        self._settled: set[int] = set()
        self.position: int | None = None
        self.committed: int | None = None

    def take(self, offset: int) -> None:
        """A record was read; offsets come in order, perhaps with gaps."""
        self._open.append(offset)

    @property
    def is_settled(self) -> bool:
        """Whether nothing that was taken is open."""
        return not self._open

    def settle(self, offset: int) -> None:
        """A record needs nothing more."""
        self._settled.add(offset)
        while self._open and self._open[0] in self._settled:
            done = self._open.popleft()
            self._settled.discard(done)
            self.position = done + 1


class Waiting(NamedTuple):
    """A ready record that waits for a slot."""

    ready: ReadyTask
    handler: Handler
    progress: Progress
    offset: int
    taken_at: int

    @property
    def batch(self) -> Batch | None:
        """How it collects; None: it is called alone. So is what was lost before: it may take down who runs with it."""
        return None if self.ready.crash_count else self.handler.batch

    @property
    def call_at(self) -> int:
        """When it is to be called, if there is a slot: at once, or when it has collected for long enough."""
        return self.taken_at if self.batch is None else self.taken_at + self.batch.wait_ms * 1000


class Lane:
    """Records that wait for the same slots, by priority; picked by weight, so that no priority starves.

    `size`: how many are called together, at most; 1 if they are called alone.
    """

    __slots__ = ("_by_priority", "_choice", "kind", "size")

    def __init__(self, kind: ExecutorKind, size: int, weights: Weights) -> None:
        self.kind = kind
        self.size = size
        self._by_priority: dict[Priority, deque[Waiting]] = {priority: deque() for priority in PRIORITIES}
        self._choice = WeightedChoice(weights)

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def __iter__(self) -> Iterator[Waiting]:
        for waitings in self._by_priority.values():
            yield from waitings

    def put(self, waiting: Waiting) -> None:
        """Take in a record."""
        self._by_priority[waiting.ready.priority].append(waiting)

    def pick(self) -> Waiting | None:
        """Take out the next record: by smooth weighted round robin over the priorities that wait."""
        candidates = [priority for priority, waitings in self._by_priority.items() if waitings]
        return self._by_priority[self._choice.choose(candidates)].popleft() if candidates else None

    def taken_at(self) -> int | None:
        """When the first of them came; None if none waits."""
        return min((waitings[0].taken_at for waitings in self._by_priority.values() if waitings), default=None)

    def call_at(self) -> int | None:
        """When the first of them is to be called; None if none waits."""
        return min((waitings[0].call_at for waitings in self._by_priority.values() if waitings), default=None)

    def due(self, now: int) -> int:
        """How many are to be called together now: so many as may be, or all once the first waited long enough."""
        call_at = self.call_at()
        if call_at is None:
            return 0
        count = len(self)
        return min(count, self.size) if count >= self.size or call_at <= now else 0

    def remove(self, key: Key) -> Waiting | None:
        """Take out the record with this key."""
        for waitings in self._by_priority.values():
            for place, waiting in enumerate(waitings):
                if _key(waiting) == key:
                    del waitings[place]
                    return waiting
        return None

    def pop_to_call_until(self, at: int) -> Iterator[Waiting]:
        """Take out the records that were to be called at or before `at`."""
        for waitings in self._by_priority.values():
            while waitings and waitings[0].call_at <= at:
                yield waitings.popleft()

    def pop_all(self) -> list[Waiting]:
        """Take out everything."""
        popped = list(self)
        for waitings in self._by_priority.values():
            waitings.clear()
        return popped


class Intake:
    """Buffers ready records: in a lane for each executor, and for each handler of batches."""

    def __init__(self, slots: int = SLOTS_MAX, weights: Weights = DEFAULT_WEIGHTS) -> None:
        """`slots`: how many attempts the worker can run at once; no batch is larger."""
        self._slots, self._weights = slots, weights
        self._lanes: dict[tuple[ExecutorKind, str | None], Lane] = {}
        self._ready: dict[Key, ReadyTask] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def find(self, key: Key) -> ReadyTask | None:
        """The record with this key that waits here."""
        return self._ready.get(key)

    def put(self, waiting: Waiting) -> None:
        """Take in a record whose key is not here yet."""
        self._ready[_key(waiting)] = waiting.ready
        handler, batch = waiting.handler, waiting.batch
        name = handler.executor, None if batch is None else handler.name
        lane = self._lanes.get(name)
        if lane is None:
            size = 1 if batch is None else min(batch.size, self._slots)
            lane = self._lanes[name] = Lane(handler.executor, size, self._weights)
        lane.put(waiting)

    def remove(self, key: Key) -> Waiting | None:
        """Take out the record with this key, wherever it waits."""
        if self._ready.pop(key, None) is None:
            return None
        return next((found for lane in self._lanes.values() if (found := lane.remove(key)) is not None), None)

    def lanes(self) -> list[Lane]:
        """Those in which something waits; first the one in which something waits longest."""
        waiting = [(taken_at, lane) for lane in self._lanes.values() if (taken_at := lane.taken_at()) is not None]
        return [lane for _, lane in sorted(waiting, key=itemgetter(0))]

    def pick(self, lane: Lane, count: int) -> list[Waiting]:
        """Take out the next records of a lane, at most so many."""
        picked: list[Waiting] = []
        while len(picked) < count and (waiting := lane.pick()) is not None:
            del self._ready[_key(waiting)]
            picked.append(waiting)
        return picked

    def call_at(self) -> int | None:
        """When the first record of all was, or is, to be called."""
        return min((at for lane in self._lanes.values() if (at := lane.call_at()) is not None), default=None)

    def next_due_at(self, now: int) -> int | None:
        """When time alone makes a batch due that is not due yet."""
        return min(
            (at for lane in self._lanes.values() if (at := lane.call_at()) is not None and at > now), default=None
        )

    def pop_to_call_until(self, at: int) -> list[Waiting]:
        """Take out the records that were to be called at or before `at`, and were not."""
        return self._popped([waiting for lane in self._lanes.values() for waiting in lane.pop_to_call_until(at)])

    def pop_all(self) -> list[Waiting]:
        """Take out everything."""
        return self._popped([waiting for lane in self._lanes.values() for waiting in lane.pop_all()])

    def drop(self, lost: Collection[Progress]) -> None:
        """Forget the records of partitions that belong to another worker now: it reads them again."""
        gone = set(map(id, lost))
        for waiting in self.pop_all():
            if id(waiting.progress) not in gone:
                self.put(waiting)

    def _popped(self, popped: list[Waiting]) -> list[Waiting]:
        for waiting in popped:
            del self._ready[_key(waiting)]
        return popped


def _key(waiting: Waiting) -> Key:
    return waiting.ready.task_id, waiting.ready.attempt


def stamp_of(ready: ReadyTask) -> Stamp:
    """A keyed id may be used anew after its window; versions and attempts then begin again from 1."""
    return ready.created_at, ready.task_version


_K = TypeVar("_K")
_V = TypeVar("_V")


class Recent(Generic[_K, _V]):
    """Remembers at least the last `count` keys with a value each, and at most twice as many."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._young: dict[_K, _V] = {}
        self._old: dict[_K, _V] = {}

    def put(self, key: _K, value: _V) -> None:
        """Remember."""
        if len(self._young) >= self._count:
            self._old, self._young = self._young, {}
        self._young[key] = value

    def get(self, key: _K) -> _V | None:
        """What is remembered, or None."""
        value = self._young.get(key)
        return self._old.get(key) if value is None else value

    def pop(self, key: _K) -> _V | None:
        """What was remembered, or None; it is not any more."""
        old = self._old.pop(key, None)
        young = self._young.pop(key, None)
        return old if young is None else young
