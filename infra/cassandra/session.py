"""A session with Cassandra: how it is opened, what is retried, and what the driver's errors mean to the operator.

Every statement here is idempotent: a write bears the timestamp of its place in the log, so that doing it twice, late,
or after another one changes nothing. That is why timeouts are answered by the same statement again, at another node;
there is no conditional write (`IF`), whose timeout would leave open whether it was applied. Reads are not doubled on
speculation: a page of a list is many small reads, and twice as many would make a slow cluster slower.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from cassandra import (
    AuthenticationFailed,
    ConsistencyLevel,
    CoordinationFailure,
    DriverException,
    InvalidRequest,
    OperationTimedOut,
    ProtocolVersion,
    ReadFailure,
    Timeout,
    Unauthorized,
    Unavailable,
    UnresolvableContactPoints,
)
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.connection import ConnectionException
from cassandra.policies import ConstantReconnectionPolicy, DCAwareRoundRobinPolicy, RetryPolicy, TokenAwarePolicy
from cassandra.pool import NoConnectionsAvailable
from cassandra.protocol import ErrorMessage, SyntaxException
from cassandra.query import UNSET_VALUE, BatchStatement, BatchType, tuple_factory

from infra.cassandra.settings import CassandraSettings, is_tls, tls_of
from schemas.errors import Fatal, Retriable, TidewheelIOError

Statement: TypeAlias = Any  # the driver has no types
Row: TypeAlias = tuple[Any, ...]

APPLY = "run `tidewheel schema apply`"
IN_FLIGHT_MAX = 32  # requests of one write that wait for their answer: enough to keep two cores of a node busy
# The driver refuses a request ("is overloaded") while what it was given before does not fit the socket's buffer, which
# may be 2 MiB on the same machine and much less elsewhere. A larger request goes alone.
IN_FLIGHT_BYTES_MAX = 512 * 1024
CELL_BYTES = 20  # counted by Cassandra for a cell beside its value, at most
READS_MAX = 512  # requests of readers that wait for their answer, of one process
RECONNECT_S = 1.0  # between tries to reach a node that is down
_TRIES_MAX = 2  # of a request beyond the first, each at the next node
_READ, _WRITE = "read", "write"
_TOO_MANY_TOMBSTONES = 1
_FAILURES = (
    DriverException,
    NoHostAvailable,
    ErrorMessage,
    ConnectionException,
    NoConnectionsAvailable,
    UnresolvableContactPoints,
    OSError,
)


_BATCHES = ("Server warning: Batch for", "Server warning: Unlogged batch covering")
_CONNECTING = ("[control connection] Error connecting", "Control connection failed to connect")


class _Without(logging.Filter):
    """Drops what the driver says again: of batches that are as large as they are meant to be (docs/CASSANDRA.md says
    what to set), and of a failed connect, whose reason is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record of the driver is worth a line."""
        return not record.getMessage().startswith((*_BATCHES, *_CONNECTING))


for _name in ("cassandra.protocol", "cassandra.cluster"):
    logging.getLogger(_name).addFilter(_Without())


class _Again(RetryPolicy):  # type: ignore[misc]  # of an untyped package
    """All requests are idempotent: whatever did not answer is asked again, elsewhere, a bounded number of times."""

    def on_read_timeout(self, query: Any, consistency: int, *_: Any, retry_num: int, **__: Any) -> tuple[int, Any]:
        return self._next(consistency, retry_num)

    def on_write_timeout(self, query: Any, consistency: int, *_: Any, retry_num: int, **__: Any) -> tuple[int, Any]:
        return self._next(consistency, retry_num)

    def on_unavailable(self, query: Any, consistency: int, *_: Any, retry_num: int, **__: Any) -> tuple[int, Any]:
        return self._next(consistency, retry_num)

    def on_request_error(self, query: Any, consistency: int, error: Exception, retry_num: int) -> tuple[int, Any]:
        return self._next(consistency, retry_num)

    def _next(self, consistency: int, retry_num: int) -> tuple[int, Any]:
        if retry_num < _TRIES_MAX:
            return self.RETRY_NEXT_HOST, consistency
        return self.RETHROW, None


class Session:
    """A connected session. Calls may come from any thread of the process that opened it; never after a fork."""

    def __init__(self, settings: CassandraSettings) -> None:
        """Connect, within `connect_timeout_s` for each host. Raises Retriable (nobody answers) and Fatal."""
        self._settings = settings
        self._pid = os.getpid()
        self._is_closed = False
        self._room = threading.Semaphore(READS_MAX)
        self._cluster = _cluster(settings)
        with contextlib.ExitStack() as undo:
            undo.callback(self._cluster.shutdown)
            with self._translated():
                self._session = self._cluster.connect()
            undo.pop_all()

    def prepare(self, cql: str) -> Statement:
        """A prepared statement. Fatal: the tables are not there."""
        with self._used():
            return self._session.prepare(cql)

    def run(self, cql: str, timeout_s: float) -> list[Row]:
        """A statement that is needed once, such as one that defines a table; its rows."""
        with self._used():
            return list(self._session.execute(cql, timeout=timeout_s, execution_profile=_READ))

    def settle(self, timeout_s: float) -> bool:
        """Wait until all nodes have the same schema; whether they have."""
        with self._used():
            return bool(self._cluster.control_connection.wait_for_schema_agreement(wait_time=timeout_s))

    def read(self, statement: Statement, values: Sequence[Any], rows_max: int = 1_000) -> Answer:
        """Ask for rows, without waiting; they come `rows_max` at a time while the answer is read."""
        bound = statement.bind(values)
        bound.fetch_size = rows_max
        with self._used():
            if not self._room.acquire(timeout=self._settings.request_timeout_s):
                raise Retriable(f"{READS_MAX} reads wait for Cassandra: add API processes, or look at its load")
            with contextlib.ExitStack() as undo:
                undo.callback(self._room.release)
                future = self._session.execute_async(bound, execution_profile=_READ)
                undo.pop_all()
        future.add_callbacks(self._give_room, self._give_room)
        return Answer(self, future)

    def write_all(self, requests: Iterable[Request]) -> None:
        """Write requests, several at a time, and wait for all of them. After an error some may be written."""
        flying: deque[tuple[Any, int]] = deque()
        flying_bytes = 0
        with self._used():
            for statement, size in requests:
                while flying and (len(flying) >= IN_FLIGHT_MAX or flying_bytes + size > IN_FLIGHT_BYTES_MAX):
                    first, first_size = flying.popleft()
                    first.result()
                    flying_bytes -= first_size
                flying.append((self._session.execute_async(statement, execution_profile=_WRITE), size))
                flying_bytes += size
            for future, _ in flying:
                future.result()

    def _give_room(self, _: object) -> None:
        self._room.release()

    def is_one_node(self) -> bool:
        """Whether all rows lie on the same node anyway."""
        return len(self._cluster.metadata.all_hosts()) == 1

    def replica(self, routing_key: bytes) -> object:
        """The first node that keeps what lies under a key."""
        replicas = self._cluster.metadata.get_replicas(self._settings.keyspace, routing_key)
        return replicas[0] if replicas else None

    def close(self) -> None:
        """Give back connections and threads; idempotent."""
        if not self._is_closed and self._pid == os.getpid():
            self._is_closed = True
            self._cluster.shutdown()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        if self._is_closed:
            raise Fatal("the view is closed")
        if self._pid != os.getpid():
            raise Fatal("this connection to Cassandra was opened before a fork: open one in the new process")
        with self._translated():
            yield

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise translate(error, self._settings) from error


class Answer:
    """Rows that are on their way. Iterating waits for them; raises Retriable and Fatal."""

    def __init__(self, session: Session, future: Any) -> None:
        self._session, self._future = session, future

    def __iter__(self) -> Iterator[Row]:
        with self._session._used():  # noqa: SLF001 - one thing in two classes
            rows = self._future.result()
        while True:
            yield from rows.current_rows
            if not rows.has_more_pages:
                return
            with self._session._used():  # noqa: SLF001
                rows.fetch_next_page()


class Request(NamedTuple):
    """What is sent as one, and about how many bytes that are."""

    statement: Statement
    size: int


def request_of(statements: Sequence[Statement], size: int | None = None) -> Request:
    """One request for several writes. UNLOGGED: each is idempotent, and all are repeated if one fails.

    `size` is the sum of their sizes, where it is known already.
    """
    if size is None:
        size = sum(map(size_of, statements))
    if len(statements) == 1:
        return Request(statements[0], size)
    batch = BatchStatement(BatchType.UNLOGGED)
    batch.is_idempotent = True
    for statement in statements:
        batch.add(statement)
    return Request(batch, size)


def size_of(statement: Statement) -> int:
    """About how many bytes a bound statement has, as Cassandra counts them for the size of a batch."""
    return sum(len(value) + CELL_BYTES for value in statement.values if value is not UNSET_VALUE and value is not None)


def _cluster(settings: CassandraSettings) -> Any:
    def profile(consistency: str) -> ExecutionProfile:
        return ExecutionProfile(
            load_balancing_policy=TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=settings.datacenter)),
            retry_policy=_Again(),
            consistency_level=ConsistencyLevel.name_to_value[consistency],
            request_timeout=settings.request_timeout_s,
            row_factory=tuple_factory,
        )

    secret = None
    if settings.username is not None:
        secret = PlainTextAuthProvider(settings.username, settings.password)
    reading = profile(settings.read_consistency)
    return Cluster(
        settings.hosts,
        port=settings.port,
        auth_provider=secret,
        ssl_context=tls_of(settings),
        protocol_version=ProtocolVersion.V4,  # V5 sums up every frame, in Python; TCP does so already
        compression=False,
        # The driver leaves Nagle's algorithm on: the end of each large batch then waits 40 ms for an acknowledgement.
        sockopts=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        connect_timeout=settings.connect_timeout_s,
        control_connection_timeout=settings.connect_timeout_s,
        reconnection_policy=ConstantReconnectionPolicy(RECONNECT_S, max_attempts=None),
        execution_profiles={EXEC_PROFILE_DEFAULT: reading, _READ: reading, _WRITE: profile(settings.write_consistency)},
        monitor_reporting_enabled=False,
    )


# --- errors -----------------------------------------------------------------------------------------------------------


_TLS_SIGNS = {  # what OpenSSL says of what does not pass by itself, and what to look at
    "certificate verify failed": "cassandra.tls.ca, and cassandra.tls.verify if the name is not the certificate's",
    "alert certificate required": "cassandra.tls.cert and its key, which the node asks for",
    "wrong version number": "cassandra.tls.enabled and cassandra.port: nobody speaks TLS there",
}


def translate(error: BaseException, settings: CassandraSettings) -> TidewheelIOError:
    """What an error of the driver means, and what the operator can do."""
    at = f"{','.join(settings.hosts)} port {settings.port}"
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, AuthenticationFailed):
            login = "cassandra.username and its password"
            return Fatal(f"Cassandra at {at} refuses the login: check {login} ({_text(cause)})")
        if isinstance(cause, Unauthorized):
            return Fatal(
                f"Cassandra: the login lacks rights in keyspace {settings.keyspace}: grant them ({_text(cause)})"
            )
        if isinstance(cause, InvalidRequest | SyntaxException):
            return _refused(cause, settings)
        check = next((check for sign, check in _TLS_SIGNS.items() if sign in str(cause).lower()), None)
        if check is not None:
            return Fatal(f"no TLS connection to Cassandra at {at}: check {check} ({_text(cause)})")
    advice = next((advice for cause in causes if (advice := _advice(cause, at))), None)
    # A node that expects it otherwise ends connections without a word.
    facts = {
        "TLS (cassandra.tls.enabled)": is_tls(settings),
        "a certificate of ours (cassandra.tls.cert)": settings.certificate_file is not None,
    }
    manner = ", ".join(f"{'with' if is_so else 'without'} {what}" for what, is_so in facts.items())
    return Retriable(
        advice
        or f"no node of Cassandra answers at {at}: check that it runs and is reachable; asked {manner} ({_text(error)})"
    )


def _causes(error: BaseException) -> list[BaseException]:
    """The error, and what each node said if none was of use."""
    told = error.errors.values() if isinstance(error, NoHostAvailable) else ()
    return [error, *(cause for cause in told if isinstance(cause, BaseException))]


def _advice(error: BaseException, at: str) -> str | None:
    """What to do about an error that may pass; None: nobody answered."""
    if isinstance(error, Unavailable):
        return (
            f"Cassandra has {error.alive_replicas} of {error.required_replicas} replicas alive that the consistency "
            "asks for: start the missing nodes, or choose a lower consistency"
        )
    if isinstance(error, ReadFailure) and _TOO_MANY_TOMBSTONES in (error.error_code_map or {}).values():
        return "Cassandra met too many expired rows: ask for a narrower time (created_from, created_to)"
    if isinstance(error, OperationTimedOut | Timeout):
        return (
            f"Cassandra at {at} did not answer within the time, and may have done it or not: it is repeated. If that "
            f"goes on, check that it runs, and look at its load and its log ({type(error).__name__}: {_text(error)})"
        )
    if isinstance(error, CoordinationFailure | ErrorMessage):
        return f"Cassandra failed to do it now; its log says why ({_text(error)})"
    return None


def _refused(error: BaseException, settings: CassandraSettings) -> TidewheelIOError:
    text = str(error).lower()
    if any(sign in text for sign in ("unconfigured table", "does not exist", "unknown identifier", "undefined column")):
        return Fatal(f"Cassandra's keyspace {settings.keyspace} lacks what this release needs: {APPLY} ({error})")
    if "batch too large" in text:
        return Fatal("Cassandra refuses the size of a batch: raise batch_size_fail_threshold to 50KiB, its default")
    return Fatal(f"Cassandra does not accept a statement of this release: {error}; report it with this message")


def _text(error: BaseException) -> str:
    """Short, and without what a traceback of the driver would add."""
    return " ".join(str(error).split())[:300]
