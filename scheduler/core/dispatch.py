"""Which waiting tasks are sent out to workers now. All of it is derived: after a load it is built anew from the state.

A shard lets only a small window of not yet started records out per lane (a task type in a queue), so that whatever
must be decided late (priority, tenants, cancellation) is still decided here. The window adapts as TCP's does: it grows
with each start, and is halved when a worker gives a record back because it has no free slot. A partition whose worker
has none is passed over, and tried again after a second: nothing waits for who is busy. Types have lanes of their
own because they have slots of their own: blocking handlers that fill all threads must not hold up coroutines. Of a
priority of which nothing is out one goes even if the window is full: an urgent task need not wait for the start of one
that is not, and its worker lets it have the next slot.

Tasks of a paused queue wait here. What was out already may start: at most a window, and at once if a worker is free.

Where records go is not known here: who calls `pick` says how many partitions the ready topic of a queue and priority
has now. While it has none its tasks wait, and nobody else does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from scheduler.core.fairness import FairQueue, Places
from scheduler.core.gate import DepthKey, Gate
from scheduler.core.policies import Policies
from scheduler.core.timers import Timers
from schemas.messages import Priority, Task
from schemas.priorities import DEFAULT_WEIGHTS, PRIORITIES, Weights

WINDOW_START = 16  # records out per lane before anything is known of its workers
WINDOW_MAX = 1024  # bounds what a cancel can no longer hold back, and the memory of a ready partition
WINDOW_BYTES_MAX = 8 << 20  # of payloads: what is out must fit into its ready partition
PROBE_US = 1_000_000  # a lane without free slots is tried again after this, should the worker's word be lost
HELD_US = 100_000  # how soon a topic that could not be written is looked at again; to ask costs next to nothing
IDLE_LANES_MAX = 100  # lanes kept although they are empty
RESEND_US = 30_000_000  # a record that nobody started is sent again after this, then after twice as long, …
RESEND_US_MAX = 600_000_000  # … up to this, so that a queue without workers costs next to nothing


class Dispatched(NamedTuple):
    """A task to be sent to a partition of its ready topic; again, if nobody was heard to start it."""

    task_id: str
    partition: int
    is_again: bool


LaneKey = tuple[str, str]  # queue, task type


class _Lane:
    """The pending tasks of one type in one queue, and what is out of them."""

    def __init__(self, key: LaneKey, places: Places[LaneKey], weights: Weights) -> None:
        self.waiting = FairQueue(key, places, weights)
        self.window = WINDOW_START
        self.out = dict.fromkeys(PRIORITIES, 0)
        self.out_bytes = 0
        self.blocked_until = dict.fromkeys(PRIORITIES, 0)
        # Partitions whose worker had no slot when one was sent there last, and when it said so.
        self.full: dict[Priority, dict[int, int]] = {one: {} for one in PRIORITIES}

    def open_priorities(self) -> list[Priority]:
        """Those of which something waits, and one more may go out."""
        if self.out_bytes >= WINDOW_BYTES_MAX:
            return []
        has_room = sum(self.out.values()) < self.window
        return [
            one for one in self.waiting.priorities() if not self.blocked_until[one] and (has_room or not self.out[one])
        ]

    def unblock_due(self, now: int) -> None:
        """Time has done what it can: `next_at` must not name it again."""
        for priority, until in self.blocked_until.items():
            if until <= now:
                self.blocked_until[priority] = 0

    def is_idle(self) -> bool:
        """Whether there is nothing of it, so that it may be forgotten."""
        return not self.waiting and not any(self.out.values())


PartitionsOf = Callable[[str, Priority], int]  # of the ready topic of a queue and priority; 0: it cannot be written now
SizeOf = Callable[[str], int]  # of a task, in bytes, about


class _Out(NamedTuple):
    lane: LaneKey
    priority: Priority
    tenant_id: str
    partition: int
    size: int
    resend_at: int
    wait_us: int


class Dispatch:
    """The pending tasks of a shard, and those of them that are out but not started."""

    def __init__(self, policies: Policies, weights: Weights = DEFAULT_WEIGHTS) -> None:
        self.gate = Gate(policies, weights)
        self._policies, self._weights = policies, weights
        self._gate_version = len(policies.gate_changes)
        self._lanes: dict[LaneKey, _Lane] = {}
        self._places: Places[LaneKey] = {}
        self._out: dict[str, _Out] = {}
        self._resends = Timers()
        self._load: dict[tuple[str, Priority], list[int]] = {}
        self._partitions: dict[tuple[str, Priority], int] = {}  # of ready topics, when they were last written
        self._look_at: int | None = None  # when to look again at topics that could not be written

    def offer(self, task: Task, now: int) -> None:
        """A task became pending, durably. One that is out already is offered anew (it was updated)."""
        self.forget(task.task_id)
        if self.gate.admits(task, now):
            self.admit(task)

    def admit(self, task: Task) -> None:
        """All limits let it go."""
        self._put(self._lane((task.spec.queue, task.spec.task_type)), task.spec.priority, task, is_first=False)

    def follow_policies(self, tasks: Mapping[str, Task], now: int) -> None:
        """Let limits, and what was paused, hold as they are said now for all that is not out yet."""
        changes = self._policies.gate_changes[self._gate_version :]
        if not changes:
            return
        self._gate_version += len(changes)
        queues = None if None in changes else {queue for queue in changes if queue is not None}
        if queues is None:
            self.gate.settle_running(tasks, now)
        waiting = (one for one, line in self._places.items() if queues is None or line.queue.name[0] in queues)
        offered = [task_id for task_id in waiting if self.gate.concerns(tasks[task_id])]
        for task_id in [*self.gate.take(queues), *offered]:
            self.offer(tasks[task_id], now)

    def forget(self, task_id: str) -> None:
        """The task is not pending any more; it makes room in the window if it was out."""
        line = self._places.get(task_id)
        if line is not None:
            line.queue.remove(task_id)
            self._drop_if_idle(line.queue.name, self._lanes[line.queue.name])
        self._take_in(task_id)
        self.gate.forget(task_id)

    def is_out(self, task_id: str) -> bool:
        """Whether a ready record of the task was sent that nobody started or gave back yet."""
        return task_id in self._out

    def started(self, task_id: str) -> None:
        """A worker started it: the window may grow."""
        out = self._out.get(task_id)
        if out is not None:
            lane = self._lanes[out.lane]
            lane.window = min(WINDOW_MAX, lane.window + 1)
            lane.full[out.priority].pop(out.partition, None)
        self.forget(task_id)  # it may also wait here again: given back by one worker, started by another

    def given_back(self, task: Task, now: int, *, is_full: bool) -> None:
        """A worker returned it unstarted; first in line again. `is_full`: since it had no free slot."""
        self.gate.note_back(task.task_id)
        out = self._wait_again(task, now)
        if is_full and out is not None:
            # What was known of a queue may have been dropped when it had nothing else.
            lane, partitions = self._lanes[out.lane], range(self._partitions.get((out.lane[0], out.priority), 1))
            full = lane.full[out.priority]
            full[out.partition] = now
            lane.window = max(1, lane.window // 2)
            if all(partition in full for partition in partitions):
                lane.blocked_until[out.priority] = now + PROBE_US

    def not_sent(self, task: Task, now: int) -> None:
        """Its ready record did not reach its topic, or nobody knows; first in line again."""
        self._wait_again(task, now)

    def _wait_again(self, task: Task, now: int) -> _Out | None:
        """How it was out, if it was. Limits may have come meanwhile, or its queue may be paused."""
        out = self._take_in(task.task_id)
        if out is not None:
            lane = self._lane(out.lane)
            if self.gate.admits(task, now):
                self._put(lane, out.priority, task, is_first=True)
        return out

    def unblock(self) -> None:
        """A worker has a free slot (again)."""
        for lane in self._lanes.values():
            lane.blocked_until = dict.fromkeys(PRIORITIES, 0)

    def pick(self, now: int, partitions_of: PartitionsOf, size_of: SizeOf) -> list[Dispatched]:
        """What is to be sent now: within the windows, by weight, and what went out long ago without being started."""
        self._look_at = None
        picked = self._pick_resends(now, partitions_of)
        for key, lane in self._lanes.items():
            lane.unblock_due(now)
            if not lane.waiting or self._policies.is_paused(key[0]):
                continue
            partitions = self._writable(key[0], lane, now, partitions_of)
            room = lane.window - sum(lane.out.values())
            allowed: Collection[Priority] = partitions
            while allowed and (chosen := lane.waiting.pop(allowed, self._policies.weight_of)):
                task_id, priority, tenant_id = chosen
                out = _Out(key, priority, tenant_id, 0, size_of(task_id), now + RESEND_US, RESEND_US)
                picked.append(Dispatched(task_id, self._send(task_id, out, partitions[priority], now), False))
                room -= 1
                if room <= 0 or lane.out_bytes >= WINDOW_BYTES_MAX:
                    allowed = [one for one in lane.open_priorities() if one in partitions]
        return picked

    def _writable(self, queue: str, lane: _Lane, now: int, partitions_of: PartitionsOf) -> dict[Priority, int]:
        """The priorities that may go out and can be written, with the partitions of their topics."""
        partitions = {priority: partitions_of(queue, priority) for priority in lane.open_priorities()}
        if all(partitions.values()):
            return partitions
        self._look_at = now + HELD_US
        return {priority: count for priority, count in partitions.items() if count}

    def next_at(self) -> int | None:
        """When time alone may make something to be sent."""
        instants = [
            until
            for lane in self._lanes.values()
            for priority in lane.waiting.priorities()
            if (until := lane.blocked_until[priority])
        ]
        resend_at = self._resends.next_at()
        instants += [at for at in (resend_at, self._look_at) if at is not None]
        return min(instants, default=None)

    def depth(self) -> Counter[DepthKey]:
        """How many pending tasks there are, those that are out included. Safe from any thread."""
        counts: Counter[DepthKey] = Counter()
        for (queue, _), lane in list(self._lanes.items()):
            for line in lane.waiting.lines():
                counts[queue, line.priority, line.tenant_id] += line.count
        counts.update((out.lane[0], out.priority, out.tenant_id) for out in list(self._out.values()))
        counts.update(self.gate.depth())
        return counts

    def oldest(self) -> Iterator[tuple[DepthKey, str]]:
        """The tasks that are to go first, and those that are out."""
        for (queue, _), lane in self._lanes.items():
            for line in lane.waiting.lines():
                yield (queue, line.priority, line.tenant_id), line.first()
        yield from self.gate.oldest()
        for task_id, out in self._out.items():
            yield (out.lane[0], out.priority, out.tenant_id), task_id

    def _pick_resends(self, now: int, partitions_of: PartitionsOf) -> list[Dispatched]:
        picked = []
        for task_id in self._resends.pop_due(now, WINDOW_MAX):
            out = self._out.get(task_id)
            if out is None:
                continue
            queue = out.lane[0]
            partitions = 0 if self._policies.is_paused(queue) else partitions_of(queue, out.priority)
            if not partitions:
                self._resends.set(task_id, now + RESEND_US)  # nothing was sent: the waits do not grow
                continue
            wait_us = min(2 * out.wait_us, RESEND_US_MAX)
            again = out._replace(resend_at=now + wait_us, wait_us=wait_us)
            self._count_out(out, -1)
            picked.append(Dispatched(task_id, self._send(task_id, again, partitions, now), True))
        return picked

    def _lane(self, key: LaneKey) -> _Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane(key, self._places, self._weights)
        return lane

    def _put(self, lane: _Lane, priority: Priority, task: Task, *, is_first: bool) -> None:
        lane.waiting.put(task.task_id, priority, task.spec.tenant_id, is_first=is_first)

    def _send(self, task_id: str, out: _Out, partitions: int, now: int) -> int:
        topic = out.lane[0], out.priority
        self._partitions[topic] = partitions
        load = self._load.setdefault(topic, [])
        load += [0] * (partitions - len(load))  # what is out in partitions that are gone is still counted there
        partition = _chosen(load[:partitions], self._lanes[out.lane].full[out.priority], now)
        out = out._replace(partition=partition)
        self._count_out(out, 1)
        self._out[task_id] = out
        self._resends.set(task_id, out.resend_at)
        self.gate.note_out(task_id)
        return partition

    def _take_in(self, task_id: str) -> _Out | None:
        out = self._out.pop(task_id, None)
        if out is not None:
            self._resends.cancel(task_id)
            self._count_out(out, -1)
            self._drop_if_idle(out.lane, self._lanes[out.lane])
        return out

    def _count_out(self, out: _Out, difference: int) -> None:
        lane = self._lanes[out.lane]
        lane.out[out.priority] += difference
        lane.out_bytes += difference * out.size
        self._load[out.lane[0], out.priority][out.partition] += difference

    def _drop_if_idle(self, key: LaneKey, lane: _Lane) -> None:
        # Lanes of a hundred types are kept for what was learnt of their windows; beyond that names may come and go.
        if len(self._lanes) > IDLE_LANES_MAX and lane.is_idle():
            del self._lanes[key]
            if not any(queue == key[0] for queue, _ in self._lanes):
                for priority in PRIORITIES:
                    self._load.pop((key[0], priority), None)
                    self._partitions.pop((key[0], priority), None)


def _chosen(load: Sequence[int], full: Mapping[int, int], now: int) -> int:
    """The partition with the fewest records out, of those whose worker did not say lately that it has no slot.

    If none has one it is the partition that was asked longest ago: one record tells whether there is a slot again.
    """
    if not full:
        return load.index(min(load))
    numbers = range(len(load))
    if all(number in full for number in numbers):
        return min(numbers, key=full.__getitem__)
    free = [number for number in numbers if number not in full or full[number] + PROBE_US <= now]
    return min(free, key=load.__getitem__)
