"""The embedded log: the contract over a file and over memory, and what it promises beyond the contract."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import infra.local
from infra.local import RESTART_GAP, LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import TopicCatalog, TopicSpec, embedded_catalog
from scheduler.ports import Entry, Log, TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError
from schemas.topics import TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS
from tests.contract import crashing_writer
from tests.contract.log import LogContract, append_and_wait, begin_all, numbered, poll_until, take_count, values_of

ROOT = Path(__file__).parents[2]
READY = "ready.default.high"
REQUESTS_0 = TopicPartition(TASK_REQUESTS, 0)
EVENTS_0 = TopicPartition(TASK_EVENTS, 0)


class LocalWorld:
    """One broker; the names of its catalog, handed out once each."""

    def __init__(self, path: str | Path, topics: Sequence[str]) -> None:
        self.storage = SqliteLogStorage(path)
        self.broker = LocalBroker(self.storage, embedded_catalog(4))
        self._topics = iter(topics)
        self._groups = iter(range(100))

    def connect(self) -> Log:
        return self.broker.connect()

    def topic(self) -> str:
        return next(self._topics)

    def group(self) -> str:
        return f"group-{next(self._groups)}"

    def close(self) -> None:
        self.broker.close()
        self.storage.close()


class TestLocalLog(LogContract):
    """Inputs, events and ready records, over a file and over memory, committed by a thread."""

    @pytest.fixture(params=[TASK_REQUESTS, TASK_EVENTS, READY])
    def topic(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(params=["file", "memory"])
    def world(self, request: pytest.FixtureRequest, topic: str, tmp_path: Path) -> Iterator[LocalWorld]:
        world = LocalWorld(":memory:" if request.param == "memory" else tmp_path / "log.db", [topic])
        world.broker.start_committer()
        yield world
        world.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
def storage(path: Path) -> Iterator[SqliteLogStorage]:
    storage = SqliteLogStorage(path)
    yield storage
    storage.close()


@pytest.fixture
def broker(storage: SqliteLogStorage) -> Iterator[LocalBroker]:
    broker = LocalBroker(storage, embedded_catalog(2))
    yield broker
    broker.close()


# --- who sees what when, and who commits ------------------------------------------------------------------------------


def test_inputs_are_seen_at_once_and_events_when_they_are_committed(broker: LocalBroker) -> None:
    log = broker.connect()
    reader = log.reader()
    reader.seek(REQUESTS_0, 0)
    reader.seek(EVENTS_0, 0)
    log.append([*numbered(TASK_REQUESTS, 0, [1]), *numbered(TASK_EVENTS, 0, [2])])
    assert values_of(reader.take(10)) == [b"v1"]
    assert log.end_offset(EVENTS_0) == 0
    broker.commit()
    assert values_of(reader.take(10)) == [b"v2"]
    assert log.end_offset(EVENTS_0) == 1


def test_nothing_durable_is_acknowledged_before_the_committing_connection_polls(broker: LocalBroker) -> None:
    client, engine = broker.connect(), broker.connect(commits=True)
    acks: list[object] = []
    client.append(numbered(TASK_REQUESTS, 0, [1]), acks.append)
    client.append(numbered(READY, 0, [2]), acks.append)
    client.poll(0)
    assert acks == []
    engine.append(numbered(TASK_EVENTS, 0, [3]), acks.append)
    assert acks == []
    engine.poll(0)
    client.poll(0)
    assert len(acks) == 3


def test_volatile_records_are_acknowledged_without_a_commit(broker: LocalBroker) -> None:
    log = broker.connect()
    acks: list[object] = []
    log.append(numbered(READY, 3, [1]), acks.append)
    log.poll(0)
    assert acks == [[0]]


@pytest.mark.timeout(30)
def test_a_waiting_committing_connection_commits_what_others_append(broker: LocalBroker) -> None:
    client, engine = broker.connect(), broker.connect(commits=True)
    acks: list[object] = []
    assert engine._has_news is False
    client.append(numbered(TASK_REQUESTS, 0, [1]), acks.append)
    waiting = threading.Thread(target=engine.poll, args=(60,))
    waiting.start()
    poll_until(lambda: bool(acks), client)
    engine.wake()
    waiting.join()


def test_records_that_were_announced_and_not_taken_do_not_keep_poll_from_waiting(broker: LocalBroker) -> None:
    log = broker.connect()
    reader = log.reader()
    reader.seek(TopicPartition(READY, 0), 0)
    log.append(numbered(READY, 0, range(5)))
    log.poll(0)
    assert not log._claim_news()
    assert len(reader.take(2)) == 2
    assert log._claim_news(), "a take that left something is news"


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_appends_beyond_the_pending_bound_are_refused_whole(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infra.local, "PENDING_BYTES_MAX", 1_000)
    log = broker.connect()
    log.append(numbered(TASK_REQUESTS, 0, range(10)))
    end = log.end_offset(REQUESTS_0)
    with pytest.raises(Retriable, match="wait to be written"):
        log.append(numbered(TASK_REQUESTS, 0, range(10)))
    assert log.end_offset(REQUESTS_0) == end
    log.append(numbered(READY, 0, range(100)))  # what is not written does not wait
    broker.commit()
    log.append(numbered(TASK_REQUESTS, 0, range(1_000)))  # larger than the bound, but alone


def test_acknowledgements_that_nobody_polls_for_are_bounded(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infra.local, "ACKS_MAX", 3)
    log = broker.connect()
    for _ in range(3):
        log.append(numbered(READY, 0, [1]), lambda _: None)
    with pytest.raises(Retriable, match="acknowledgements"):
        log.append(numbered(READY, 0, [1]), lambda _: None)


def test_memory_of_a_durable_partition_is_bounded_and_slow_readers_miss_nothing(storage: SqliteLogStorage) -> None:
    catalog = TopicCatalog([TopicSpec(TASK_EVENTS, 1, is_durable=True, records_max=500, bytes_max=20_000)])
    broker = LocalBroker(storage, catalog)
    log = broker.connect(commits=True)
    slow, quick = log.reader(), log.reader()
    slow.seek(EVENTS_0, 0)
    quick.seek(EVENTS_0, 0)
    partition = broker._partitions[EVENTS_0]
    for start in range(0, 5_000, 50):
        append_and_wait(log, numbered(TASK_EVENTS, 0, range(start, start + 50)))
        assert values_of(quick.take(50)) == [b"v%d" % number for number in range(start, start + 50)]
        assert partition.tail_bytes <= 2 * 20_000
        assert len(partition.tail) <= 2 * 500
    assert values_of(take_count(log, slow, 5_000, limit=33)) == [b"v%d" % number for number in range(5_000)]
    broker.close()


def test_a_volatile_partition_drops_its_oldest_records_beyond_its_bound(storage: SqliteLogStorage) -> None:
    catalog = TopicCatalog([TopicSpec("ready.", 1, is_durable=False, records_max=1_000, is_prefix=True)])
    broker = LocalBroker(storage, catalog)
    log = broker.connect()
    reader = log.reader()
    reader.seek(TopicPartition(READY, 0), 0)
    for number in range(5_000):
        log.append(numbered(READY, 0, [number]))
    assert len(broker._partitions[READY, 0].tail) <= 1_000
    taken = values_of(reader.take(10_000))
    assert taken == [b"v%d" % number for number in range(5_000 - len(taken), 5_000)]
    assert len(taken) >= 800
    broker.close()


def test_a_volatile_partition_forgets_what_its_group_committed(broker: LocalBroker) -> None:
    log = broker.connect()
    member = log.member("workers", [READY])
    begin_all(log, member, READY)
    for number in range(10_000):
        log.append(numbered(READY, 0, [number]))
        (record,) = member.take(10)
        member.commit({TopicPartition(READY, 0): record.offset + 1})
    assert len(broker._partitions[READY, 0].tail) <= 1_000


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_topic_that_no_rule_knows_is_named_with_those_that_are(broker: LocalBroker) -> None:
    log = broker.connect()
    for call in (
        lambda: log.append(numbered("task-request", 0, [1])),
        lambda: log.partitions("task-request"),
        lambda: log.member("group", ["task-request"]),
        lambda: log.end_offset(TopicPartition("task-request", 0)),
    ):
        with pytest.raises(Fatal, match="no topic 'task-request'; known are task-requests"):
            call()
    with pytest.raises(Fatal, match="partitions 0 to 1, not 2"):
        log.append([Entry(TASK_REQUESTS, 2, None, b"")])


def test_partitions_of_a_group_move_no_more_than_they_must(broker: LocalBroker) -> None:
    topics = [READY, "ready.default.low"]
    members = [broker.connect().member("workers", topics) for _ in range(3)]
    shares = [member.assigned() for member in members]
    assert sorted(map(len, shares)) == [2, 3, 3]
    fourth = broker.connect().member("workers", topics)
    assert all(member.assigned() <= share for member, share in zip(members, shares, strict=True))
    assert len(fourth.assigned()) == 2
    fourth.close()
    assert sum(len(member.assigned()) for member in members) == 8


# --- failures ---------------------------------------------------------------------------------------------------------


def fill_disk(storage: SqliteLogStorage) -> None:
    (pages,) = storage._writer.execute("PRAGMA page_count").fetchone()
    storage._writer.execute(f"PRAGMA max_page_count = {pages}").fetchone()


def make_read_only(storage: SqliteLogStorage) -> None:
    storage._writer.execute("PRAGMA query_only = ON")


@pytest.mark.parametrize(
    ("break_it", "advice"), [(fill_disk, "free some space"), (make_read_only, "check owner and mode")]
)
def test_after_a_failed_commit_nothing_is_acknowledged_any_more(
    path: Path, break_it: Callable[[SqliteLogStorage], None], advice: str
) -> None:
    storage = SqliteLogStorage(path)
    broker = LocalBroker(storage, embedded_catalog(2))
    client, engine = broker.connect(), broker.connect(commits=True)
    acked = append_and_wait(engine, numbered(TASK_EVENTS, 0, range(10)))
    break_it(storage)
    acks: list[Sequence[int] | TidewheelIOError] = []
    client.append([Entry(TASK_REQUESTS, 0, None, bytes(100_000))], acks.append)
    engine.append([Entry(TASK_EVENTS, 0, None, bytes(100_000))], acks.append)
    engine.poll(0)
    client.poll(0)
    assert len(acks) == 2
    for ack in acks:
        assert isinstance(ack, Fatal)
        assert advice in str(ack)
    for log in (client, engine):
        with pytest.raises(Fatal, match=advice):
            log.append(numbered(READY, 0, [1]))
        with pytest.raises(Fatal, match=advice):
            log.poll(60)
    broker.close()
    storage.close()
    assert [offset for offset, _ in stored(path, EVENTS_0)] == acked


def stored(path: Path, partition: TopicPartition) -> list[tuple[int, bytes | None]]:
    """All that a new process finds in a partition."""
    storage = SqliteLogStorage(path)
    broker = LocalBroker(storage, embedded_catalog(2))
    log = broker.connect()
    reader = log.reader()
    reader.seek(partition, 0)
    found = []
    while records := reader.take(1_000):
        found += [(record.offset, record.value) for record in records]
    broker.close()
    storage.close()
    return found


def test_a_second_process_is_kept_out(path: Path, storage: SqliteLogStorage) -> None:
    with pytest.raises(Fatal, match="in use by another process"):
        SqliteLogStorage(path)
    storage.close()
    SqliteLogStorage(path).close()


def test_a_log_keeps_its_number_of_shards(storage: SqliteLogStorage) -> None:
    LocalBroker(storage, embedded_catalog(2)).close()
    with pytest.raises(Fatal, match="start with shards=2"):
        LocalBroker(storage, embedded_catalog(3))


def test_a_file_that_is_no_log_is_refused(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Fatal, match="no SQLite file"):
        SqliteLogStorage(path)


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_a_restart_keeps_records_and_committed_positions(storage: SqliteLogStorage) -> None:
    first = LocalBroker(storage, embedded_catalog(2))
    log = first.connect(commits=True)
    offsets = append_and_wait(log, numbered(TASK_REQUESTS, 0, range(10)))
    member = log.member("readers", [TASK_REQUESTS])
    begin_all(log, member, TASK_REQUESTS)
    take_count(log, member, 10)
    member.commit({REQUESTS_0: offsets[4]})
    first.close()
    second = LocalBroker(storage, embedded_catalog(2))
    log = second.connect(commits=True)
    member = log.member("readers", [TASK_REQUESTS])
    begin_all(log, member, TASK_REQUESTS)
    append_and_wait(log, numbered(TASK_REQUESTS, 0, [10]))
    assert values_of(take_count(log, member, 7)) == [b"v%d" % number for number in range(4, 11)]
    second.close()


@pytest.mark.parametrize("committed", [0, 10])
def test_an_input_offset_that_was_seen_before_a_crash_is_not_used_again(
    storage: SqliteLogStorage, committed: int
) -> None:
    first = LocalBroker(storage, embedded_catalog(2))
    log = first.connect()
    log.append(numbered(TASK_REQUESTS, 0, range(committed)))
    first.commit()
    log.append(numbered(TASK_REQUESTS, 0, range(100)))  # seen, never committed: the broker is left as after a crash
    seen_up_to = log.end_offset(REQUESTS_0)
    second = LocalBroker(storage, embedded_catalog(2))
    log = second.connect(commits=True)
    assert append_and_wait(log, numbered(TASK_REQUESTS, 0, [1])) == [committed + RESTART_GAP]
    assert committed + RESTART_GAP > seen_up_to
    assert append_and_wait(log, numbered(TASK_EVENTS, 0, [1])) == [0], "events were not seen, and have no gap"
    second.close()


def test_trimmed_batches_go_and_the_next_offset_stays(path: Path) -> None:
    now = [0]
    storage = SqliteLogStorage(path, now_ms=lambda: now[0])
    catalog = embedded_catalog(2, event_retention_ms=1_000)
    broker = LocalBroker(storage, catalog)
    log = broker.connect(commits=True)
    for number in range(10):
        append_and_wait(log, [*numbered(TASK_REQUESTS, 0, [number]), *numbered(TASK_EVENTS, 0, [number])])
    log.trim(REQUESTS_0, 10)
    log.trim(EVENTS_0, 5)
    storage._trim_all(storage._upkeep)
    assert offsets_in(storage, REQUESTS_0) == [9], "the newest batch tells the next offset"
    assert offsets_in(storage, EVENTS_0) == list(range(10)), "retention is not over"
    now[0] = 2_000
    log.trim(EVENTS_0, 5)
    storage._trim_all(storage._upkeep)
    assert offsets_in(storage, EVENTS_0) == list(range(5, 10))
    broker.close()
    broker = LocalBroker(storage, catalog)
    log = broker.connect(commits=True)
    assert append_and_wait(log, numbered(TASK_EVENTS, 0, [10])) == [10]
    assert append_and_wait(log, numbered(TASK_REQUESTS, 0, [10])) == [10 + RESTART_GAP]
    reader = log.reader()
    reader.seek(EVENTS_0, 0)
    assert [record.offset for record in take_count(log, reader, 6)] == list(range(5, 11))
    broker.close()
    storage.close()


def offsets_in(storage: SqliteLogStorage, partition: TopicPartition) -> list[int]:
    return [record.offset for record in storage.read(partition, 0, 1_000)]


def test_large_batches_are_stored_in_bounded_rows(storage: SqliteLogStorage) -> None:
    broker = LocalBroker(storage, embedded_catalog(2))
    log = broker.connect(commits=True)
    append_and_wait(log, numbered(TASK_REPORTS, 1, range(5_000)))
    append_and_wait(log, [Entry(TASK_REPORTS, 1, None, bytes(400_000)) for _ in range(10)])
    rows = storage._writer.execute("SELECT count, length(body) FROM batches").fetchall()
    assert sum(count for count, _ in rows) == 5_010
    assert max(count for count, _ in rows) <= 1_024
    assert max(size for _, size in rows) < 2_000_000
    assert offsets_in(storage, TopicPartition(TASK_REPORTS, 1))[:1_000] == list(range(1_000))
    broker.close()


@pytest.mark.slow
def test_what_was_acknowledged_survives_a_kill(path: Path) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    acked: dict[tuple[str, int, int], str] = {}
    for run in range(4):
        command = [sys.executable, "-m", crashing_writer.__name__, str(path.parent), str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(chance.randrange(1, 600))]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        for line in lines:
            if line.endswith("\n"):
                topic, number, offset, value = line.split()
                key = topic, int(number), int(offset)
                assert key not in acked, f"an offset was given twice; seed {seed}"
                acked[key] = value
    assert acked
    for shard in range(crashing_writer.SHARDS):
        found = {topic: dict(stored(path, TopicPartition(topic, shard))) for topic in (TASK_REQUESTS, TASK_EVENTS)}
        for (name, partition, place), text in acked.items():
            assert partition != shard or found[name].get(place) == text.encode(), f"seed {seed}"
        assert set(found[TASK_EVENTS].values()) <= set(found[TASK_REQUESTS].values()), f"seed {seed}"


def test_the_port_is_what_the_adapter_has(broker: LocalBroker) -> None:
    log: Log = broker.connect()
    assert isinstance(log, LocalLog)
    poll_until(lambda: True, log)


def test_records_that_are_kept_for_a_while_can_be_read_after_a_trim() -> None:
    broker = LocalBroker(SqliteLogStorage(":memory:"), embedded_catalog(1))
    log = broker.connect(commits=True)
    log.append([Entry(TASK_EVENTS, 0, None, bytes([n])) for n in range(3)])
    log.poll(0)
    log.append([Entry(TASK_EVENTS, 0, None, b"last")])
    log.poll(0)
    log.trim(TopicPartition(TASK_EVENTS, 0), 3)
    reader = log.reader()
    reader.seek(TopicPartition(TASK_EVENTS, 0), 0)
    assert [record.offset for record in reader.take(10)] == [0, 1, 2, 3]
    log.close()
    broker.close()
