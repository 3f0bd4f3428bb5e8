"""Reading: partitions that are fetched, readers of explicit partitions, members of groups.

A `Fetcher` is a consumer that is told partition by partition what to fetch, and never joins a group. A member has a
second consumer which does nothing but belong to the group: so a rebalance interrupts nothing of what stays, and the
client's rules for seeking in assigned partitions do not apply.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import OFFSET_STORED, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as Place

from infra.kafka.errors import translate, translated
from infra.kafka.names import Names
from scheduler.ports import Record, TopicPartition
from schemas.errors import Fatal, Retriable

if TYPE_CHECKING:
    from infra.kafka.log import KafkaLog

PUMP_RECORDS_MAX = 5_000  # taken over from the client and not yet taken from us; the rest waits in the client
PUMP_BYTES_MAX = 32 * 1024 * 1024
GROUP_LOOK_S = 0.02  # between looks for a changed assignment
COMMIT_EVERY_S = 0.1  # positions of a group; what is read again after a crash is recognised by attempt and version
LEAVE_S = 2.0  # the most that leaving a group may take
QUERY_S = 2.0  # for a question to the broker; loops that ask have heartbeats to send
ASK_S = 1.0  # for a question to the leader of a partition, which may be away
SILENT_S = 2.0  # how long a leader is not asked again that did not answer: the loop has other things to do meanwhile

# The defaults favour throughput: an empty fetch waits half a second, and a full queue one second.
FETCHING: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "earliest",
    "isolation.level": "read_committed",
    "fetch.wait.max.ms": 50,
    "fetch.queue.backoff.ms": 5,
    "fetch.error.backoff.ms": 50,
    "queued.min.messages": 2_000,
    "queued.max.messages.kbytes": 16_384,
    "allow.auto.create.topics": False,
}
_GROUP: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "session.timeout.ms": 6_000,  # the least that brokers allow by default: so late is a dead owner noticed
    "heartbeat.interval.ms": 500,  # so late a member learns that another one has left
    "max.poll.interval.ms": 60_000,  # of a loop that is stuck while its process lives; questions take seconds at worst
    "partition.assignment.strategy": "range",  # equal numbers of partitions of two topics go to one member
    "allow.auto.create.topics": False,
}

# Of what `translate` calls fatal, what passes by itself here: a topic that was made or moved a moment ago.
_PASSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})

_log = structlog.get_logger(__name__)


class Feed:
    """The records of one partition that were fetched and not yet taken."""

    __slots__ = ("fetcher", "partition", "records")

    def __init__(self, fetcher: Fetcher, partition: TopicPartition) -> None:
        self.fetcher = fetcher
        self.partition = partition
        self.records: deque[Record] = deque()

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` records."""
        records = self.records
        if len(records) <= limit:
            taken = list(records)
            records.clear()
        else:
            taken = [records.popleft() for _ in range(limit)]
        self.fetcher.release(taken)
        return taken


