"""Which waiting tasks are sent out to workers now. All of it is derived: after a load it is built anew from the state.

A shard lets only a small window of not yet started records out per queue, so that whatever must be decided late
(priority, cancellation) is still decided here. The window adapts as TCP's does: it grows with each start and is halved
when a worker gives a record back because it has no free slot.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from scheduler.core.timers import Timers
from schemas.messages import Priority, Task

WEIGHTS = {Priority.HIGH: 70, Priority.MEDIUM: 25, Priority.LOW: 5}
WINDOW_START = 16  # records out per queue before anything is known of its workers
WINDOW_MAX = 1024  # bounds what a cancel can no longer hold back, and the memory of a ready partition
PROBE_US = 1_000_000  # a queue without free slots is tried again after this, should the worker's word be lost
RESEND_US = 30_000_000  # a record that nobody started is sent again after this, then after twice as long, …
RESEND_US_MAX = 600_000_000  # … up to this, so that a queue without workers costs next to nothing


class Dispatched(NamedTuple):
    """A task to be sent to a partition of its ready topic; again, if nobody was heard to start it."""

    task_id: str
    partition: int
    is_again: bool


class _Out(NamedTuple):
    queue: str
    priority: Priority
    partition: int
    resend_at: int
    wait_us: int


class WeightedChoice:
    """Smooth weighted round robin: over any run of choices each candidate gets its share; none starves.

    The method of nginx's upstream balancer (2012): credits grow by weight, the richest is taken and pays the total.
    """

    def __init__(self) -> None:
        self._credits = dict.fromkeys(WEIGHTS, 0)

    def choose(self, candidates: list[Priority]) -> Priority:
        """One of `candidates` (not empty)."""
        if len(candidates) == 1:
            return candidates[0]
        credits = self._credits
        for candidate in candidates:
            credits[candidate] += WEIGHTS[candidate]
        best = max(candidates, key=credits.__getitem__)
        credits[best] -= sum(WEIGHTS[candidate] for candidate in candidates)
        return best


class _Queue:
    """The pending tasks of one queue, by priority, oldest first; and how many records are out."""

    def __init__(self) -> None:
        self.waiting: dict[Priority, OrderedDict[str, None]] = {priority: OrderedDict() for priority in WEIGHTS}
        self.choice = WeightedChoice()
        self.window = WINDOW_START
        self.out = 0
        self.blocked_until = 0

    def pop(self) -> tuple[Priority, str] | None:
        candidates = [priority for priority, tasks in self.waiting.items() if tasks]
        if not candidates:
            return None
        priority = self.choice.choose(candidates)
        task_id, _ = self.waiting[priority].popitem(last=False)
        return priority, task_id


class Dispatch:
    """The pending tasks of a shard, and those of them that are out but not started."""

    def __init__(self, ready_partitions: int) -> None:
        self._ready_partitions = ready_partitions
        self._queues: dict[str, _Queue] = {}
        self._place: dict[str, tuple[str, Priority]] = {}
        self._out: dict[str, _Out] = {}
        self._resends = Timers()
        self._load: dict[tuple[str, Priority], list[int]] = {}

    def offer(self, task: Task) -> None:
        """A task became pending, durably. One that is out already is offered anew (it was updated)."""
        self.forget(task.task_id)
        spec = task.spec
        self._queue(spec.queue).waiting[spec.priority][task.task_id] = None
        self._place[task.task_id] = spec.queue, spec.priority

    def forget(self, task_id: str) -> None:
        """The task is not pending any more; it makes room in the window if it was out."""
        place = self._place.pop(task_id, None)
        if place is not None:
            self._queues[place[0]].waiting[place[1]].pop(task_id, None)
        self._take_in(task_id)

    def is_out(self, task_id: str) -> bool:
        """Whether a ready record of the task was sent that nobody started or gave back yet."""
        return task_id in self._out

    def started(self, task_id: str) -> None:
        """A worker started it: the window may grow."""
        out = self._out.get(task_id)
        if out is not None:
            queue = self._queues[out.queue]
            queue.window = min(WINDOW_MAX, queue.window + 1)
        self.forget(task_id)  # it may also wait here again: given back by one worker, started by another

    def given_back(self, task: Task, now: int, *, is_full: bool) -> None:
        """A worker returned it unstarted; first in line again. `is_full`: since it had no free slot."""
        out = self._take_in(task.task_id)
        if out is None:
            return
        queue = self._queue(out.queue)
        if is_full:
            queue.window = max(1, queue.window // 2)
            queue.blocked_until = now + PROBE_US
        queue.waiting[out.priority][task.task_id] = None
        queue.waiting[out.priority].move_to_end(task.task_id, last=False)
        self._place[task.task_id] = out.queue, out.priority

    def unblock(self) -> None:
        """A worker has a free slot (again)."""
        for queue in self._queues.values():
            queue.blocked_until = 0

    def pick(self, now: int) -> list[Dispatched]:
        """What is to be sent now: within the windows, by weight, and what went out long ago without being started."""
        picked = self._pick_resends(now)
        for name, queue in self._queues.items():
            if now < queue.blocked_until:
                continue
            while queue.out < queue.window and (chosen := queue.pop()):
                priority, task_id = chosen
                del self._place[task_id]
                out = _Out(name, priority, 0, now + RESEND_US, RESEND_US)
                picked.append(Dispatched(task_id, self._send(task_id, out), False))
        return picked

    def next_at(self) -> int | None:
        """When time alone may make something to be sent."""
        instants = [q.blocked_until for q in self._queues.values() if q.blocked_until and any(q.waiting.values())]
        resend_at = self._resends.next_at()
        if resend_at is not None:
            instants.append(resend_at)
        return min(instants, default=None)

    def depth(self) -> dict[tuple[str, Priority], int]:
        """How many pending tasks each queue and priority has, those that are out included."""
        counts = {
            (name, priority): len(tasks)
            for name, queue in self._queues.items()
            for priority, tasks in queue.waiting.items()
        }
        for out in self._out.values():
            counts[out.queue, out.priority] = counts.get((out.queue, out.priority), 0) + 1
        return counts

    def _pick_resends(self, now: int) -> list[Dispatched]:
        picked = []
        for task_id in self._resends.pop_due(now, WINDOW_MAX):
            out = self._take_in(task_id)
            if out is not None:
                wait_us = min(2 * out.wait_us, RESEND_US_MAX)
                again = out._replace(resend_at=now + wait_us, wait_us=wait_us)
                picked.append(Dispatched(task_id, self._send(task_id, again), True))
        return picked

    def _send(self, task_id: str, out: _Out) -> int:
        load = self._load.setdefault((out.queue, out.priority), [0] * self._ready_partitions)
        partition = load.index(min(load))
        load[partition] += 1
        self._queues[out.queue].out += 1
        self._out[task_id] = out._replace(partition=partition)
        self._resends.set(task_id, out.resend_at)
        return partition

    def _take_in(self, task_id: str) -> _Out | None:
        out = self._out.pop(task_id, None)
        if out is not None:
            self._resends.cancel(task_id)
            self._queues[out.queue].out -= 1
            self._load[out.queue, out.priority][out.partition] -= 1
        return out

    def _queue(self, name: str) -> _Queue:
        if name not in self._queues:
            self._queues[name] = _Queue()
        return self._queues[name]
