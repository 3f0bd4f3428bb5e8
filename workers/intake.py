"""Ready records between the log and the executors: what waits for a slot, and how far each partition is settled."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

from schemas.messages import Priority, ReadyTask
from schemas.priorities import WEIGHTS, WeightedChoice
from workers.registry import ExecutorKind, Handler

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


class Intake:
    """Buffers ready records by executor and priority; picks by weight, so that no priority starves."""

    def __init__(self) -> None:
        self._lanes: dict[ExecutorKind, dict[Priority, deque[Waiting]]] = {
            kind: {priority: deque() for priority in WEIGHTS} for kind in ExecutorKind
        }
        self._choices = {kind: WeightedChoice() for kind in ExecutorKind}
        self._ready: dict[Key, ReadyTask] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def find(self, key: Key) -> ReadyTask | None:
        """The record with this key that waits here."""
        return self._ready.get(key)

    def put(self, waiting: Waiting) -> None:
        """Take in a record whose key is not here yet."""
        self._ready[_key(waiting)] = waiting.ready
        self._lanes[waiting.handler.executor][waiting.ready.priority].append(waiting)

    def remove(self, key: Key) -> Waiting | None:
        """Take out the record with this key, wherever it waits."""
        if self._ready.pop(key, None) is None:
            return None
        for lanes in self._lanes.values():
            for lane in lanes.values():
                for place, waiting in enumerate(lane):
                    if _key(waiting) == key:
                        del lane[place]
                        return waiting
        return None

    def pick(self, kind: ExecutorKind) -> Waiting | None:
        """The next record for an executor: by smooth weighted round robin over the priorities that wait."""
        lanes = self._lanes[kind]
        candidates = [priority for priority, lane in lanes.items() if lane]
        if not candidates:
            return None
        waiting = lanes[self._choices[kind].choose(candidates)].popleft()
        del self._ready[_key(waiting)]
        return waiting

    def oldest_at(self) -> int | None:
        """When the record that waits longest was taken."""
        return min(
            (lane[0].taken_at for lanes in self._lanes.values() for lane in lanes.values() if lane), default=None
        )

    def pop_taken_until(self, at: int) -> list[Waiting]:
        """Remove the records that were taken at or before `at`."""
        popped: list[Waiting] = []
        for lanes in self._lanes.values():
            for lane in lanes.values():
                while lane and lane[0].taken_at <= at:
                    popped.append(lane.popleft())
        for waiting in popped:
            del self._ready[_key(waiting)]
        return popped

    def drop(self, lost: Collection[Progress]) -> None:
        """Forget the records of partitions that belong to another worker now: it reads them again."""
        gone = set(map(id, lost))
        for lanes in self._lanes.values():
            for lane in lanes.values():
                kept = [waiting for waiting in lane if id(waiting.progress) not in gone]
                lane.clear()
                lane.extend(kept)
        self._ready = {
            _key(waiting): waiting.ready
            for lanes in self._lanes.values()
            for lane in lanes.values()
            for waiting in lane
        }


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
