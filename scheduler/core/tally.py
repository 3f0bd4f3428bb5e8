"""What waits, runs and has started in one shard, by queue, priority and tenant: for operators and scalers.

All of it is derived from the state; what counts since the load begins at nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from scheduler.core.dispatch import Dispatch
from scheduler.core.gate import DepthKey, depth_key
from scheduler.core.limiter import Limiter
from schemas.messages import LimitStats, QueueStats, ShardStats, Task

STATS_MAX = 200  # queues, priorities and tenants that are told of one by one
LIMIT_STATS_MAX = 100  # keys of limits that are told of
LIMIT_KEYS_SEEN_MAX = 10_000  # among which those are looked for
DUE_SOON_US = 60_000_000  # what a new worker may take to be there
_BUCKET_US = 5_000_000


class DueSoon:
    """How many tasks that are in memory become due in the next seconds."""

    def __init__(self) -> None:
        self._buckets: dict[int, Counter[DepthKey]] = {}

    def add(self, task: Task, difference: int = 1) -> None:
        """A task waits for its instant (or, with -1, does not any more)."""
        if task.next_run_at is None:
            return
        number, key = task.next_run_at // _BUCKET_US, depth_key(task)
        bucket = self._buckets.setdefault(number, Counter())
        bucket[key] += difference
        if not bucket[key]:
            del bucket[key]
            if not bucket:
                del self._buckets[number]

    def within(self, now: int) -> Counter[DepthKey]:
        """Those that are due within DUE_SOON_US, or overdue and not let go yet; to about five seconds."""
        last, found = (now + DUE_SOON_US) // _BUCKET_US, Counter[DepthKey]()
        first = now // _BUCKET_US - 2  # what is overdue for longer is let go with the next timers
        for number in range(first, last + 1):
            found.update(self._buckets.get(number, ()))
        return found

    def __len__(self) -> int:
        return sum(bucket.total() for bucket in self._buckets.values())


class Tally:
    """What is counted of one shard."""

    def __init__(self) -> None:
        self.due = DueSoon()
        self._running: Counter[DepthKey] = Counter()
        self._started: Counter[DepthKey] = Counter()
        self._waited_us: Counter[DepthKey] = Counter()

    def began(self, before: Task | None, after: Task, now: int) -> None:
        """An attempt runs; it has just started if it is known how the task stood `before`."""
        key = depth_key(after)
        self._running[key] += 1
        if before is not None:
            self._started[key] += 1
            self._waited_us[key] += max(0, now - (before.next_run_at or before.created_at))

    def ended(self, before: Task) -> None:
        """The attempt runs no more."""
        key = depth_key(before)
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]

    def running(self) -> int:
        """How many attempts run."""
        return self._running.total()

    def stats(
        self, shard: int, epoch: int, now: int, dispatch: Dispatch, limiter: Limiter, tasks: Mapping[str, Task]
    ) -> ShardStats:
        """What there is now."""
        found = _Found(dispatch, tasks, self, now)
        keys = found.pending.keys() | found.due.keys() | self._running.keys()
        if len(self._started) > STATS_MAX:  # names come and go
            self._started = Counter({key: self._started[key] for key in keys})
            self._waited_us = Counter({key: self._waited_us[key] for key in keys})
        keys |= self._started.keys()
        ranked = sorted(keys, key=lambda key: (-found.pending[key] - self._running[key], key))
        told = [self._of(key, [key], found) for key in ranked[:STATS_MAX]]
        told += [self._of(key, members, found) for key, members in _joined(ranked[STATS_MAX:])]
        limits = tuple(_limits(dispatch, limiter))
        return ShardStats(shard=shard, epoch=epoch, at=now, queues=tuple(told), limits=limits)

    def _of(self, key: DepthKey, members: Sequence[DepthKey], found: _Found) -> QueueStats:
        queue, priority, tenant_id = key
        return QueueStats(
            queue=queue,
            priority=priority,
            tenant_id=tenant_id,
            pending=sum(found.pending[one] for one in members),
            running=sum(self._running[one] for one in members),
            throttled=sum(found.throttled.get(one, 0) for one in members),
            due_soon=sum(found.due[one] for one in members),
            started=sum(self._started[one] for one in members),
            waited_us=sum(self._waited_us[one] for one in members),
            oldest_at=min((found.oldest[one] for one in members if one in found.oldest), default=None),
        )


class _Found:
    """What is there at one moment."""

    def __init__(self, dispatch: Dispatch, tasks: Mapping[str, Task], tally: Tally, now: int) -> None:
        self.pending, self.throttled = dispatch.depth(), dispatch.gate.depth()
        self.due = tally.due.within(now)
        self.oldest: dict[DepthKey, int] = {}  # since when those might have started that are to go first
        for key, task_id in dispatch.oldest():
            task = tasks[task_id]
            at = task.next_run_at or task.created_at
            self.oldest[key] = min(at, self.oldest.get(key, at))


def _joined(keys: Iterable[DepthKey]) -> list[tuple[DepthKey, list[DepthKey]]]:
    """Without tenants; and of names without end their sum, by priority."""
    without_tenants: dict[DepthKey, list[DepthKey]] = {}
    for queue, priority, tenant_id in keys:
        without_tenants.setdefault((queue, priority, ""), []).append((queue, priority, tenant_id))
    joined = list(without_tenants.items())
    by_priority: dict[DepthKey, list[DepthKey]] = {}
    for (_, priority, _), members in joined[STATS_MAX:]:
        by_priority.setdefault(("", priority, ""), []).extend(members)
    return [*joined[:STATS_MAX], *by_priority.items()]


def _limits(dispatch: Dispatch, limiter: Limiter) -> list[LimitStats]:
    """The keys of limits for which most wait here, or of which most is held by word of this home."""
    held = dict(itertools.islice(limiter.levels(), LIMIT_KEYS_SEEN_MAX))
    waiting = dict(itertools.islice(dispatch.gate.waiting(), LIMIT_KEYS_SEEN_MAX))
    told = [
        LimitStats(key=key, waiting=waiting.get(key, 0), held=held.get(key, 0)) for key in held.keys() | waiting.keys()
    ]
    return heapq.nlargest(LIMIT_STATS_MAX, told, key=lambda one: (one.waiting, one.held, one.key))
