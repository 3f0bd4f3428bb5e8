"""What tests of the view in Cassandra stand on: a keyspace of their own in the cluster that the run shares."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

from infra.cassandra import CassandraSettings, CassandraView, apply_schema
from infra.cassandra.session import Session
from tests.services import cassandra_address

TABLES = (
    *("tasks", "attempts", "tasks_by_tenant", "dead_letters_by_queue", "calendar", "positions"),
    *("schedules", "schedules_by_tenant"),
)
TIMEOUT_S = 60.0


def reachable(**more: Any) -> CassandraSettings:
    """Settings of the cluster of this run."""
    host, port = cassandra_address()
    return msgspec.structs.replace(CassandraSettings(hosts=(host,), port=port, request_timeout_s=20.0), **more)


@contextlib.contextmanager
def keyspace(**more: Any) -> Iterator[CassandraSettings]:
    """A new keyspace with its tables; removed at the end."""
    settings = reachable(keyspace=f"test_{uuid.uuid4().hex[:16]}", **more)
    apply_schema(settings)
    try:
        yield settings
    finally:
        with session(settings) as opened:
            opened.run(f"DROP KEYSPACE {settings.keyspace}", TIMEOUT_S)


@contextlib.contextmanager
def session(settings: CassandraSettings) -> Iterator[Session]:
    """A bare session."""
    opened = Session(settings)
    try:
        yield opened
    finally:
        opened.close()


def empty(view: CassandraView, settings: CassandraSettings) -> None:
    """Remove all rows."""
    for table in TABLES:
        view._session.run(f"TRUNCATE {settings.keyspace}.{table}", TIMEOUT_S)


class Way:
    """The way to Cassandra, which can be blocked: a listener that passes bytes on, on a port of its own."""

    def __init__(self, settings: CassandraSettings) -> None:
        self._to = (settings.hosts[0], settings.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_open = True
        self.is_deaf = False  # what the nodes answer is dropped, and the connection with it
        self._moves = threading.Event()
        self._moves.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """Let connections be, but pass nothing on until `move`."""
        self._moves.clear()

    def move(self) -> None:
        """End a hold."""
        self._moves.set()

    def block(self) -> None:
        """End all connections, and every new one at once."""
        with self._lock:
            self._is_open = False
            for pair in self._pairs:
                _end(*pair)
            self._pairs.clear()

    def unblock(self) -> None:
        """Let new connections pass, and answers."""
        self.is_deaf = False
        self._is_open = True

    def close(self) -> None:
        """Give the port back."""
        self.move()
        self.block()
        _end(self._listener)
        self._thread.join(TIMEOUT_S)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    if not self._is_open:
                        _end(client)
                        continue
                    node = socket.create_connection(self._to)
                    self._pairs.append((client, node))
                for source, target in ((client, node), (node, client)):
                    threading.Thread(target=self._pass, args=(source, target, source is node), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):  # one of both ended
            while data := source.recv(65_536):
                if self.is_deaf and is_answer:
                    break
                self._moves.wait(TIMEOUT_S)
                target.sendall(data)
        _end(source, target)


@contextlib.contextmanager
def way(settings: CassandraSettings) -> Iterator[tuple[Way, CassandraSettings]]:
    """A way to the cluster of `settings`, and the settings that go by it."""
    opened = Way(settings)
    try:
        yield opened, msgspec.structs.replace(settings, port=opened.port, request_timeout_s=3.0)
    finally:
        opened.close()


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):  # it was not connected any more
            one.shutdown(socket.SHUT_RDWR)
        one.close()
