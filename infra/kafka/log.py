"""`ports.Log` on Kafka.

One idempotent producer sends; fetchers read (see `fetching`); the one thread that calls `poll` serves them all, since
among Python's threads handing a record over costs more than fetching it.

**No holes.** A shard's events must be in the log without gaps: an event that is missing between two others would make
its input look decided. The client keeps the order while it repeats what failed, with two exceptions.

- A message that times out on its own leaves a gap that even the client's gapless mode does not cover. So messages never
  time out in the client (`message.timeout.ms` 0). If the oldest one is not acknowledged within `DELIVERY_S`, or any of
  them fails, all that is not acknowledged is purged and reported as failed, and a new producer takes over.
- Of two requests on their way to a partition that knows nothing of this producer, the first may be refused (its leader
  is just being made) and the second accepted: the broker takes any first sequence number, and the client then takes the
  first request for delivered, without an offset. Seen on one of a hundred new topics. So the first record of a producer
  in a partition goes alone; the next ones wait in its **lane** until it is acknowledged. And an acknowledgement without
  an offset counts as a failure.

Ready records are no part of that, since nothing follows from them: what a ready topic does not take (it was removed, or
may not be written) fails by itself, and the topic is not to be used for a while (see `ready`).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from infra.kafka.errors import Complaints, translate, translated
from infra.kafka.fetching import FETCHING, QUERY_S, Fetcher, KafkaMember, KafkaReader
from infra.kafka.names import Names
from infra.kafka.ready import ReadyTopics
from infra.kafka.settings import KafkaSettings
from infra.kafka.topics import ensure_topic
from infra.kafka.trimming import Trimmer
from infra.topics import ENVELOPE_BYTES, RECORD_BYTES_MAX, TopicCatalog
from scheduler.ports import Entry, OnAck, TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError

DELIVERY_S = 30.0  # for an acknowledgement; longer than the election of a leader takes
REMEMBERED_S = 6 * 3_600.0  # brokers forget a producer that wrote nothing to a partition for a day
LOOK_S = 1.0  # between looks for an append that is late
UNACKNOWLEDGED_MAX = 200_000  # records of one connection
UNACKNOWLEDGED_BYTES_MAX = 64 * 1024 * 1024
ENTRY_OVERHEAD = 64  # bytes counted for an entry beside its key and value
CONNECT_S = 5.0
FLUSH_S = 2.0  # for what is on its way when the connection is closed
# Waiting is done in the client, which ends a wait for its own news alone; so waits are short, and a little longer when
# nothing has happened for a while.
SLICE_S, IDLE_SLICE_S, IDLE_AFTER_S = 0.001, 0.005, 1.0
# Between turns with news: a turn costs half a millisecond of processor time here and in the brokers, whatever it
# brings. At 500 tasks/s this makes both the median and the tail of start latencies a third shorter.
PACE_S = 0.001
WAIT_MAX_S = 3_600.0
# After the last failed connection. A client tells of a broker that is gone once or twice, and no more until it needs
# it. The others miss it after 9 s (broker.session.timeout.ms), elect leaders, and clients find these: before that
# nobody is heard whose reports go to a partition that it led.
DISTURBED_S = 20.0
OUTAGE_S = 60.0  # after which a broker that stays away is nobody's excuse any more

_PRODUCING: dict[str, Any] = {
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": 0,
    # How long a topic may be unknown to the brokers until what is to go there fails: far less than DELIVERY_S, lest a
    # ready topic that was removed make all appends late.
    "topic.metadata.propagation.max.ms": 5_000,
    "message.max.bytes": RECORD_BYTES_MAX + ENVELOPE_BYTES,
    "linger.ms": 0,  # what piles up while a request is on its way goes with the next one
    "queue.buffering.max.messages": 2 * UNACKNOWLEDGED_MAX,
    "queue.buffering.max.kbytes": 2 * UNACKNOWLEDGED_BYTES_MAX // 1024,
    "allow.auto.create.topics": False,
}

_log = structlog.get_logger(__name__)
_client_log = logging.getLogger("tidewheel.kafka")  # the client logs through `logging` alone


class _Lane:
    """What this producer knows of a partition."""

    __slots__ = ("acknowledged_at", "place", "waiting")

    def __init__(self, place: tuple[str, int]) -> None:
        self.place = place
        self.acknowledged_at: float | None = None
        self.waiting: list[tuple[_Append, int, Entry]] = []  # until the first record is acknowledged


class _Append:
    """What is known of one call of `append`."""

    __slots__ = ("error", "left", "offsets", "on_ack", "ready_topic", "sent_at", "size")

    def __init__(self, count: int, size: int, on_ack: OnAck | None, ready_topic: str | None) -> None:
        self.ready_topic = ready_topic  # if all its entries go there: then it may fail by itself
        self.on_ack = on_ack
        self.offsets = [-1] * count
        self.left = count
        self.size = size
        self.error: TidewheelIOError | None = None
        self.sent_at = time.monotonic()


class KafkaLog:
    """Implements `ports.Log`. Acknowledgements come in order for each partition."""

    def __init__(self, settings: KafkaSettings, catalog: TopicCatalog, *, client_id: str) -> None:
        """Connect. Retriable: no broker answers; Fatal: they refuse us."""
        self.names = Names(settings.prefix)
        self._settings, self._catalog, self._client_id = settings, catalog, client_id
        self._lock = threading.Lock()  # of what appending threads touch: from here to `_partitions`
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._open: dict[_Append, None] = {}  # in the order of the calls
        self._open_records = self._open_bytes = 0
        self._failure: TidewheelIOError | None = None
        self._partitions: dict[str, int] = {}
        self._done: list[_Append] = []
        self._producer = self._new_producer()
        self._ready = ReadyTopics(settings, catalog, self.wake)
        self._trimmer = Trimmer(settings, client_id)
        self._fetchers: list[Fetcher] = []
        self._members: list[KafkaMember] = []
        self._is_awake = False
        self._now = time.monotonic()  # as of the last turn
        self._news_at = self._look_at = 0.0
        self._complaints = Complaints()
        self._failed_at = self._failing_since = -OUTAGE_S  # connections to brokers
        self._is_closed = False
        with translated("connect"):
            self._producer.list_topics(timeout=CONNECT_S)

    # --- ports.Log ------------------------------------------------------------------------------------------------

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; a ready topic is created if it is not there. Retriable, Fatal."""
        known = self._partitions.get(topic)
        if known is None:
            known = self._partitions[topic] = self._look_up(topic)
        return known

    def ready_partitions(self, topic: str) -> int:
        """How many partitions of a ready topic can be written now; it is created, or tried again, in the background."""
        found = self._ready.partitions(topic)
        if found:
            self._partitions[topic] = found
        return found

    def held_topics(self) -> Mapping[str, str]:
        """The ready topics that cannot be written now, and why, with what to do; from any thread."""
        return self._ready.held()

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Send entries. Retriable: too much is not acknowledged yet, or a failure was not reported yet."""
        topics = {entry.topic for entry in entries}
        for topic in topics:
            self.partitions(topic)
        sizes = [ENTRY_OVERHEAD + len(key or b"") + len(value or b"") for _, _, key, value in entries]
        append = _Append(len(entries), sum(sizes), on_ack, self._ready_topic(topics))
        with self._lock:
            self._check_room(append)
            if not entries:
                self._done.append(append)
                return
            self._open[append] = None
            self._open_records += len(entries)
            self._open_bytes += append.size
            try:
                for index, entry in enumerate(entries):
                    self._send(append, index, entry)
            except (KafkaException, BufferError) as error:  # then the rest is not sent, and all of it is reported
                self._fail(_cause(error))
            if append.left == 0:
                self._close(append)

    def poll(self, timeout_s: float) -> None:
        """Call due `on_ack`s, take over records; then wait if there was no news."""
        deadline = time.monotonic() + min(timeout_s, WAIT_MAX_S)
        if timeout_s > 0 and (early_s := self._news_at + PACE_S - time.monotonic()) > 0:
            time.sleep(early_s)
        while True:
            now = time.monotonic()
            if self._turn(now):
                self._news_at = now
                return
            if now >= deadline:
                return
            slice_s = SLICE_S if now - self._news_at < IDLE_AFTER_S else IDLE_SLICE_S
            self._wait(min(slice_s, deadline - now))

    def wake(self) -> None:
        """End a waiting `poll` within a few milliseconds, or the next one."""
        self._is_awake = True

    def reader(self) -> KafkaReader:
        """A reader of explicit partitions."""
        return KafkaReader(self)

    def member(self, group: str, topics: Iterable[str]) -> KafkaMember:
        """Join a group; ready topics that do not exist yet are created."""
        wanted = sorted(set(topics))
        for topic in wanted:
            self.partitions(topic)
        member = KafkaMember(self, group, wanted)
        self._members.append(member)
        return member

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset that the next record will have, at least. Retriable, Fatal."""
        if not self._fetchers:
            self._add_fetcher()
        return self._fetchers[0].end_offset(partition)

    def is_disturbed(self) -> bool:
        """Whether a connection to a broker failed a moment ago; not for ever, if a broker stays away."""
        now = time.monotonic()
        return now - self._failed_at < DISTURBED_S and now - self._failing_since < OUTAGE_S

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Kafka removes records by their age; only of topics where it removes none they go when they may."""
        if self._catalog.spec(partition.topic).is_kept_until_trimmed:
            self._trimmer.want(partition, before_offset)

    def close(self) -> None:
        """Leave the groups and disconnect, after what was appended is sent (for up to `FLUSH_S`). Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for member in tuple(self._members):
            member.close()
        for fetcher in self._fetchers:
            fetcher.close()
        self._ready.close()
        self._producer.flush(FLUSH_S)
        with self._lock:
            self._failure = Fatal("the connection to the log is closed")
            self._producer.purge()

    # --- for readers and members ----------------------------------------------------------------------------------

    def properties(self, **more: Any) -> dict[str, Any]:
        """The properties of a client of this connection."""
        own = {"client.id": self._client_id, "error_cb": self._on_error, "logger": _client_log}
        return dict(self._settings.client(**own, **more))

    def fetcher_without(self, partition: TopicPartition) -> Fetcher:
        """A fetcher that does not fetch `partition` yet: one partition twice needs two."""
        for fetcher in self._fetchers:
            if not fetcher.has(partition):
                return fetcher
        return self._add_fetcher()

    def forget(self, member: KafkaMember) -> None:
        """The member left."""
        self._members.remove(member)

    # --- waiting --------------------------------------------------------------------------------------------------

    def _turn(self, now: float) -> bool:
        """Serve all that has something; whether there was news."""
        self._now = now
        has_news, self._is_awake = self._is_awake, False
        self._producer.poll(0)
        self._fail_what_is_late(now)
        self._trimmer.turn(now)
        has_news |= self._report()
        for member in tuple(self._members):
            has_news |= member.turn(now)
            has_news |= member.fetcher.pump()
        for fetcher in self._fetchers:
            has_news |= fetcher.pump()
        return has_news

    def _wait(self, timeout_s: float) -> None:
        """Wait where news is likely to come from."""
        reading = [member.fetcher for member in self._members if not member.fetcher.is_idle]
        reading += [fetcher for fetcher in self._fetchers if not fetcher.is_idle]
        if self._open or not reading:
            self._producer.poll(timeout_s)
        elif reading[0].pump(timeout_s):
            self._is_awake = True

    # --- acknowledgements -----------------------------------------------------------------------------------------

    def _send(self, append: _Append, index: int, entry: Entry) -> None:
        place = entry.topic, entry.partition
        lane = self._lanes.get(place)
        if lane is None or self._is_forgotten(lane):
            lane = self._lanes[place] = _Lane(place)
        elif lane.acknowledged_at is None:
            lane.waiting.append((append, index, entry))
            return
        self._produce(lane, append, index, entry)

    def _produce(self, lane: _Lane, append: _Append, index: int, entry: Entry) -> None:
        try:
            self._producer.produce(
                self.names.physical(entry.topic),
                entry.value,
                entry.key,
                entry.partition,
                functools.partial(self._delivered, lane, append, index),
            )
        except KafkaException as error:
            if append.ready_topic is None:
                raise
            append.left -= 1
            self._refuse(lane, append, error.args[0])

    def _is_forgotten(self, lane: _Lane) -> bool:
        """Whether the brokers may know nothing of this producer in the partition any more."""
        return lane.acknowledged_at is not None and self._now - lane.acknowledged_at > REMEMBERED_S

    def _open_lane(self, lane: _Lane) -> None:
        with self._lock:
            lane.acknowledged_at = self._now  # only now may others go past those that wait
            waiting, lane.waiting = lane.waiting, []
            try:
                for append, index, entry in waiting:
                    self._produce(lane, append, index, entry)
            except (KafkaException, BufferError) as error:
                self._fail(_cause(error))

    def _delivered(self, lane: _Lane, append: _Append, index: int, error: KafkaError | None, message: Message) -> None:
        append.left -= 1
        offset = message.offset()
        if append.ready_topic is not None and (offset is None or offset < 0 or error is not None):
            with self._lock:
                self._refuse(lane, append, error)
        elif error is not None:
            self._failure = self._failure or translate(error, "append")
        elif offset is None or offset < 0:
            self._failure = self._failure or Retriable("Kafka: a record was acknowledged without an offset")
        else:
            append.offsets[index] = offset
            if lane.acknowledged_at is None:
                self._open_lane(lane)
            lane.acknowledged_at = self._now
        if append.left == 0:
            if append.ready_topic is not None and append.error is None:
                self._ready.taken(append.ready_topic)
            with self._lock:
                self._close(append)

    def _close(self, append: _Append) -> None:
        """All of it is known; the lock is held."""
        if append in self._open:
            del self._open[append]
            self._open_records -= len(append.offsets)
            self._open_bytes -= append.size
            self._done.append(append)

    # --- ready topics, with the lock held -------------------------------------------------------------------------

    def _ready_topic(self, topics: set[str]) -> str | None:
        (topic,) = topics if len(topics) == 1 else (None,)
        return topic if topic is not None and self._catalog.spec(topic).is_prefix else None

    def _refuse(self, lane: _Lane, append: _Append, error: KafkaError | None) -> None:
        """A ready topic did not take a record. If the whole connection is to blame, events will show it, too."""
        topic, _ = lane.place
        if error is None:
            append.error = append.error or Retriable("Kafka: a ready record was acknowledged without an offset")
        else:
            append.error = append.error or translate(error, f"write {self.names.physical(topic)}")
            self._ready.refused(topic, append.error)
        self._give_up(lane, append.error)

    def _give_up(self, lane: _Lane, failure: TidewheelIOError) -> None:
        """What waits in the lane is not sent; the next record to its partition goes alone again."""
        if self._lanes.get(lane.place) is lane:
            del self._lanes[lane.place]
        waiting, lane.waiting = lane.waiting, []
        for append, _, _ in waiting:
            append.left -= 1
            if append.ready_topic is None:
                self._fail(failure)
            append.error = append.error or failure
            if append.left == 0:
                self._close(append)

    def _report(self) -> bool:
        done, self._done = self._done, []
        for append in done:
            if append.on_ack is not None:
                append.on_ack(append.error or append.offsets)
        return bool(done)

    def _fail_what_is_late(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            with self._lock:
                oldest = next(iter(self._open), None)
            if oldest is not None and now - oldest.sent_at > DELIVERY_S:
                late = f"Kafka: an append was not acknowledged in {DELIVERY_S:.0f} s; is a broker, or a leader, away?"
                self._failure = self._failure or Retriable(late)
        if self._failure is not None and not self._is_closed:
            self._start_over(self._failure)

    def _start_over(self, failure: TidewheelIOError) -> None:
        """Give up all that is not acknowledged, together, and go on with a new producer."""
        with self._lock:
            _log.warning("appends failed, a new producer takes over", reason=str(failure), appends=len(self._open))
            failed = list(self._open)
            self._open.clear()
            self._open_records = self._open_bytes = 0
            self._lanes.clear()
            self._producer.purge()
            self._producer = self._new_producer()
            self._failure = None
        for append in failed:
            append.error = failure
            self._done.append(append)

    def _fail(self, failure: TidewheelIOError) -> None:
        self._failure = self._failure or failure
        self._is_awake = True

    def _check_room(self, append: _Append) -> None:
        if isinstance(self._failure, Fatal) and self._is_closed:
            raise self._failure
        if self._failure is not None:
            raise Retriable(f"appends failed and are about to be reported: {self._failure}")
        too_many = self._open_records + len(append.offsets) > UNACKNOWLEDGED_MAX
        if self._open and (too_many or self._open_bytes + append.size > UNACKNOWLEDGED_BYTES_MAX):
            raise Retriable("the broker is slow: too much that was appended is not acknowledged yet")

    # --- clients --------------------------------------------------------------------------------------------------

    def _new_producer(self) -> Producer:
        with translated("set up a producer"):
            return Producer(self.properties(**_PRODUCING))

    def _add_fetcher(self) -> Fetcher:
        own = {"group.id": self.names.physical("readers")}
        fetcher = Fetcher(self.properties(**own, **FETCHING), self.names)
        self._fetchers.append(fetcher)
        return fetcher

    def _look_up(self, topic: str) -> int:
        spec = self._catalog.spec(topic)
        physical = self.names.physical(topic)
        with translated(f"look up the topic {physical}"):
            found = self._producer.list_topics(physical, timeout=QUERY_S).topics[physical]
        if found.error is None:
            return len(found.partitions)
        if spec.is_prefix and found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return ensure_topic(self._settings, self._catalog, topic)
        raise translate(found.error, f"use the topic {physical}")

    def _on_error(self, error: KafkaError) -> None:
        now = time.monotonic()
        if now - self._failed_at > DISTURBED_S:
            self._failing_since = now
        self._failed_at = now
        self._complaints.note(error)


def _cause(error: KafkaException | BufferError) -> TidewheelIOError:
    cause = error.args[0]
    return translate(cause, "append") if isinstance(cause, KafkaError) else Retriable(f"Kafka: cannot append: {error}")
