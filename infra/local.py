"""The log of one process: partitions in memory, durable ones also in a storage that commits groups of records.

**What may be seen before it is durable.** `append` gives offsets at once. Records of topics with
`Visibility.AT_ONCE` (the inputs) are seen at once, before they are on disk. That is safe because of what follows from
them: a shard's events go to the same storage, never into an earlier commit than the input they were decided on, and a
crash leaves a prefix of the commits; whatever leaves the process (effects, answers) waits for the acknowledgement of
those events. So one fsync covers an input and its event. Records of topics with `Visibility.COMMITTED` (the events)
are seen after their commit, because the view and the state live in other files: they must never be ahead of the log.
One thing could still outlive a crash: a position of an uncommitted input, noted elsewhere. Hence a restart leaves
`RESTART_GAP` offsets unused in partitions of the first kind; no offset that anyone saw is given to another record.

**Who commits.** A connection made with `commits=True` commits at the entry of its `poll`: the loop that decides on
inputs appends its events, then polls, and both become durable together. Without such a connection (tests, tools)
`start_committer` runs a thread for it. Commits exclude one another, so two committers are harmless.

**After a failed commit** nothing is acknowledged any more and `append` and `poll` raise Fatal until the process is
started again: a log with a hole would be worse than none.

**Memory.** Uncommitted records are bounded by `PENDING_BYTES_MAX`. Behind them a partition holds what live readers
have not passed yet, within the bounds of its `TopicSpec`; a reader farther behind reads a durable partition from the
storage. A volatile partition is nowhere else: beyond the bounds its oldest records are dropped, read or not, and their
owner derives them again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from infra.topics import TopicCatalog, TopicSpec, Visibility
from scheduler.ports import Entry, OnAck, Record, TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError

PENDING_BYTES_MAX = 64 * 1024 * 1024  # not yet committed, keys and values and RECORD_OVERHEAD each
RECORD_OVERHEAD = 64  # bytes counted for a record beside its key and value; also bounds their number
RESTART_GAP = 2 * PENDING_BYTES_MAX // RECORD_OVERHEAD  # more than could have been seen and not committed
ACKS_MAX = 262_144  # callbacks of a connection that does not poll
WAIT_MAX_S = 3_600.0  # of one poll; a longer timeout only returns earlier
_PRUNE_RECORDS = 256  # a partition's memory is looked through when it holds so much, then when it doubled
_PRUNE_BYTES = 256 * 1024
_COMMITTER_WAIT_S = 1.0
_STOP_WAIT_S = 10.0


# --- what a storage must do -------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Records of one partition with offsets that follow one another."""

    partition: TopicPartition
    records: Sequence[Record]


class Extent(NamedTuple):
    """What a storage has of a partition: its oldest offset, and the one behind its newest."""

    oldest: int
    next_offset: int


class LogStart(NamedTuple):
    """What a storage holds when a broker starts on it; `start_count` is 1 at the first time."""

    start_count: int
    extents: Mapping[TopicPartition, Extent]
    positions: Mapping[tuple[str, TopicPartition], int]


