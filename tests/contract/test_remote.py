"""The log over a socket: the contract, with a broker in this process, and what is its own."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

import infra.local
from infra.local import LocalBroker
from infra.remote import Facts, LogServer, RemoteLog, SchedulerGone, wire
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.ports import Entry, TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError
from schemas.topics import TASK_EVENTS, TASK_REQUESTS
from tests.contract.log import LogContract, append_and_wait, begin_all, numbered, poll_until, take_count, values_of
from tests.harness import eventually

READY = "ready.default.high"
READY_0 = TopicPartition(READY, 0)
REQUESTS_0 = TopicPartition(TASK_REQUESTS, 0)
FACTS = Facts(shards=4, version="1.2.3")
WAIT_S = 30.0


class RemoteWorld:
    """A broker, its server, and connections through the socket."""

    def __init__(self, path: Path, topic: str = READY) -> None:
        self.storage = SqliteLogStorage(":memory:")
        self.broker = LocalBroker(self.storage, embedded_catalog(FACTS.shards))
        self.server = LogServer(self.broker, path, FACTS)
        self.server.start()
        self._topics = iter([topic])
        self._groups = iter(range(100))
        self.logs: list[RemoteLog] = []

    def connect(self) -> RemoteLog:
        log = RemoteLog(self.server.path)
        self.logs.append(log)
        return log

    def topic(self) -> str:
        return next(self._topics)

    def group(self) -> str:
        return f"group-{next(self._groups)}"

    def close(self) -> None:
        for log in self.logs:
            log.close()
        self.server.stop()
        assert self.server.connections == 0
        assert not self.server.path.exists()
        self.broker.close()
        self.storage.close()


class TestRemoteLog(LogContract):
    """Inputs, events and ready records."""

    @pytest.fixture(params=[TASK_REQUESTS, TASK_EVENTS, READY])
    def world(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteWorld]:
        world = RemoteWorld(tmp_path / "log.sock", str(request.param))
        world.broker.start_committer()
        yield world
        world.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RemoteWorld]:
    """Without a committer: the test commits."""
    world = RemoteWorld(tmp_path / "log.sock")
    yield world
    world.close()


# --- the socket -------------------------------------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_alone(world: RemoteWorld) -> None:
    assert stat.S_IMODE(os.stat(world.server.path).st_mode) == 0o600


def test_what_a_killed_engine_left_is_replaced_and_nothing_else(world: RemoteWorld, tmp_path: Path) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    server = LogServer(world.broker, stale, FACTS)
    server.start()
    with pytest.raises(Fatal, match="another scheduler listens"):
        LogServer(world.broker, stale, FACTS).start()
    log = RemoteLog(stale)
    assert log.facts == FACTS
    log.close()
    server.stop()
    server.stop()
    stale.write_text("a file")
    with pytest.raises(Fatal, match="in the way"):
        LogServer(world.broker, stale, FACTS).start()
    assert stale.read_text() == "a file"


def test_a_path_that_no_socket_can_have_is_refused_with_the_bound(world: RemoteWorld, tmp_path: Path) -> None:
    path = tmp_path / ("x" * wire.PATH_BYTES_MAX)
    with pytest.raises(Fatal, match=f"at most {wire.PATH_BYTES_MAX}"):
        LogServer(world.broker, path, FACTS).start()
    with pytest.raises(Fatal, match=f"at most {wire.PATH_BYTES_MAX}"):
        RemoteLog(path)


def test_without_a_scheduler_there_is_no_connection(tmp_path: Path) -> None:
    with pytest.raises(SchedulerGone, match="no scheduler answers"):
        RemoteLog(tmp_path / "log.sock")


# --- the greeting -----------------------------------------------------------------------------------------------------


def test_another_protocol_is_refused_for_good(world: RemoteWorld) -> None:
    with _raw(world) as client:
        wire.send_greeting(client, wire.Hello(wire.MAGIC, wire.PROTOCOL + 1, "9.9"))
        welcome = wire.decode_welcome(wire.receive_greeting(client))
    assert welcome.is_final
    assert welcome.refusal is not None
    assert "install the same release" in welcome.refusal
    assert "9.9" in welcome.refusal
    assert FACTS.version in welcome.refusal


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (wire.Welcome(wire.MAGIC, 2, "too old", True), Fatal, "too old"),
        (wire.Welcome(wire.MAGIC, 1, "full"), SchedulerGone, "full"),
        (wire.Welcome("redis", 1), Fatal, "no tidewheel scheduler"),
        (wire.Pong(), Fatal, "no tidewheel scheduler"),
    ],
)
def test_a_client_tells_what_it_met(tmp_path: Path, answer: msgspec.Struct, error: type[Fatal], match: str) -> None:
    def serve(connection: socket.socket) -> None:
        buffer = bytearray()
        wire.put_frame(buffer, answer)
        connection.sendall(buffer)

    with _FakeScheduler(tmp_path / "log.sock", serve), pytest.raises(Fatal, match=match) as caught:
        RemoteLog(tmp_path / "log.sock")
    assert type(caught.value) is error


# --- the end of a connection ------------------------------------------------------------------------------------------


def test_a_killed_worker_leaves_its_groups_and_what_it_had_not_committed_goes_to_others(world: RemoteWorld) -> None:
    killed, other, group = world.connect(), world.connect(), world.group()
    append_and_wait(other, numbered(READY, 0, range(10)))
    member = killed.member(group, [READY])
    begin_all(killed, member, READY)
    assert len(take_count(killed, member, 10)) == 10
    member.commit({READY_0: 4})
    assert killed.end_offset(READY_0) == 10  # asked and answered behind the commit
    killed._socket.shutdown(socket.SHUT_RDWR)
    heir = other.member(group, [READY])
    begin_all(other, heir, READY)
    assert values_of(take_count(other, heir, 6)) == [b"v%d" % number for number in range(4, 10)]


def test_when_the_scheduler_stops_every_append_is_reported_and_then_poll_raises(world: RemoteWorld) -> None:
    log = world.connect()
    reader = log.reader()
    reader.seek(REQUESTS_0, 0)
    results: list[object] = []
    for number in range(3):
        log.append(numbered(TASK_REQUESTS, 0, [number]), results.append)
    take_count(log, reader, 3)
    world.server.stop()
    poll_until(lambda: len(results) == 3, log)
    assert {type(result) for result in results} == {SchedulerGone}
    attempts: list[Callable[[], object]] = [
        lambda: log.poll(0),
        lambda: log.append([]),
        lambda: log.end_offset(REQUESTS_0),
    ]
    for attempt in attempts:
        with pytest.raises(SchedulerGone, match="start it again"):
            attempt()


def test_a_client_that_does_not_poll_is_given_up_and_one_that_does_is_not(
    world: RemoteWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE_MAX_S", 1.0)
    monkeypatch.setattr(wire, "PING_S", 0.05)
    silent, polling, group = world.connect(), world.connect(), world.group()
    silent.member(group, [READY])
    silent.poll(0)
    heir = polling.member(group, [READY])
    poll_until(lambda: 0 < len(heir.assigned()) < 4, polling)
    poll_until(lambda: len(heir.assigned()) == 4, polling)
    with pytest.raises(SchedulerGone, match="was silent"):
        poll_until(lambda: False, silent)


def test_a_client_that_takes_nothing_is_given_up(world: RemoteWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    append_and_wait(world.connect(), [Entry(READY, number, None, bytes(500_000)) for number in (0, 1, 2, 3)])
    monkeypatch.setattr(wire, "SILENCE_MAX_S", 0.2)
    with _raw(world) as client:
        _greet(client)
        for number in range(4):
            _send(client, wire.Begin(number, None, READY, number, 0))
        with pytest.raises(OSError):  # broken pipe or reset, as it falls
            for _ in range(100_000):
                _send(client, wire.Ping())
                select.select((), (), (), 0.001)


def test_a_scheduler_that_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENCE_MAX_S", 0.05)
    monkeypatch.setattr(wire, "PING_S", 0.01)
    is_over = threading.Event()

    def serve(connection: socket.socket) -> None:
        wire.send_greeting(connection, wire.Welcome(wire.MAGIC, wire.PROTOCOL, facts=FACTS))
        assert is_over.wait(WAIT_S)

    with _FakeScheduler(tmp_path / "log.sock", serve):
        log = RemoteLog(tmp_path / "log.sock")
        results: list[object] = []
        log.append(numbered(READY, 0, [1]), results.append)
        with pytest.raises(SchedulerGone, match="has not answered"):
            poll_until(lambda: False, log)
        assert [type(result) for result in results] == [SchedulerGone]
        log.close()
        is_over.set()


# --- wrong use and broken words ---------------------------------------------------------------------------------------


def test_wrong_use_ends_the_connection_for_good_and_says_why(world: RemoteWorld) -> None:
    asking = world.connect()
    with pytest.raises(Fatal, match="no topic 'nope'"):
        asking.partitions("nope")
    with pytest.raises(Fatal, match="has partitions 0 to 3, not 99"):
        asking.end_offset(TopicPartition(READY, 99))
    results: list[object] = []
    asking.append([Entry("nope", 0, None, None)], results.append)
    poll_until(lambda: bool(results), asking)
    assert [type(result) for result in results] == [Fatal]
    assert append_and_wait(asking, numbered(READY, 0, [1])) == [0]
    with pytest.raises(Fatal, match="at most"):
        asking.append([Entry(READY, 0, None, bytes(wire.FRAME_MAX))])

    reading = world.connect()
    reading.reader().seek(TopicPartition("nope", 0), 0)
    with pytest.raises(Fatal, match="there is no topic 'nope'") as caught:
        poll_until(lambda: False, reading)
    assert not isinstance(caught.value, SchedulerGone)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_garbage_ends_its_own_connection_alone(world: RemoteWorld, seed: int) -> None:
    rng = random.Random(seed)
    log = world.connect()
    for size in (4, 5, 64, 4_000):
        for has_greeted in (False, True):
            with _raw(world) as client:
                client.settimeout(WAIT_S)
                if has_greeted:
                    _greet(client)
                garbage = rng.randbytes(size)
                client.sendall(rng.choice([b"", len(garbage).to_bytes(4, "big"), b"\xff"]) + garbage)
                client.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while client.recv(4096):
                        pass
    eventually(lambda: world.server.connections == 1, "their connections are given up")
    assert append_and_wait(log, numbered(READY, 0, [1])) == [0]


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_client_that_takes_nothing_is_sent_a_window_and_no_more(world: RemoteWorld) -> None:
    log, count = world.connect(), 20 * wire.WINDOW_RECORDS
    for begin in range(0, count, 500):
        log.append(numbered(READY, 0, range(begin, min(count, begin + 500))))
    append_and_wait(log, [*numbered(READY, 1, [1])])
    reader = log.reader()
    reader.seek(READY_0, 0)
    cursor = log._cursors[0]
    poll_until(lambda: len(cursor.records) >= wire.WINDOW_RECORDS, log)
    for _ in range(20):
        append_and_wait(log, numbered(READY, 1, [2]))
    assert len(cursor.records) == wire.WINDOW_RECORDS
    assert values_of(take_count(log, reader, count)) == [b"v%d" % number for number in range(count)]


def test_an_append_may_be_larger_than_a_frame(world: RemoteWorld) -> None:
    log, count = world.connect(), 2 * wire.FRAME_MAX // 500_000
    world.broker.start_committer()
    offsets = append_and_wait(log, [Entry(TASK_REQUESTS, 0, b"%d" % number, bytes(500_000)) for number in range(count)])
    assert offsets == list(range(count))
    reader = log.reader()
    reader.seek(REQUESTS_0, 0)
    assert [record.key for record in take_count(log, reader, count)] == [b"%d" % number for number in range(count)]


def test_a_client_holds_back_what_is_not_acknowledged(world: RemoteWorld) -> None:
    log = world.connect()
    large = [Entry(TASK_REQUESTS, 0, None, bytes(1_000_000))]
    results: list[Sequence[int] | TidewheelIOError] = []
    taken = 0
    with pytest.raises(Retriable, match="not acknowledged"):
        for _ in range(100):
            log.append(large, results.append)
            taken += 1
    assert 10 < taken < 20
    world.broker.start_committer()
    poll_until(lambda: len(results) == taken, log)
    assert results == [[number] for number in range(taken)]
    log.append(large)


@pytest.mark.parametrize("count", [5, 200])
def test_a_refused_append_leaves_no_hole(world: RemoteWorld, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(infra.local, "PENDING_BYTES_MAX", 10_000)
    log = world.connect()
    results: dict[int, Sequence[int] | TidewheelIOError] = {}

    def append(number: int, size: int) -> None:
        entry = Entry(TASK_REQUESTS, 0, b"%d" % number, bytes(size))
        log.append([entry], lambda result: results.__setitem__(number, result))

    append(0, 4_000)
    append(1, 9_000)  # does not fit
    for number in range(2, count):  # would fit
        append(number, 1)
    poll_until(lambda: log._refused_from is not None, log)
    append(count, 1)
    world.broker.start_committer()
    poll_until(lambda: len(results) == count + 1, log)
    assert list(results) == sorted(results)
    assert results[0] == [0]
    assert {type(results[number]) for number in range(1, count + 1)} == {Retriable}
    append(1_000, 1)
    poll_until(lambda: 1_000 in results, log)
    assert results[1_000] == [1]
    reader = log.reader()
    reader.seek(REQUESTS_0, 0)
    assert [record.key for record in take_count(log, reader, 2)] == [b"0", b"1000"]


# --- by hand ----------------------------------------------------------------------------------------------------------


def _raw(world: RemoteWorld) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(world.server.path))
    return client


def _greet(client: socket.socket) -> None:
    wire.send_greeting(client, wire.Hello(wire.MAGIC, wire.PROTOCOL))
    assert wire.decode_welcome(wire.receive_greeting(client)).facts == FACTS


def _send(client: socket.socket, message: wire.Command) -> None:
    buffer = bytearray()
    wire.put_frame(buffer, message)
    client.sendall(buffer)


class _FakeScheduler:
    """Accepts one connection, reads the greeting, and goes on as the test says."""

    def __init__(self, path: Path, serve: Callable[[socket.socket], None]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self._serve = serve
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self._listener.close()

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            wire.receive_greeting(connection)
            self._serve(connection)
