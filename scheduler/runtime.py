"""The only code that orders effects: inputs are decided, events appended, and effects released once acknowledged.

A SchedulerRuntime hosts the shards that its group gives it, all in one loop:

    poll → follow the assignment → receive → for each shard: release what was acknowledged, decide, append,
    dispatch, maybe checkpoint
"""

from __future__ import annotations

import threading
from collections import Counter
from random import Random

import structlog

from scheduler.core.policies import Policies
from scheduler.host import Phase, RuntimeSettings, ShardHost
from scheduler.lateness import Lateness, TimerLateness
from scheduler.policy_topic import PolicyFollower
from scheduler.ports import Clock, Log, Member, Record, StateStore, TopicPartition
from schemas.codec import Codec
from schemas.errors import Fatal
from schemas.ids import shard_of
from schemas.messages import EndedTask, Schedule, Status, Task
from schemas.topics import (
    INPUT_TOPICS,
    REPLIES,
    SHARD_MESSAGES,
    TASK_REPORTS,
    TASK_REQUESTS,
    TASK_REQUESTS_INVALID,
    delay_topic,
)
from schemas.wheel import WheelShape

WAIT_S_MAX = 0.5  # a loop without news turns at least so often: for the assignment, and for clocks set back
TAKE_MAX = 1_000  # records an iteration decides: about 20 ms of work, so that timers and acks are not kept waiting
TAKE_BYTES = 1 << 20  # adapters may stop at a few MiB: only less than this shows that there was no more
# A loop that stood still for so long (a paused process, a suspended machine, a clock set forward) has heard nobody
# meanwhile: half of the time after which a worker is given up.
STANDSTILL_US = 3_000_000
FINISH_US = 1_000_000  # for what is on its way to the log when a shard is given up
FINISH_POLL_S = 0.05
GROUP = "schedulers"

_log = structlog.get_logger(__name__)