class Fetcher:
    """Fetches given partitions, each for one who takes its records."""

    def __init__(self, properties: Mapping[str, Any], names: Names) -> None:
        with translated("set up a consumer"):
            self._consumer = Consumer(dict(properties))
        self._names = names
        self._feeds: dict[tuple[str, int], Feed] = {}  # by the broker's name of the topic
        self._held = 0
        self._held_bytes = 0
        self._has_more = False
        self._silent: dict[int, float] = {}  # leaders that did not answer, and until when they are not asked

    def has(self, partition: TopicPartition) -> bool:
        """Whether somebody takes the records of the partition."""
        return self._place(partition) in self._feeds

    def begin(self, partition: TopicPartition, offset: int) -> Feed:
        """Fetch from `offset` on."""
        topic, number = place = self._place(partition)
        feed = self._feeds[place] = Feed(self, partition)
        with translated(f"read {topic}[{number}]"):
            self._consumer.incremental_assign([Place(topic, number, offset)])
        return feed

    def end(self, feed: Feed) -> None:
        """Fetch it no more; what was not taken is dropped."""
        topic, number = place = self._place(feed.partition)
        if self._feeds.pop(place, None) is None:
            return  # the connection was closed before its reader
        self.release(feed.records)
        with translated(f"end reading {topic}[{number}]"):
            self._consumer.incremental_unassign([Place(topic, number)])

    def release(self, records: Iterable[Record]) -> None:
        """Records are not held here any more."""
        for record in records:
            self._held -= 1
            self._held_bytes -= _size(record)

    def announce(self) -> None:
        """Not all that is here was taken: the next `pump` counts as news."""
        self._has_more = True

    @property
    def is_idle(self) -> bool:
        """Whether it fetches nothing."""
        return not self._feeds

    def pump(self, timeout_s: float = 0.0) -> bool:
        """Take over what the client has, waiting up to `timeout_s` for the first; whether there is something new."""
        has_more, self._has_more = self._has_more, False
        if has_more or self.is_idle or self._held >= PUMP_RECORDS_MAX or self._held_bytes >= PUMP_BYTES_MAX:
            return has_more
        first = self._consumer.poll(timeout_s)  # `consume` makes room for all that it might get: only if there is any
        if first is None:
            return False
        kept = self._keep(first)
        for message in self._consumer.consume(PUMP_RECORDS_MAX - self._held, 0):
            kept += self._keep(message)
        return kept > 0

    def end_offset(self, partition: TopicPartition) -> int:
        """Where the partition ends. Retriable, Fatal: the broker does not say."""
        topic, number = self._place(partition)
        now = time.monotonic()
        self._silent = {leader: until for leader, until in self._silent.items() if until > now}
        with translated(f"ask where {topic}[{number}] ends"):
            if not self._silent:
                try:
                    return self._ask_end(topic, number)
                except KafkaException as error:
                    cause = error.args[0]
                    if cause.code() not in _PASSING and isinstance(translate(cause, ""), Fatal):
                        raise
            # Where the leader was the client would believe for minutes, however long it is away.
            return self._ask_end_of(self._leader(topic, number), topic, number)

    def _ask_end_of(self, leader: int | None, topic: str, number: int) -> int:
        if leader is None or leader in self._silent:
            raise Retriable(f"Kafka: cannot ask where {topic}[{number}] ends now: its leader is away")
        try:
            return self._ask_end(topic, number)
        except KafkaException:
            self._silent[leader] = time.monotonic() + SILENT_S
            raise

    def _leader(self, topic: str, number: int) -> int | None:
        """The broker that has the partition now, as another one knows."""
        found = self._consumer.list_topics(topic, timeout=QUERY_S).topics[topic]
        if found.error is not None:
            raise KafkaException(found.error)
        partition = found.partitions.get(number)
        return None if partition is None or partition.leader < 0 else int(partition.leader)

    def _ask_end(self, topic: str, number: int) -> int:
        _, end = self._consumer.get_watermark_offsets(Place(topic, number), ASK_S, cached=False)
        return int(end)

    def close(self) -> None:
        """Give the connections back. What still is fetched ends with them."""
        self._feeds.clear()
        within(LEAVE_S, self._consumer.close)

    def _place(self, partition: TopicPartition) -> tuple[str, int]:
        return self._names.physical(partition.topic), partition.partition

    def _keep(self, message: Message) -> int:
        error = message.error()
        if error is not None:
            self._note_error(error, message)
            return 0
        place: Any = message.topic(), message.partition()  # a record that was fetched has both, and an offset
        feed = self._feeds.get(place)
        if feed is None:  # its fetching ended while this was on its way
            return 0
        offset: Any = message.offset()
        record = Record(*feed.partition, offset, message.key(), message.value())
        feed.records.append(record)
        self._held += 1
        self._held_bytes += _size(record)
        return 1

    def _note_error(self, error: KafkaError, message: Message) -> None:
        what = f"read {message.topic()}[{message.partition()}]"
        failure = translate(error, what)
        if isinstance(failure, Fatal) and error.code() not in _PASSING:
            raise failure
        _log.warning("reading is disturbed", reason=str(failure))


class _Feeds:
    """What a reader or member has begun. Each call of `take` begins with another partition, so that none starves."""

    def __init__(self) -> None:
        self._feeds: dict[TopicPartition, Feed] = {}
        self._turn: deque[Feed] = deque()

    def begin(self, fetcher: Fetcher, partition: TopicPartition, offset: int) -> None:
        feed = self._feeds[partition] = fetcher.begin(partition, offset)
        self._turn.append(feed)

    def end(self, partition: TopicPartition) -> None:
        feed = self._feeds.pop(partition, None)
        if feed is not None:
            self._turn.remove(feed)
            feed.fetcher.end(feed)

    def end_all(self) -> None:
        for partition in tuple(self._feeds):
            self.end(partition)

    def take(self, limit: int) -> list[Record]:
        taken: list[Record] = []
        for _ in range(len(self._turn)):
            if len(taken) >= limit:
                break
            taken += self._turn[0].take(limit - len(taken))
            self._turn.rotate(-1)
        if taken:
            for feed in self._turn:
                if feed.records:
                    feed.fetcher.announce()
        return taken


