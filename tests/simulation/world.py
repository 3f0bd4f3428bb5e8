"""A log, a state store and a clock in which everything that may go wrong does, as one seed says.

Appended entries travel: they land later, in order for each connection, some not at all, some twice; what landed is
acknowledged later still, or reported as failed. Owners that were paused or replaced go on writing. Nothing here knows
what the records mean.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from scheduler.ports import Entry, OnAck, Record, TopicPartition
from schemas.errors import Fenced, Retriable, TidewheelIOError

TRANSCRIPT_LINES = 4_000


@dataclass
class Faults:
    """Probabilities of what goes wrong; all zero once the chaos is over."""

    lose: float = 0.01  # an append fails and never lands
    half: float = 0.01  # an append lands in part, and fails
    lost_ack: float = 0.01  # an append lands, and is reported as failed
    double: float = 0.01  # an append lands twice
    no_offset: float = 0.005  # an append lands, and nobody says where
    forget: float = 0.08  # an entry of a topic on which nobody relies never lands
    late_copy: float = 0.04  # it lands again, later
    odd: float = 0.02  # a ready topic has fewer partitions for a while, or none that can be written

    @classmethod
    def none(cls) -> Faults:
        """All is well."""
        return cls(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass
class Batch:
    """Entries on their way."""

    entries: Sequence[Entry]
    on_ack: OnAck | None
    fate: str = "lands"
    offsets: list[int] = field(default_factory=list)


class World:
    """What outlives every process: partitions, groups, checkpoints, true time."""

    def __init__(self, seed: int, shards: int, sizes: Mapping[str, int], unreliable: Collection[str] = ()) -> None:
        self.seed, self.rng = seed, Random(seed)
        self._unreliable = unreliable
        self.shards, self._sizes = shards, sizes
        self.began = self.now = 1_800_000_000_000_000
        self.faults = Faults()
        self.partitions: dict[TopicPartition, list[Record]] = defaultdict(list)
        self.groups: dict[str, dict[TopicPartition, SimMember | None]] = defaultdict(dict)
        self.committed: dict[tuple[str, TopicPartition], int] = {}
        self.connections: list[SimLog] = []
        self.on_append: list[Callable[[str, Entry], None]] = []
        self._late: list[tuple[int, Entry]] = []
        self.transcript: deque[str] = deque(maxlen=TRANSCRIPT_LINES)

    def say(self, who: str, what: str) -> None:
        """Add a line to the transcript."""
        self.transcript.append(f"{(self.now - self.began) / 1e6:10.3f} {who:<12} {what}")

    def partitions_of(self, topic: str) -> int:
        """As many as there are shards, unless `sizes` says otherwise."""
        return self._sizes.get(topic, self.shards)

    def chance(self, probability: float) -> bool:
        """Whether it happens this time."""
        return probability > 0 and self.rng.random() < probability

    def land(self, entry: Entry) -> int:
        """Append one entry to its partition for good."""
        partition = TopicPartition(entry.topic, entry.partition)
        records = self.partitions[partition]
        records.append(Record(entry.topic, entry.partition, len(records), entry.key, entry.value))
        return len(records) - 1

    def land_late(self) -> None:
        """Copies whose time has come."""
        for at, entry in self._late.copy():
            if at <= self.now:
                self._late.remove((at, entry))
                self.land(entry)

    def lands(self, entry: Entry) -> bool:
        """Whether an entry lands at all: one of a topic on which nobody relies may not, or again later."""
        if entry.topic not in self._unreliable:
            return True
        if self.chance(self.faults.late_copy):
            self._late.append((self.now + self.rng.randint(0, 5) * 1_000_000, entry))
        return not self.chance(self.faults.forget)

    def members(self, group: str) -> list[SimMember]:
        """The live members of a group."""
        return [m for c in self.connections for m in c.members if m.group == group and not m.is_closed]

    def assign(self, group: str) -> None:
        """Give each partition number that has no live owner to a random member, with all its topics."""
        members = self.members(group)
        owners = self.groups[group]
        wanted = sorted({p for m in members for p in m.wanted()})
        for number in sorted({p.partition for p in wanted}):
            partitions = [p for p in wanted if p.partition == number]
            alive = {owners.get(p) for p in partitions} & set(members)
            if len(alive) != 1 or any(owners.get(p) not in alive for p in partitions):
                owner = self.rng.choice(members)
                owners.update(dict.fromkeys(partitions, owner))

    def move(self, group: str) -> None:
        """Move a random partition number of a group (all its topics) to a random member."""
        members = self.members(group)
        if members and self.groups[group]:
            number = self.rng.choice(sorted({p.partition for p in self.groups[group]}))
            member = self.rng.choice(members)
            for partition in self.groups[group]:
                if partition.partition == number:
                    self.groups[group][partition] = member
            self.say("group", f"{group}: {number} → {member.log.name}")


class SimClock:
    """True time, and how wrong this process is about it."""

    def __init__(self, world: World, error_us: int = 0) -> None:
        self._world = world
        self.error_us = error_us

    def now_us(self) -> int:
        """What the process believes."""
        return self._world.now + self.error_us


class SimLog:
    """One process's connection."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.in_transit: deque[Batch] = deque()
        self.landed: deque[Batch] = deque()
        self.members: list[SimMember] = []
        self.is_dead = False
        self.is_broken = False  # an append failed, which is not reported yet
        self._writable: dict[str, int] = {}  # partitions of ready topics
        self._odd_until: dict[str, int] = {}
        world.connections.append(self)

    def partitions(self, topic: str) -> int:
        return self.world.partitions_of(topic)

    def ready_partitions(self, topic: str) -> int:
        """Now and then a topic cannot be written for a while, as seen from here, or has fewer partitions."""
        faults, world = self.world.faults, self.world
        if world.now >= self._odd_until.get(topic, 0):
            self._writable[topic] = world.shards
            if world.chance(faults.odd):
                self._writable[topic] = world.rng.randrange(world.shards)
                self._odd_until[topic] = world.now + world.rng.choice((1, 5, 20)) * 1_000_000
        return self._writable[topic] if faults.odd else world.shards

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        for entry in entries:
            if self.world.faults.odd and entry.topic in self._writable:
                writable = self._writable[entry.topic]
                assert entry.partition < writable, f"{entry.topic}[{entry.partition}] cannot be written"
            for watch in self.world.on_append:
                watch(self.name, entry)
        self.in_transit.append(Batch(entries, on_ack, self._fate(len(entries))))

    def _fate(self, entries: int) -> str:
        faults, chance = self.world.faults, self.world.chance
        for fate in ("lose", "half", "lost_ack", "double", "no_offset"):
            if chance(getattr(faults, fate)) and not (fate == "half" and entries < 2):
                return fate
        return "lands"

    def land_some(self) -> None:
        """Some of what travels arrives, in order. Behind one that failed nothing lands until the failure is known."""
        for _ in range(self.world.rng.randint(0, len(self.in_transit))):
            batch = self.in_transit.popleft()
            entries = batch.entries
            if self.is_broken:
                batch.fate = "lose"
            self.is_broken = self.is_broken or batch.fate in ("lose", "half")
            if batch.fate == "lose":
                entries = []
            elif batch.fate == "half":
                entries = entries[: len(entries) // 2]
            batch.offsets = self._landed(entries)
            if batch.fate == "double":
                batch.offsets = self._landed(entries)
            if batch.fate != "lands":
                self.world.say(self.name, f"append of {len(batch.entries)}: {batch.fate}")
            self.landed.append(batch)

    def _landed(self, entries: Sequence[Entry]) -> list[int]:
        return [self.world.land(entry) for entry in entries if self.world.lands(entry)]

    def die(self) -> None:
        """The process is gone; of what it had sent, some still arrives."""
        self.is_dead = True
        self.land_some()
        self.in_transit.clear()
        for member in self.members:
            member.is_closed = True
        self.world.connections.remove(self)

    def poll(self, timeout_s: float) -> None:
        for member in self.members:
            member.refresh()
        for _ in range(self.world.rng.randint(0, len(self.landed)) if self.landed else 0):
            batch = self.landed.popleft()
            self._report(batch)
            if batch.fate in ("lose", "half"):
                self._fail_all()
                break

    def _fail_all(self) -> None:
        """After a failure nothing that was appended up to now lands any more, and all of it is reported at once."""
        while self.landed:
            self._report(self.landed.popleft())
        while self.in_transit:
            batch = self.in_transit.popleft()
            batch.fate = "lose"
            self._report(batch)
        self.is_broken = False

    def _report(self, batch: Batch) -> None:
        if batch.on_ack is None:
            return
        if batch.fate in ("lose", "half", "lost_ack"):
            batch.on_ack(Retriable(f"simulated: {batch.fate}"))
        elif batch.fate == "no_offset":
            batch.on_ack([-1] * len(batch.entries))
        else:
            batch.on_ack(batch.offsets)

    def wake(self) -> None:
        pass

    def reader(self) -> SimReader:
        return SimReader(self.world)

    def member(self, group: str, topics: Iterable[str]) -> SimMember:
        member = SimMember(self, group, tuple(topics))
        self.members.append(member)
        self.world.assign(group)
        return member

    def end_offset(self, partition: TopicPartition) -> int:
        return len(self.world.partitions[partition])

    def is_disturbed(self) -> bool:
        return False

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        pass

    def close(self) -> None:
        pass


class SimReader:
    """Reads given partitions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._positions: dict[TopicPartition, int] = {}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._positions[partition] = offset

    def take(self, limit: int) -> Sequence[Record]:
        taken: list[Record] = []
        for partition, offset in self._positions.items():
            there = self._world.partitions[partition][offset:]
            some = there[: self._world.rng.randint(0, min(limit, len(there)))] if there else []
            self._positions[partition] = offset + len(some)
            taken.extend(some)
        return taken

    def close(self) -> None:
        self._positions.clear()


class SimMember(SimReader):
    """A member of a group; it learns late what was taken from it."""

    def __init__(self, log: SimLog, group: str, topics: tuple[str, ...]) -> None:
        super().__init__(log.world)
        self.log, self.group, self.topics = log, group, topics
        self.is_closed = False
        self._assigned: frozenset[TopicPartition] = frozenset()
        self._wanted = [TopicPartition(topic, p) for topic in topics for p in range(log.world.shards)]

    def wanted(self) -> list[TopicPartition]:
        return self._wanted

    def refresh(self) -> None:
        """Learn the assignment, sooner or later."""
        owners = self._world.groups[self.group]
        assigned = frozenset(p for p in self.wanted() if owners.get(p) is self)
        if assigned != self._assigned and self._world.rng.random() < 0.5:
            self._assigned = assigned
            self._positions = {p: offset for p, offset in self._positions.items() if p in assigned}

    def assigned(self) -> frozenset[TopicPartition]:
        return self._assigned

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if partition in self._assigned:
            super().seek(partition, offset)

    def resume(self, partition: TopicPartition) -> None:
        self.seek(partition, self._world.committed.get((self.group, partition), 0))

    def is_begun(self, partition: TopicPartition) -> bool:
        return partition in self._positions

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        for partition, offset in positions.items():
            key = (self.group, partition)
            self._world.committed[key] = max(offset, self._world.committed.get(key, 0))

    def close(self) -> None:
        self.is_closed = True
        self._world.assign(self.group)


class SimStates:
    """The checkpoints of all shards. A commit is applied later, or lost; the fence is looked at then."""

    is_fencing = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.states: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        self.tokens: dict[int, int] = defaultdict(int)
        self._begun: deque[tuple[SimLog, int, int, Iterable[tuple[bytes, bytes | None]], Callable[..., None]]] = deque()

    def of(self, log: SimLog) -> SimStatesConnection:
        """The store as one process sees it."""
        return SimStatesConnection(self, log)

    def begin(self, *commit: object) -> None:
        self._begun.append(commit)  # type: ignore[arg-type]

    def apply_some(self) -> None:
        """Some of what was committed is applied."""
        for _ in range(self.world.rng.randint(0, len(self._begun)) if self._begun else 0):
            log, shard, token, changes, on_done = self._begun.popleft()
            if log.is_dead and self.world.rng.random() < 0.5:
                continue
            error: TidewheelIOError | None = None
            if self.is_fencing and token != self.tokens[shard]:
                error = Fenced("simulated: another owner took over")
            elif self.world.chance(self.world.faults.lose):
                error = Retriable("simulated: the store did not answer")
            else:
                for key, value in changes:
                    if value is None:
                        self.states[shard].pop(key, None)
                    else:
                        self.states[shard][key] = value
            if not log.is_dead:
                on_done(error)


class SimStatesConnection:
    """StateStore of one process."""

    def __init__(self, states: SimStates, log: SimLog) -> None:
        self._states, self._log = states, log

    def fence(self, shard: int) -> int:
        self._states.tokens[shard] += 1
        return self._states.tokens[shard]

    def load(self, shard: int) -> Iterable[tuple[bytes, bytes]] | None:
        if self._log.world.chance(0.5):  # it takes a moment longer
            return None
        return list(self._states.states[shard].items())

    def commit(
        self,
        shard: int,
        token: int,
        changes: Iterable[tuple[bytes, bytes | None]],
        on_done: Callable[[TidewheelIOError | None], None],
    ) -> None:
        self._states.begin(self._log, shard, token, changes, on_done)

    def close(self) -> None:
        pass