class Storage(Protocol):
    """Keeps the durable partitions. `commit` is called by one thread at a time, the rest from any."""

    def start(self, topics: Sequence[TopicSpec]) -> LogStart:
        """Begin. Fatal: it was made with other numbers of partitions, or cannot be used."""

    def commit(self, batches: Sequence[Batch], positions: Mapping[tuple[str, TopicPartition], int]) -> None:
        """Write records and group positions, whole or not at all, and return when they are durable."""

    def read(self, partition: TopicPartition, offset: int, limit: int) -> Sequence[Record]:
        """Committed records from `offset` on, at least one if there is any; about `limit`, more if that is cheaper."""

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below are not needed; they go later, and never the newest one (it tells the next offset)."""


# --- partitions -------------------------------------------------------------------------------------------------------


class _Partition:
    """A partition's memory: `tail` holds the records from `base` up to `next_offset`, without a hole."""

    __slots__ = (
        "base",
        "committed",
        "cursors",
        "groups",
        "is_seen_at_once",
        "key",
        "next_offset",
        "oldest",
        "prune_bytes",
        "prune_records",
        "spec",
        "tail",
        "tail_bytes",
    )

    def __init__(self, key: TopicPartition, spec: TopicSpec, extent: Extent) -> None:
        self.key = key
        self.spec = spec
        self.oldest = extent.oldest
        self.base = self.committed = self.next_offset = extent.next_offset
        self.is_seen_at_once = spec.visibility is Visibility.AT_ONCE or not spec.is_durable
        self.tail: list[Record] = []
        self.tail_bytes = 0
        self.prune_records = _PRUNE_RECORDS
        self.prune_bytes = _PRUNE_BYTES
        self.cursors: list[_Cursor] = []
        self.groups: list[_Group] = []

    @property
    def visible(self) -> int:
        """The offset behind the last record that readers may see."""
        return self.next_offset if self.is_seen_at_once else self.committed

    def uncommitted(self) -> list[Record]:
        return self.tail[self.committed - self.base :]

    def notify(self) -> None:
        for cursor in self.cursors:
            cursor.connection.notify()

    def maybe_prune(self) -> None:
        """Forget what nobody needs in memory; costs nothing until the tail has doubled since the last time."""
        if len(self.tail) < self.prune_records and self.tail_bytes < self.prune_bytes:
            return
        limit = self.committed if self.spec.is_durable else self.next_offset
        low = self._within_bounds(min(self._needed_from(), limit), limit)
        dropped = self.tail[: low - self.base]
        del self.tail[: low - self.base]
        self.base = low
        self.tail_bytes -= sum(map(_size, dropped))
        if not self.spec.is_durable:
            self.oldest = low
        self.prune_records = min(max(_PRUNE_RECORDS, 2 * len(self.tail)), self.spec.records_max + 1)
        self.prune_bytes = min(max(_PRUNE_BYTES, 2 * self.tail_bytes), self.spec.bytes_max + 1)

    def _needed_from(self) -> int:
        needed = [cursor.position for cursor in self.cursors]
        if self.spec.is_durable:
            return max(self.base, min(needed, default=self.committed))
        needed += (group.committed.get(self.key, self.base) for group in self.groups)
        return max(self.base, min(needed, default=self.base))

    def _within_bounds(self, low: int, limit: int) -> int:
        """Raise `low` as far as the bounds ask, with an eighth of room so that not every append must do it again."""
        if self.next_offset - low > self.spec.records_max:
            low = min(limit, self.next_offset - self.spec.records_max * 7 // 8)
        kept = sum(map(_size, self.tail[low - self.base :]))
        if kept > self.spec.bytes_max:
            while low < limit and kept > self.spec.bytes_max * 7 // 8:
                kept -= _size(self.tail[low - self.base])
                low += 1
        return low


def _size(record: Record) -> int:
    return RECORD_OVERHEAD + len(record.key or b"") + len(record.value or b"")


# --- reading ----------------------------------------------------------------------------------------------------------


class _Cursor:
    """How far one reader came in one partition. Moved by its own thread alone."""

    __slots__ = ("connection", "fetched", "partition", "position")

    def __init__(self, connection: LocalLog, partition: _Partition, position: int) -> None:
        self.connection = connection
        self.partition = partition
        self.position = position
        self.fetched: deque[Record] = deque()  # from the storage, not yet taken

    def take(self, limit: int, lock: threading.Lock, storage: Storage) -> Sequence[Record]:
        """Up to `limit` (at least 1) records from memory or, outside of the lock, from the storage."""
        partition = self.partition
        while not self.fetched:
            with lock:
                base = partition.base
                start = self.position - base
                if start >= 0:
                    records = partition.tail[start : max(start, min(start + limit, partition.visible - base))]
                    self.position += len(records)
                    return records
            self._fetch(base, limit, storage)
        taken = [self.fetched.popleft() for _ in range(min(limit, len(self.fetched)))]
        self.position = taken[-1].offset + 1
        return taken

    def _fetch(self, base: int, limit: int, storage: Storage) -> None:
        """Read what is below `base`; from there on it is in memory. If nothing is left below, go on there."""
        if self.partition.spec.is_durable:
            found = storage.read(self.partition.key, self.position, limit)
            self.fetched.extend(record for record in found if record.offset < base)
        if not self.fetched:
            self.position = base

    @property
    def has_more(self) -> bool:
        return bool(self.fetched) or self.position < self.partition.visible


class _Cursors:
    """The cursors of a reader or member; taking is fair: each call begins behind the partition where the last ended."""

    def __init__(self, broker: LocalBroker, connection: LocalLog) -> None:
        self._broker = broker
        self._connection = connection
        self._cursors: dict[TopicPartition, _Cursor] = {}
        self._turn: deque[_Cursor] = deque()

    def begin(self, partition: _Partition, position: int) -> None:
        """Read `partition` from `position` on; the broker's lock is held."""
        self.end(partition.key)
        cursor = _Cursor(self._connection, partition, max(position, partition.oldest))
        self._cursors[partition.key] = cursor
        partition.cursors.append(cursor)
        self._turn.append(cursor)
        if cursor.has_more:
            self._connection.notify()

    def end(self, key: TopicPartition) -> None:
        """Stop reading `partition`; the broker's lock is held."""
        cursor = self._cursors.pop(key, None)
        if cursor is not None:
            cursor.partition.cursors.remove(cursor)
            self._turn.remove(cursor)

    def end_all(self) -> None:
        """Stop reading; the broker's lock is held."""
        for key in tuple(self._cursors):
            self.end(key)

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` records; if there are more, the next `poll` does not wait."""
        taken: list[Record] = []
        turn = self._turn
        for _ in range(len(turn)):
            if len(taken) >= limit:
                break
            cursor = turn[0]
            if cursor.has_more:  # without the lock: what comes right after this look is announced to `poll`
                taken += cursor.take(limit - len(taken), self._broker.lock, self._broker.storage)
            turn.rotate(-1)
        if taken and any(cursor.has_more for cursor in turn):
            self._connection.wake()
        return taken


class LocalReader:
    """Implements `ports.Reader`."""

    def __init__(self, broker: LocalBroker, connection: LocalLog) -> None:
        self._broker = broker
        self._connection = connection
        self._cursors = _Cursors(broker, connection)
        self._is_closed = False

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read `partition` from `offset` on; below the oldest record kept, from there."""
        with self._broker.lock:
            if self._is_closed:
                raise Fatal("the reader is closed")
            self._cursors.begin(self._broker.find(*partition), offset)

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records that are there now."""
        return self._cursors.take(limit)

    def close(self) -> None:
        """Stop reading; idempotent."""
        with self._broker.lock:
            self._is_closed = True
            self._cursors.end_all()
        self._connection.forget(self)


# --- groups -----------------------------------------------------------------------------------------------------------


class _Group:
    """Members that share partitions; their committed offsets outlive them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[LocalMember] = []
        self.partitions: dict[TopicPartition, _Partition] = {}
        self.committed: dict[TopicPartition, int] = {}

    def join(self, member: LocalMember, partitions: Iterable[_Partition]) -> None:
        for partition in partitions:
            self.partitions[partition.key] = partition
            if self not in partition.groups:
                partition.groups.append(self)
        self.members.append(member)
        self._rebalance()

    def leave(self, member: LocalMember) -> None:
        self.members.remove(member)
        self._rebalance()

    def _rebalance(self) -> None:
        """Give each member its share, moving as few partitions as that needs.

        By number, then topic: equal numbers of several topics tend to stay together.
        """
        keys = sorted(self.partitions, key=lambda key: (key.partition, key.topic))
        shares: dict[LocalMember, set[TopicPartition]] = {member: set() for member in self.members}
        quota, extra = divmod(len(keys), max(1, len(self.members)))
        owners = {key: member for member in self.members for key in member.owned}
        homeless = []
        for key in keys:
            owner = owners.get(key)
            has_room = owner is not None and len(shares[owner]) < quota + (extra > 0)
            if owner is None or not has_room:
                homeless.append(key)
                continue
            shares[owner].add(key)
            extra -= len(shares[owner]) == quota + 1
        for key in homeless:
            candidates = [member for member in self.members if key.topic in member.topics]
            if candidates:
                shares[min(candidates, key=lambda member: len(shares[member]))].add(key)
        for member, share in shares.items():
            member.assign(frozenset(share))


class LocalMember:
    """Implements `ports.Member`; the topics' partitions are created when the first member joins."""

    def __init__(self, broker: LocalBroker, connection: LocalLog, group: _Group, topics: Iterable[str]) -> None:
        self._broker = broker
        self._connection = connection
        self._group = group
        self._cursors = _Cursors(broker, connection)
        self._is_closed = False
        self._revoked: set[TopicPartition] = set()  # not yet noticed by the thread that takes
        self._unseen: set[TopicPartition] = set()  # taken away since `assigned` was asked last
        self.topics = frozenset(topics)
        self.owned: frozenset[TopicPartition] = frozenset()

    def assign(self, owned: frozenset[TopicPartition]) -> None:
        """The group gives this member other partitions; from any thread, the broker's lock is held."""
        if owned != self.owned:
            self._revoked |= self.owned - owned
            self._unseen |= self.owned - owned
            self.owned = owned
            self._connection.notify()

    def assigned(self) -> frozenset[TopicPartition]:
        """What belongs to this member now; a new partition is silent until `seek` or `resume`.

        One that was taken away and given back since the last call is missing once, so that its owner begins it anew.
        """
        if not self._unseen:
            return self.owned
        with self._broker.lock:
            given_back = self._unseen & self.owned
            self._unseen.clear()
            if given_back:
                self._connection.notify()
            return self.owned - given_back

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Begin an assigned partition at `offset`; nothing happens if it was taken away meanwhile."""
        with self._broker.lock:
            self._end_revoked()
            if partition in self.owned:
                self._cursors.begin(self._group.partitions[partition], offset)

    def resume(self, partition: TopicPartition) -> None:
        """Begin an assigned partition where the group committed last, or at its oldest record."""
        self.seek(partition, self.position(partition))

    def position(self, partition: TopicPartition) -> int:
        """Where the group committed last; 0 before that."""
        return self._group.committed.get(partition, 0)

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records of begun partitions."""
        if self._revoked:
            with self._broker.lock:
                self._end_revoked()
        return self._cursors.take(limit)

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Remember the next offset to read; of durable topics with the next commit of the log."""
        with self._broker.lock:
            for key, offset in positions.items():
                if offset > self._group.committed.get(key, -1):
                    self._group.committed[key] = offset
                    self._broker.note_position(self._group.name, key, offset)

    def close(self) -> None:
        """Leave; the partitions go to the other members. Idempotent."""
        with self._broker.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._group.leave(self)
            self._cursors.end_all()
            self.owned = frozenset()
        self._connection.forget(self)

    def _end_revoked(self) -> None:
        for key in self._revoked:
            self._cursors.end(key)
        self._revoked.clear()


# --- connections ------------------------------------------------------------------------------------------------------


class _Ack(NamedTuple):
    """A callback that is due when commit number `commit` is done; 0 is done from the beginning."""

    commit: int
    on_ack: OnAck
    offsets: Sequence[int]


class LocalLog:
    """Implements `ports.Log`. Make one with `LocalBroker.connect`.

    Records that one `poll` announced and that were not taken do not keep the next one from waiting: who has no room
    for them does not spin.
    """

    def __init__(self, broker: LocalBroker, *, commits: bool) -> None:
        self._broker = broker
        self.commits = commits
        self._acks: deque[_Ack] = deque()
        self._closables: list[LocalReader | LocalMember] = []
        self._has_news = False
        self._is_waiting = False
        self._is_closed = False
        self._gate = threading.Lock()  # held by nobody but the waiting poll; whoever has news for it lets it through
        self._gate.acquire()

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Fatal: no such topic."""
        return self._broker.catalog.spec(topic).partitions

    def ready_partitions(self, topic: str) -> int:
        """As `partitions`: all of them can always be written."""
        return self.partitions(topic)

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Append entries; seen at once or after the commit, as their topics say. Raises Retriable when full."""
        self._broker.append(self, entries, on_ack)

    def poll(self, timeout_s: float) -> None:
        """Commit if this connection does that, call due `on_ack`s; then wait if there was no news. Fatal: see above."""
        broker = self._broker
        if self._is_closed:
            raise Fatal("the connection to the log is closed")
        if self.commits and broker.is_dirty:
            broker.commit()
        if self._deliver_acks() or self._claim_news():
            return
        deadline = time.monotonic() + min(timeout_s, WAIT_MAX_S)
        while self._wait_until(deadline):
            # News first: their reader may add to what the next commit takes.
            if self._claim_news():
                self._deliver_acks()
                return
            if self.commits and broker.is_dirty:
                broker.commit()
            if self._deliver_acks():
                return

    def wake(self) -> None:
        """End a waiting `poll`, or the next one."""
        with self._broker.lock:
            self.notify()

    def notify(self) -> None:
        """There is news for this connection; the broker's lock is held."""
        self._has_news = True
        self.nudge()

    def nudge(self) -> None:
        """Let a waiting `poll` look around; the broker's lock is held."""
        if self._is_waiting:
            self._is_waiting = False
            self._gate.release()

    def reader(self) -> LocalReader:
        """A reader of explicit partitions."""
        reader = LocalReader(self._broker, self)
        self._closables.append(reader)
        return reader

    def member(self, group: str, topics: Iterable[str]) -> LocalMember:
        """Join a group; topics that do not exist yet are created. Fatal: a topic that no rule knows."""
        member = self._broker.join(self, group, topics)
        self._closables.append(member)
        return member

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset behind the last record that readers may see."""
        with self._broker.lock:
            return self._broker.find(*partition).visible

    def is_disturbed(self) -> bool:
        """Never: it is there, or nothing is."""
        return False

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below `before_offset` are not needed any more."""
        self._broker.trim(partition, before_offset)

    def close(self) -> None:
        """Leave the groups, drop pending callbacks; what was appended is still committed by others. Idempotent."""
        for closable in tuple(self._closables):
            closable.close()
        self._broker.disconnect(self)
        self._is_closed = True
        self._acks.clear()
        self.wake()

    def forget(self, closed: LocalReader | LocalMember) -> None:
        """A reader or member of this connection was closed."""
        if closed in self._closables:
            self._closables.remove(closed)

    @property
    def awaits_acks(self) -> int:
        """How many callbacks were not called yet."""
        return len(self._acks)

    def add_ack(self, commit: int, on_ack: OnAck, offsets: Sequence[int]) -> None:
        """Call `on_ack` when `commit` is done; the broker's lock is held."""
        self._acks.append(_Ack(commit, on_ack, offsets))

    def has_due_acks(self) -> bool:
        """Whether the next callback can be called; the broker's lock is held."""
        if not self._acks:
            return False
        return self._acks[0].commit <= self._broker.last_commit or self._broker.failure is not None

    def _claim_news(self) -> bool:
        # Cleared before the caller takes: what comes in between is announced once more, never missed.
        if self._has_news:
            self._has_news = False
            return True
        return False

    def _deliver_acks(self) -> bool:
        """Call the callbacks that are due, in the order of their appends; what they append in turn comes later."""
        due = []
        failure = self._broker.failure
        if self._acks:
            with self._broker.lock:
                while self.has_due_acks():
                    due.append(self._acks.popleft())
                failure = self._broker.failure
        for commit, on_ack, offsets in due:
            on_ack(failure if failure is not None and commit > self._broker.last_commit else offsets)
        if failure is not None and not due:
            raise failure
        return bool(due)

    def _wait_until(self, deadline: float) -> bool:
        """Wait for news, acknowledgements or, if this connection commits, something to commit; False: none came."""
        lock = self._broker.lock
        with lock:
            if self._has_news or self.has_due_acks() or (self.commits and self._broker.is_dirty):
                return True
            if self._broker.failure is not None or self._is_closed:
                return True
            self._is_waiting = True
        is_passed = False
        try:
            is_passed = self._gate.acquire(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            if not is_passed:
                with lock:
                    if self._is_waiting:
                        self._is_waiting = False
                    else:  # let through in the very moment the time was over
                        self._gate.acquire()
                        is_passed = True
        return is_passed


# --- the broker -------------------------------------------------------------------------------------------------------


class LocalBroker:
    """The partitions of one process and their connections. Does not close the storage that it is given."""

    def __init__(self, storage: Storage, catalog: TopicCatalog) -> None:
        """Fatal: the storage was made with other numbers of partitions."""
        self.storage = storage
        self.catalog = catalog
        self.lock = threading.Lock()  # of all below; held for short steps in memory only
        self.is_dirty = False
        self.last_commit = 0
        self.failure: TidewheelIOError | None = None
        self._commit_lock = threading.Lock()
        self._open_commit = 1
        self._pending_bytes = 0
        self._dirty: dict[TopicPartition, _Partition] = {}
        self._dirty_positions: dict[tuple[str, TopicPartition], int] = {}
        self._connections: list[LocalLog] = []
        self._groups: dict[str, _Group] = {}
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._committer: _Committer | None = None
        self._start()

    def connect(self, *, commits: bool = False) -> LocalLog:
        """A new connection; one with `commits` makes durable, in its `poll`, what all connections appended."""
        connection = LocalLog(self, commits=commits)
        with self.lock:
            self._connections.append(connection)
        return connection

    def start_committer(self) -> None:
        """Run a thread that commits, for processes without a committing connection."""
        if self._committer is None:
            self._committer = _Committer(self.connect(commits=True))
            self._committer.start()

    def close(self) -> None:
        """Commit what is there and close all connections; idempotent. Raises what this commit raised."""
        if self._committer is not None:
            self._committer.stop()
            self._committer = None
        was_failed = self.failure is not None
        self.commit()
        for connection in tuple(self._connections):
            connection.close()
        with self.lock:
            failure, self.failure = self.failure, self.failure or Fatal("the log is closed")
        if failure is not None and not was_failed:
            raise failure

    def append(self, connection: LocalLog, entries: Sequence[Entry], on_ack: OnAck | None) -> None:
        """What `LocalLog.append` does."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            find = self._partitions.get
            targets = [find((topic, number)) or self.find(topic, number) for topic, number, _, _ in entries]
            sizes = [RECORD_OVERHEAD + len(key or b"") + len(value or b"") for _, _, key, value in entries]
            durable_bytes = sum(size for size, target in zip(sizes, targets, strict=True) if target.spec.is_durable)
            self._check_room(connection, durable_bytes)
            offsets = self._place(entries, targets, sizes)
            if durable_bytes:
                self._pending_bytes += durable_bytes
                self._mark_dirty()
            if on_ack is not None:
                connection.add_ack(self._open_commit if durable_bytes else 0, on_ack, offsets)
                if connection.has_due_acks():
                    connection.nudge()

    def commit(self) -> None:
        """Make durable what was appended so far. A failure is kept in `failure`, not raised."""
        with self._commit_lock:
            with self.lock:
                if not self.is_dirty or self.failure is not None:
                    return
                number, self._open_commit = self._open_commit, self._open_commit + 1
                dirty, self._dirty = self._dirty, {}
                positions, self._dirty_positions = self._dirty_positions, {}
                batches = [Batch(key, partition.uncommitted()) for key, partition in dirty.items()]
                taken_bytes = self._pending_bytes
                self.is_dirty = False
            try:
                self.storage.commit(batches, positions)
            except TidewheelIOError as error:
                self._fail(error)
            except BaseException as error:
                self._fail(Fatal(f"the log could not be written ({error!r}); start the process again"))
                raise
            else:
                self._committed(number, batches, dirty, taken_bytes)

    def find(self, topic: str, number: int) -> _Partition:
        """The partition, created at first use; the lock is held. Fatal: no such topic or partition."""
        found = self._partitions.get((topic, number))
        if found is not None:
            return found
        spec = self.catalog.spec(topic)
        if not 0 <= number < spec.partitions:
            raise Fatal(f"topic {topic} has partitions 0 to {spec.partitions - 1}, not {number}")
        return self._add(TopicPartition(topic, number), spec, Extent(0, 0))

    def extent(self, key: TopicPartition) -> Extent:
        """The oldest offset that readers are given, and the one behind the last record that readers may see."""
        with self.lock:
            partition = self.find(*key)
            return Extent(partition.oldest, partition.visible)

    def join(self, connection: LocalLog, group: str, topics: Iterable[str]) -> LocalMember:
        """What `LocalLog.member` does."""
        with self.lock:
            wanted = sorted(set(topics))
            numbers = {topic: range(self.catalog.spec(topic).partitions) for topic in wanted}
            partitions = [self.find(topic, number) for topic in wanted for number in numbers[topic]]
            joined = self._groups.setdefault(group, _Group(group))
            member = LocalMember(self, connection, joined, wanted)
            joined.join(member, partitions)
            return member

    def note_position(self, group: str, key: TopicPartition, offset: int) -> None:
        """A group's position moved; of a durable topic it is written too. The lock is held."""
        if self.find(*key).spec.is_durable:
            self._dirty_positions[group, key] = offset
            self._mark_dirty()

    def trim(self, key: TopicPartition, before_offset: int) -> None:
        """What `LocalLog.trim` does."""
        with self.lock:
            partition = self.find(*key)
            if not partition.spec.is_durable:
                return  # memory is pruned by what readers have passed
            before_offset = min(before_offset, partition.committed)
            if not partition.spec.retention_ms:  # else the records stay for a while, and may be read
                partition.oldest = before_offset = max(partition.oldest, before_offset)
        self.storage.trim(key, before_offset)

    def disconnect(self, connection: LocalLog) -> None:
        """The connection is closed."""
        with self.lock:
            if connection in self._connections:
                self._connections.remove(connection)

    def _start(self) -> None:
        start = self.storage.start(self.catalog.durable)
        for key, extent in start.extents.items():
            spec = self.catalog.spec(key.topic)
            gap = RESTART_GAP if start.start_count > 1 and spec.visibility is Visibility.AT_ONCE else 0
            self._add(key, spec, Extent(extent.oldest, extent.next_offset + gap))
        for (name, key), offset in start.positions.items():
            self._groups.setdefault(name, _Group(name)).committed[key] = offset

    def _add(self, key: TopicPartition, spec: TopicSpec, extent: Extent) -> _Partition:
        partition = self._partitions[key] = _Partition(key, spec, extent)
        return partition

    def _check_room(self, connection: LocalLog, durable_bytes: int) -> None:
        # One append larger than the bound is taken when nothing else is pending: it could never be, otherwise.
        if self._pending_bytes and self._pending_bytes + durable_bytes > PENDING_BYTES_MAX:
            raise Retriable(f"{self._pending_bytes} bytes of at most {PENDING_BYTES_MAX} wait to be written: try later")
        if connection.awaits_acks >= ACKS_MAX:
            raise Retriable(f"{ACKS_MAX} acknowledgements wait for a poll of this connection: try later")

    def _place(self, entries: Sequence[Entry], targets: list[_Partition], sizes: list[int]) -> list[int]:
        offsets = []
        touched: dict[TopicPartition, _Partition] = {}
        for (topic, number, key, value), partition, size in zip(entries, targets, sizes, strict=True):
            offset = partition.next_offset
            partition.next_offset = offset + 1
            partition.tail.append(Record(topic, number, offset, key, value))
            partition.tail_bytes += size
            touched[partition.key] = partition
            offsets.append(offset)
        for partition in touched.values():
            if partition.spec.is_durable:
                self._dirty[partition.key] = partition
            else:
                partition.maybe_prune()
            if partition.is_seen_at_once:
                partition.notify()
        return offsets

    def _mark_dirty(self) -> None:
        self.is_dirty = True
        for connection in self._connections:
            if connection.commits:
                connection.nudge()

    def _committed(
        self, number: int, batches: Sequence[Batch], dirty: Mapping[TopicPartition, _Partition], taken_bytes: int
    ) -> None:
        with self.lock:
            self.last_commit = number
            self._pending_bytes -= taken_bytes
            for key, records in batches:
                partition = dirty[key]
                partition.committed += len(records)
                if not partition.is_seen_at_once:
                    partition.notify()
                partition.maybe_prune()
            for connection in self._connections:
                if connection.has_due_acks():
                    connection.nudge()

    def _fail(self, error: TidewheelIOError) -> None:
        with self.lock:
            self.failure = Fatal(f"the log takes nothing more until it is started again: {error}")
            self.failure.__cause__ = error
            for connection in self._connections:
                connection.nudge()


class _Committer(threading.Thread):
    """Commits on behalf of connections that do not."""

    def __init__(self, log: LocalLog) -> None:
        super().__init__(name="log-committer", daemon=True)
        self._log = log
        self._is_stopping = False

    def run(self) -> None:
        while not self._is_stopping:
            try:
                self._log.poll(_COMMITTER_WAIT_S)
            except TidewheelIOError:
                return  # kept by the broker, which tells it to everyone

    def stop(self) -> None:
        self._is_stopping = True
        self._log.wake()
        self.join(_STOP_WAIT_S)
        self._log.close()