class KafkaReader:
    """Implements `ports.Reader`. Records come with a `poll` after the `seek`."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._feeds = _Feeds()
        self._is_closed = False

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read `partition` from `offset` on; below the oldest record kept, from there."""
        if self._is_closed:
            raise Fatal("the reader is closed")
        self._feeds.end(partition)
        self._feeds.begin(self._log.fetcher_without(partition), partition, offset)

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records that were fetched by `poll`."""
        return self._feeds.take(limit)

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._is_closed = True
        self._feeds.end_all()


class KafkaMember:
    """Implements `ports.Member`. Assignments change in `poll` alone.

    While a group shares its partitions anew, a member goes on with what it has. What then belongs to somebody else is
    given up when the group has agreed; until then both may work on it, which fencing makes harmless.
    """

    def __init__(self, log: KafkaLog, group: str, topics: Sequence[str]) -> None:
        self._log, self._names = log, log.names
        group_id = self._names.physical(group)
        own = {"group.id": group_id}
        self.fetcher = Fetcher(log.properties(**own, **FETCHING), self._names)
        with translated("set up a member of a group"):
            self._consumer = Consumer(log.properties(**own, **_GROUP))
        self._feeds = _Feeds()
        self._owned: frozenset[TopicPartition] = frozenset()
        self._told: frozenset[TopicPartition] = frozenset()
        self._lost: frozenset[TopicPartition] = frozenset()
        self._committed: dict[TopicPartition, int] = {}
        self._to_commit: dict[TopicPartition, int] = {}
        self._look_at = self._commit_at = 0.0
        self._is_closed = False
        self._consumer.subscribe(
            [self._names.physical(topic) for topic in topics],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def assigned(self) -> frozenset[TopicPartition]:
        """What belongs to this member now; a new partition is silent until `seek` or `resume`."""
        return self._owned

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Begin an assigned partition at `offset`; nothing happens if it was taken away meanwhile."""
        if partition in self._owned:
            self._feeds.end(partition)
            self._feeds.begin(self.fetcher, partition, offset)

    def resume(self, partition: TopicPartition) -> None:
        """Begin an assigned partition where the group committed last, or at its oldest record."""
        self.seek(partition, OFFSET_STORED)

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` fetched records of begun partitions."""
        return self._feeds.take(limit)

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Remember the next offset to read; sent by a `poll` within `COMMIT_EVERY_S`, at the latest by `close`."""
        for partition, offset in positions.items():
            known = max(self._committed.get(partition, 0), self._to_commit.get(partition, 0))
            if offset > known and partition in self._owned:
                self._to_commit[partition] = offset

    def turn(self, now_s: float) -> bool:
        """Hear what the group has agreed on, and commit what is due; whether the assignment changed."""
        if now_s >= self._look_at:
            self._look_at = now_s + GROUP_LOOK_S
            message = self._consumer.poll(0)
            error = message.error() if message is not None else None
            if error is not None:
                self._note_error(error)
        if self._to_commit and now_s >= self._commit_at:
            self._commit_at = now_s + COMMIT_EVERY_S
            self._commit(is_waiting=False)
        return self._follow()

    def close(self) -> None:
        """Commit, leave; the partitions go to the other members. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._feeds.end_all()
        within(LEAVE_S, self._leave)
        self._owned = self._told = frozenset()
        self.fetcher.close()
        self._log.forget(self)

    def _leave(self) -> None:
        try:
            self._commit(is_waiting=True)
        finally:
            self._consumer.close()

    def _commit(self, *, is_waiting: bool) -> None:
        offsets = [
            Place(self._names.physical(partition.topic), partition.partition, offset)
            for partition, offset in self._to_commit.items()
        ]
        if not offsets:
            return
        self._committed |= self._to_commit
        self._to_commit = {}
        try:
            if is_waiting:
                self._consumer.commit(offsets=offsets, asynchronous=False)
            else:
                self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:  # lost with the partition, or repeated by the next commit
            _log.info("positions were not committed", reason=str(error))

    def _follow(self) -> bool:
        """Show what was told. What was lost and given back is missing for one poll, so that it is begun anew."""
        if self._told == self._owned and not self._lost:
            return False
        lost, self._lost = self._lost & self._owned, frozenset()
        now = self._told - lost
        for partition in self._owned - now:
            self._feeds.end(partition)
            self._committed.pop(partition, None)
            self._to_commit.pop(partition, None)
        has_changed = now != self._owned
        self._owned = now
        return has_changed

    def _on_assign(self, consumer: Consumer, places: list[Place]) -> None:
        consumer.assign([])  # what is fetched is the fetcher's business
        self._told = frozenset(TopicPartition(self._names.logical(one.topic), one.partition) for one in places)

    def _on_revoke(self, consumer: Consumer, _: list[Place]) -> None:
        consumer.unassign()

    def _on_lost(self, consumer: Consumer, _: list[Place]) -> None:
        _log.warning("the group went on without this member", partitions=len(self._told))
        self._lost |= self._told
        self._told = frozenset()
        consumer.unassign()

    def _note_error(self, error: KafkaError) -> None:
        failure = translate(error, "share partitions with the group")
        if isinstance(failure, Fatal) and error.code() not in _PASSING:
            raise failure
        _log.warning("the group is disturbed", reason=str(failure))


def within(limit_s: float, call: Callable[[], object]) -> None:
    """Call what might hang while brokers are away, and go on after `limit_s`."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        _log.warning("a connection did not close in time", limit_s=limit_s)


def _size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"")