class SchedulerRuntime:
    """Hosts the shards that the group assigns to this process. One thread calls `run`, or `step`."""

    def __init__(
        self, log: Log, states: StateStore, codec: Codec, clock: Clock, rng: Random, settings: RuntimeSettings
    ) -> None:
        self._log, self._states, self._codec, self._clock, self._rng = log, states, codec, clock, rng
        self._settings = settings
        self._shards = log.partitions(TASK_REQUESTS)
        for topic in (REPLIES, TASK_REQUESTS_INVALID):
            log.partitions(topic)  # what hosts ask for is asked for here, where a log that is away is waited for
        self._check_wheel(settings.shard.wheel)
        self._following = PolicyFollower(log, codec)
        self._member: Member = log.member(GROUP, (*INPUT_TOPICS, SHARD_MESSAGES))
        self._hosts: dict[int, ShardHost] = {}
        self._assigned: frozenset[TopicPartition] = frozenset()
        self._drained_at = 0  # when all inputs that were there had been taken
        # Shards that went to others, and until when acknowledgements are awaited.
        self._leaving: dict[ShardHost, int] = {}
        self._was_disturbed = False
        self.last_step_at = 0
        self.lateness = TimerLateness(Lateness(), Lateness())  # of all shards that were here: counts never decrease

    def _check_wheel(self, shape: WheelShape) -> None:
        """Fatal: a slot is a partition that is found by its number, and some of them would be none, or another's."""
        wanted = self._shards * shape.slots
        for level in shape.levels:
            topic = delay_topic(level)
            found = self._log.partitions(topic)
            if found != wanted:
                raise Fatal(
                    f"{topic} has {found} partitions, but {self._shards} shards with {shape.slots} slots of the delay "
                    f"wheel need {wanted}. Nothing was read or written. `tidewheel topics plan` tells what to do"
                )

    @property
    def policies(self) -> Policies:
        """What operators say of queues and tenants, as far as it was read here."""
        return self._following.policies

    @property
    def hosts(self) -> dict[int, ShardHost]:
        """The shards of this process."""
        return self._hosts

    def live(self, task_id: str) -> Task | EndedTask | None:
        """What an active shard of this process knows of a task. Safe from any thread."""
        host = self._hosts.get(shard_of(task_id, self._shards))
        return host.shard.known(task_id) if host is not None and host.phase is Phase.ACTIVE else None

    def live_schedule(self, schedule_id: str) -> Schedule | None:
        """A schedule, or None if there is none. Safe from any thread. Raises LookupError: its shard is not here."""
        host = self._hosts.get(shard_of(schedule_id, self._shards))
        if host is None or host.phase is not Phase.ACTIVE:
            raise LookupError(schedule_id)
        return host.shard.state.schedules.get(schedule_id)

    def run(self, stop: threading.Event) -> None:
        """Turn the loop until `stop` is set (and `log.wake` called), then leave the group."""
        try:
            while not stop.is_set():
                self.step(self._wait_s())
            self._finish_all()
        finally:
            self._following.close()
            self._member.close()

    def step(self, timeout_s: float) -> None:
        """One turn of the loop; waits up to `timeout_s` if there is nothing to do."""
        self._log.poll(timeout_s)
        now = self._clock.now_us()
        is_disturbed = self._log.is_disturbed()
        if now - self.last_step_at > STANDSTILL_US or (self._was_disturbed and not is_disturbed):
            for host in self._hosts.values():
                host.shard.excuse_silence(now)
        self._was_disturbed = is_disturbed
        self._follow_assignment()
        self._finish_leaving(now)
        self._take_held_again(now)
        has_new_policies = self._following.follow(now)
        inputs = self._receive(now)
        for shard, host in self._hosts.items():
            if host.phase is Phase.LOADING:
                if self._following.is_current:  # else a queue that is paused would be let go
                    self._load(host, now)
            elif host.phase is Phase.SUPERSEDED:
                host.maybe_return(now)
            elif shard in inputs or has_new_policies or host.is_due(now):
                host.step(inputs.get(shard, ()), self._drained_at, now)
        self.last_step_at = now

    def _wait_s(self) -> float:
        now = self._clock.now_us()
        next_at = min((host.next_at(now) for host in self._hosts.values()), default=now + 1_000_000)
        if self._leaving:
            next_at = min(next_at, now + 10_000)
        if not self._following.is_current:  # the shards wait for that
            next_at = max(next_at, now + 10_000)
        return min(WAIT_S_MAX, max(0.0, (next_at - now) / 1e6))

    def _follow_assignment(self) -> None:
        assigned = self._member.assigned()
        if assigned == self._assigned:
            return
        for partition in sorted(assigned - self._assigned):
            if partition.topic == SHARD_MESSAGES:  # what was said before is of no use
                self._member.seek(partition, self._log.end_offset(partition))
        self._assigned = assigned
        owned = {partition for topic, partition in assigned if topic == TASK_REQUESTS}
        owned &= {partition for topic, partition in assigned if topic == TASK_REPORTS}
        if owned == self._hosts.keys():
            return
        for shard in self._hosts.keys() - owned:
            self._leaving[self._hosts.pop(shard)] = self._clock.now_us() + FINISH_US
            _log.info("shard left", shard=shard)
        for shard in sorted(owned - self._hosts.keys()):
            rng = Random(self._rng.getrandbits(64))
            self._hosts[shard] = ShardHost(
                shard, self._log, self._states, self._codec, self._settings, rng, self.lateness, self.policies
            )

    def _receive(self, now: int) -> dict[int, list[Record]]:
        if not all(host.is_accepting() for host in self._hosts.values() if host.phase is Phase.ACTIVE):
            return {}  # a slow log: what is taken must be decided, so nothing is taken
        records = self._member.take(TAKE_MAX)
        inputs: dict[int, list[Record]] = {}
        for record in records:
            inputs.setdefault(record.partition, []).append(record)
        if self._was_disturbed:
            return inputs  # there may be more that cannot be read now: nobody's silence counts
        if len(records) < TAKE_MAX and sum(len(record.value or b"") for record in records) < TAKE_BYTES:
            self._drained_at = now
        return inputs

    def _finish_leaving(self, now: int) -> None:
        for host, until in tuple(self._leaving.items()):
            if host.finish(now) or now >= until:
                del self._leaving[host]
                host.close()

    def _finish_all(self) -> None:
        """Before the group is left: release what is acknowledged of all shards."""
        now = self._clock.now_us()
        self._leaving |= dict.fromkeys(self._hosts.values(), now + FINISH_US)
        while self._leaving:
            self._finish_leaving(self._clock.now_us())
            if self._leaving:
                self._log.poll(FINISH_POLL_S)

    def _take_held_again(self, now: int) -> None:
        for shard, host in self._hosts.items():
            for topic, offset in host.take_held(now).items():
                self._member.seek(TopicPartition(topic, shard), offset)

    def _load(self, host: ShardHost, now: int) -> None:
        host.load_step(now)
        positions = host.take_resume_positions()
        if positions is not None:
            for topic in INPUT_TOPICS:
                self._member.seek(TopicPartition(topic, host.shard_id), positions.get(topic, 0))

    def statuses(self) -> dict[Status, int]:
        """How many live tasks of this process have each status; of those in the delay wheel about how many."""
        counts: Counter[Status] = Counter()
        for host in list(self._hosts.values()):
            counts.update(host.shard.statuses.copy())  # a copy is made at once; the scheduler's thread goes on
            counts[Status.SCHEDULED] += sum(count for _, _, count in host.shard.parking.wheel.waiting())
        return counts

    def depth(self) -> dict[tuple[str, str], int]:
        """Pending tasks of this process by queue and priority. An estimate when called from another thread."""
        counts: Counter[tuple[str, str]] = Counter()
        for host in list(self._hosts.values()):
            for (queue, priority, _), count in host.shard.depth().items():
                counts[queue, priority.value] += count
        return counts
