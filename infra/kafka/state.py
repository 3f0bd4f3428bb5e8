"""`ports.StateStore` on a compacted topic: one partition for each shard, one transaction for each checkpoint.

The transactional id is the shard's, so that who fenced it last is the only one whose transactions the broker takes.
After any trouble that a new `init_transactions` would be needed for, a commit says Fenced: only a fence that is
followed by a load may take the shard back, since somebody else may have committed meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as Place

from infra.kafka.errors import Complaints, translate, translated
from infra.kafka.fetching import FETCHING, QUERY_S, within
from infra.kafka.names import Names
from infra.kafka.settings import KafkaSettings
from infra.topics import ENVELOPE_BYTES, RECORD_BYTES_MAX
from schemas.errors import Fatal, Fenced, Retriable, TidewheelIOError
from schemas.topics import SHARD_STATE

THREADS = 4  # that fence, load and commit; a transaction takes 30 to 100 ms, of which nearly all is waiting
COMMITS_MAX = 64  # begun and not done, for each shard
TRANSACTION_S = 30.0  # for each step of a transaction; the broker gives up an unfinished one after a minute
READ_SILENCE_S = 3.0  # a load that gets nothing for so long has lost its broker
READ_RECORDS = 2_000
CLOSE_S = 5.0

_FENCED = frozenset({KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED})


class _Commit(NamedTuple):
    token: int
    changes: Iterable[tuple[bytes, bytes | None]]
    on_done: Callable[[TidewheelIOError | None], None]


class _Shard:
    """The transactional producer of a shard, and what it is to commit."""

    def __init__(self, token: int, producer: Producer) -> None:
        self.token = token
        self.producer = producer
        self.is_void = False


class KafkaStateStore:
    """Implements `ports.StateStore`."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings, self._names = settings, Names(settings.prefix)
        self._topic = self._names.physical(SHARD_STATE)
        self._complaints = Complaints()
        self._pool = ThreadPoolExecutor(THREADS, "shard-state")
        self._tokens = itertools.count(1)
        self._fencing: dict[int, Future[Producer]] = {}
        self._loading: dict[int, Future[dict[bytes, bytes]]] = {}  # begun after the shard was fenced
        self._shards: dict[int, _Shard] = {}
        self._lock = threading.Lock()
        self._begun: dict[int, deque[_Commit]] = {}  # by shard; the first is being made
        self._is_closed = False

    def fence(self, shard: int) -> int | None:
        """Become the writer of the shard's state; None while the broker has not confirmed it. Retriable, Fatal."""
        fencing = self._fencing.get(shard)
        if fencing is None:
            self._void(shard)
            self._loading.pop(shard, None)  # what was read before this fence may have been changed since
            self._fencing[shard] = self._pool.submit(self._new_producer, shard)
            return None
        if not fencing.done():
            return None
        del self._fencing[shard]
        self._shards[shard] = _Shard(next(self._tokens), fencing.result())
        return self._shards[shard].token

    def load(self, shard: int) -> Iterable[tuple[bytes, bytes]] | None:
        """What is committed now, as one picture; None while it is read. Retriable: the broker does not answer."""
        loading = self._loading.get(shard)
        if loading is None:
            loading = self._loading[shard] = self._pool.submit(self._load, shard)
        if not loading.done():
            return None
        del self._loading[shard]
        return _taken_out(loading.result())

    def commit(
        self,
        shard: int,
        token: int,
        changes: Iterable[tuple[bytes, bytes | None]],
        on_done: Callable[[TidewheelIOError | None], None],
    ) -> None:
        """Apply all changes or none, in the background, where `changes` is iterated. Retriable: too many are begun."""
        if self._is_closed:
            raise Fatal("the state store is closed")
        with self._lock:
            begun = self._begun.setdefault(shard, deque())
            if len(begun) >= COMMITS_MAX:
                raise Retriable(f"{COMMITS_MAX} checkpoints of shard {shard} wait to be written: try later")
            begun.append(_Commit(token, changes, on_done))
            if len(begun) == 1:
                self._pool.submit(self._work_off, shard)

    def close(self) -> None:
        """Finish what was begun; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            within(CLOSE_S, lambda: self._pool.shutdown(cancel_futures=False))
            self._shards.clear()

    # --- in the background ----------------------------------------------------------------------------------------

    def _work_off(self, shard: int) -> None:
        begun = self._begun[shard]
        while begun:
            commit = begun[0]
            failure: TidewheelIOError | None = None
            try:
                self._apply(shard, commit)
            except TidewheelIOError as error:
                failure = error
            except Exception as error:  # the edge of the thread: whatever the caller's iterable raised
                failure = Fatal(f"the checkpoint of shard {shard} could not be made: {error!r}")
                failure.__cause__ = error
            commit.on_done(failure)
            with self._lock:
                begun.popleft()
                if not begun:
                    return

    def _apply(self, shard: int, commit: _Commit) -> None:
        own = self._shards.get(shard)
        if own is None or own.token != commit.token or own.is_void:
            raise Fenced(f"shard {shard} was taken over, or is to be loaded again: token {commit.token} is void")
        try:
            own.producer.begin_transaction()
            with ExitStack() as undo:
                undo.callback(own.producer.abort_transaction, TRANSACTION_S)
                self._produce(own.producer, shard, commit.changes)
                undo.pop_all()
            self._commit(own.producer)
        except KafkaException as error:
            raise self._failure(own, shard, error.args[0]) from error

    def _produce(self, producer: Producer, shard: int, changes: Iterable[tuple[bytes, bytes | None]]) -> None:
        give_up_at = time.monotonic() + TRANSACTION_S
        for key, value in changes:
            while True:
                try:
                    producer.produce(self._topic, value, key, shard)
                    break
                except BufferError:
                    if time.monotonic() > give_up_at:
                        raise Retriable(f"the checkpoint of shard {shard} was not taken in {TRANSACTION_S} s") from None
                    producer.poll(0.1)

    def _commit(self, producer: Producer) -> None:
        give_up_at = time.monotonic() + TRANSACTION_S
        while True:
            try:
                producer.commit_transaction(TRANSACTION_S)
                return
            except KafkaException as error:
                cause = error.args[0]
                if cause.txn_requires_abort():
                    producer.abort_transaction(TRANSACTION_S)
                    raise
                if not cause.retriable() or time.monotonic() > give_up_at:
                    raise

    def _failure(self, own: _Shard, shard: int, error: KafkaError) -> TidewheelIOError:
        if error.txn_requires_abort() and not error.fatal():
            return Retriable(f"the checkpoint of shard {shard} was not taken: {error.str()}")
        own.is_void = True
        what = "another owner has it" if error.code() in _FENCED else f"{error.str()}; it is to be loaded again"
        return Fenced(f"the checkpoint of shard {shard} was not taken: {what}")

    def _void(self, shard: int) -> None:
        own = self._shards.pop(shard, None)
        if own is not None:
            own.is_void = True

    def _new_producer(self, shard: int) -> Producer:
        properties = self._settings.client(
            **{
                "client.id": f"shard-state-{shard}",
                "error_cb": self._complaints.note,
                "transactional.id": self._names.physical(f"shard-{shard}"),
                "transaction.timeout.ms": 60_000,
                "message.max.bytes": RECORD_BYTES_MAX + ENVELOPE_BYTES,
                "compression.type": "lz4",
            }
        )
        with translated(f"fence shard {shard}"):
            producer = Producer(properties)
            # Else every third or so waits for half a second: the client looks again only then if its connection is not
            # there yet. The answer to the first question may make it connect anew; the second waits for that.
            for _ in range(2):
                producer.list_topics(self._topic, timeout=QUERY_S)
            producer.init_transactions(TRANSACTION_S)
        return producer

    # --- reading --------------------------------------------------------------------------------------------------

    def _load(self, shard: int) -> dict[bytes, bytes]:
        state: dict[bytes, bytes] = {}
        for message in self._read(shard):
            key, value = message.key(), message.value()
            if key is None:
                continue  # nobody of ours writes that, and it names nothing
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        return state

    def _read(self, shard: int) -> Iterator[Message]:
        what = f"read the state of shard {shard}"
        own: dict[str, Any] = {
            "group.id": self._names.physical("readers"),
            "error_cb": self._complaints.note,
            "enable.partition.eof": True,
        }
        with translated(what):
            consumer = Consumer({**self._settings.client(**own), **FETCHING, "queued.max.messages.kbytes": 65_536})
        try:
            with translated(what):
                self._check_topic(consumer, shard)
                consumer.assign([Place(self._topic, shard, OFFSET_BEGINNING)])
                while True:
                    first = consumer.poll(READ_SILENCE_S)
                    if first is None:
                        raise Retriable(f"Kafka: cannot {what} now: nothing came for {READ_SILENCE_S:.0f} s")
                    for message in (first, *consumer.consume(READ_RECORDS, 0)):
                        error = message.error()
                        if error is None:
                            yield message
                        elif error.code() == KafkaError._PARTITION_EOF:
                            return
                        elif not error.retriable():
                            raise translate(error, what)
        finally:
            within(CLOSE_S, consumer.close)

    def _check_topic(self, consumer: Consumer, shard: int) -> None:
        topic = consumer.list_topics(self._topic, timeout=QUERY_S).topics[self._topic]
        if topic.error is not None:
            raise translate(topic.error, f"use the topic {self._topic}")
        if shard not in topic.partitions:
            raise Fatal(f"the topic {self._topic} has no partition {shard}: run `tidewheel topics plan`")


def _taken_out(state: dict[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    """All of it, which is needed no more: a million values must not stay beside what is made of them."""
    while state:
        yield state.popitem()
