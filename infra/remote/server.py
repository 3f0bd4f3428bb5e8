"""The engine's side: lets other processes of this machine use its log.

Each connection has a connection to the broker and two threads: one receives (and appends at once, so that backpressure
is the socket's), the other one belongs to the log: it obeys commands, pushes records, and is the only one that sends.
When a connection ends, however that came, its members leave their groups at once, and others get what they had not
committed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from infra.local import LocalBroker, LocalMember, LocalReader
from infra.remote import wire
from scheduler.ports import TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError

CONNECTIONS_MAX = 128  # two threads each
CURSORS_MAX = 4_096  # of a connection: a worker reads twelve partitions of each of its queues
MEMBERS_MAX = 256
COMMANDS_MAX = 65_536  # received and not yet obeyed; a client that sends so many does not read
TAKE_MAX = 32  # records taken at once: by so many a cursor may overshoot the bytes of its window
SEND_BYTES = 256 * 1024  # collected before they are sent
TURN_S = 1.0  # of one wait for news
STOP_S = 10.0
ACCEPT_PAUSE_S = 0.1
_BACKLOG = 16

_log = logging.getLogger(__name__)


class LogServer:
    """Listens at `path`, for the user of this process alone (mode 0600)."""

    def __init__(self, broker: LocalBroker, path: Path, facts: wire.Facts) -> None:
        """Nothing happens before `start`."""
        self.path = path
        self._broker = broker
        self._facts = facts
        self._inode = 0
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None
        self._lock = threading.Lock()  # of the two below
        self._sessions: dict[_Session, threading.Thread] = {}
        self._is_stopping = False

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._sessions)

    def start(self) -> None:
        """Begin to listen. Fatal: the path is too long, is in use, or cannot be made; then nothing is left behind."""
        listener = _bind(self.path)
        self._inode = os.stat(self.path).st_ino
        self._waker, woken = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, args=(listener, woken), name="log-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye to the clients, disconnect them and remove the socket. Idempotent."""
        with self._lock:
            is_first, self._is_stopping = not self._is_stopping, True
            sessions = dict(self._sessions)
        if not is_first or self._thread is None or self._waker is None:
            return
        self._waker.close()
        self._thread.join(STOP_S)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        for session in sessions:
            session.end(wire.Goodbye("it stops; start it again, then connect again"))
        for session, thread in sessions.items():
            thread.join(STOP_S / 2)
            if thread.is_alive():
                session.cut()
                thread.join(STOP_S / 2)

    def _listen(self, listener: socket.socket, woken: socket.socket) -> None:
        with listener, woken:
            poller = select.poll()
            poller.register(listener, select.POLLIN)
            poller.register(woken, select.POLLIN)
            while woken.fileno() not in [descriptor for descriptor, _ in poller.poll()]:
                try:
                    connection, _ = listener.accept()
                except OSError as error:
                    # Out of descriptors, for instance; or the client gave up. The next one may be luckier.
                    _log.warning("a connection to %s could not be accepted: %s", self.path, error)
                    time.sleep(ACCEPT_PAUSE_S)
                    continue
                self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        _set_timeouts(connection, wire.HELLO_S)
        session = _Session(self._broker, connection, self._facts)
        thread = threading.Thread(target=self._serve, args=(session,), name="log-session", daemon=True)
        with self._lock:
            is_full = len(self._sessions) >= CONNECTIONS_MAX
            if not is_full and not self._is_stopping:
                self._sessions[session] = thread
                thread.start()
                return
        session.refuse(f"it has {CONNECTIONS_MAX} connections already" if is_full else "it stops")

    def _serve(self, session: _Session) -> None:
        try:
            session.run()
        except Exception:
            # The edge of the connection's thread: a mistake in here must not end the engine.
            _log.exception("a connection to %s was dropped", self.path)
        finally:
            with self._lock:
                del self._sessions[session]


# --- one connection ---------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """The last thing in an inbox."""

    goodbye: wire.Goodbye | None


class _Cursor:
    """A partition that is pushed to the client, and what it may still be sent."""

    __slots__ = ("bytes_left", "member", "partition", "reader", "records_left")

    def __init__(self, reader: LocalReader, member: int | None, partition: TopicPartition) -> None:
        self.reader = reader
        self.member = member
        self.partition = partition
        self.records_left = wire.WINDOW_RECORDS
        self.bytes_left = wire.WINDOW_BYTES


class _Membership:
    """A member on behalf of the client, and what the client was told to own."""

    __slots__ = ("member", "told")

    def __init__(self, member: LocalMember) -> None:
        self.member = member
        self.told: frozenset[TopicPartition] = frozenset()


class _Session:
    """One client."""

    def __init__(self, broker: LocalBroker, connection: socket.socket, facts: wire.Facts) -> None:
        self._connection = connection
        self._facts = facts
        self._log = broker.connect()
        self._inbox: deque[wire.Command | wire.Refused | _End] = deque()
        self._refused_generation = -1  # of the receiving thread
        self._acknowledged: list[tuple[int, list[int]]] = []
        self._cursors: dict[int, _Cursor] = {}
        self._members: dict[int, _Membership] = {}
        self._out = bytearray()
        self._end: _End | None = None

    def run(self) -> None:
        """Serve the client until it leaves or `end` is called."""
        try:
            if self._greet():
                _set_timeouts(self._connection, wire.SILENCE_MAX_S)
                receiving = threading.Thread(target=self._receive, name="log-receiver", daemon=True)
                receiving.start()
                self._serve()
                self.cut()
                receiving.join(STOP_S)
        finally:
            self._log.close()
            self._connection.close()

    def refuse(self, reason: str) -> None:
        """Instead of `run`: tell why not."""
        try:
            with contextlib.suppress(OSError):
                refusal = wire.Welcome(wire.MAGIC, wire.PROTOCOL, reason)
                wire.send_greeting(self._connection, refusal)
        finally:
            self._log.close()
            self._connection.close()

    def end(self, goodbye: wire.Goodbye | None) -> None:
        """End the connection after what was received before; from any thread."""
        self._inbox.append(_End(goodbye))
        self._log.wake()

    def cut(self) -> None:
        """End whatever waits for the client, from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _greet(self) -> bool:
        try:
            hello = wire.decode_hello(wire.receive_greeting(self._connection))
            refusal = None
            if hello.protocol != wire.PROTOCOL:
                refusal = (
                    f"it speaks version {wire.PROTOCOL} of the log protocol (tidewheel {self._facts.version}), the "
                    f"worker speaks {hello.protocol} (tidewheel {hello.version}): install the same release for both"
                )
            welcome = wire.Welcome(wire.MAGIC, wire.PROTOCOL, refusal, refusal is not None, self._facts)
            wire.send_greeting(self._connection, welcome)
        except (OSError, wire.BadFrame) as error:
            _log.info("a connection did not come about: %s", error)
            return False
        return refusal is None

    # --- the receiving thread -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            frames = wire.Frames()
            while chunk := self._connection.recv(wire.RECEIVE_BYTES):
                for frame in frames.feed(chunk):
                    self._accept(wire.decode_command(frame))
                if self._inbox:
                    self._log.wake()
            goodbye = None
        except BlockingIOError:
            goodbye = wire.Goodbye(f"the worker was silent for {wire.SILENCE_MAX_S:.0f} s")
        except OSError as error:
            _log.info("a connection was lost: %s", error)
            goodbye = None
        except Fatal as error:
            goodbye = wire.Goodbye(f"it was sent {error}", is_final=True)
        self.end(goodbye)

    def _accept(self, command: wire.Command) -> None:
        if not isinstance(command, wire.Append):
            if len(self._inbox) >= COMMANDS_MAX:
                raise Fatal(f"more than {COMMANDS_MAX} commands in a row")
            self._inbox.append(command)
        elif command.generation > self._refused_generation:
            try:
                self._log.append(command.entries, functools.partial(self._note, command.number))
            except TidewheelIOError as error:
                self._refused_generation = command.generation
                self._inbox.append(wire.Refused(command.number, isinstance(error, Retriable), str(error)))

    # --- the log's thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Raises whatever is a mistake in here."""
        try:
            while True:
                self._log.poll(TURN_S)
                self._obey()
                if self._end is not None:
                    break
                self._tell_assignments()
                self._push()
                self._send()
            if self._end.goodbye is not None:
                self._put(self._end.goodbye)
                self._send()
        except BlockingIOError:
            _log.warning("a connection was dropped: the worker took nothing for %.0f s", wire.SILENCE_MAX_S)
        except OSError as error:
            _log.info("a connection was lost: %s", error)
        except TidewheelIOError as error:
            self._say_goodbye(str(error))

    def _say_goodbye(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._put(wire.Goodbye(reason))
            self._send()

    def _note(self, number: int, result: Sequence[int] | TidewheelIOError) -> None:
        if isinstance(result, TidewheelIOError):
            self._put(wire.Refused(number, isinstance(result, Retriable), str(result)))
        else:
            self._acknowledged.append((number, list(result)))

    def _obey(self) -> None:
        while self._inbox and self._end is None:
            command = self._inbox.popleft()
            if isinstance(command, _End):
                self._end = command
            elif isinstance(command, wire.Refused):
                self._put(command)
            else:
                try:
                    self._perform(command)
                except Fatal as error:
                    self._end = _End(wire.Goodbye(str(error), is_final=True))

    def _perform(self, command: wire.Command) -> None:
        match command:
            case wire.Begin() | wire.End() | wire.Credit():
                self._perform_reading(command)
            case wire.Join() | wire.Leave() | wire.Commit():
                self._perform_sharing(command)
            case wire.Ask():
                self._put(self._answer(command))
            case wire.Trim(topic, partition, before_offset):
                self._log.trim(TopicPartition(topic, partition), before_offset)
            case wire.Ping():
                self._put(wire.Pong())

    def _perform_reading(self, command: wire.Begin | wire.End | wire.Credit) -> None:
        match command:
            case wire.Begin():
                self._begin(command)
            case wire.End(number):
                self._end_cursor(number)
            case wire.Credit(number, records, size):
                cursor = self._cursors.get(number)
                if cursor is not None:
                    cursor.records_left = min(wire.WINDOW_RECORDS, cursor.records_left + records)
                    cursor.bytes_left = min(wire.WINDOW_BYTES, cursor.bytes_left + size)

    def _perform_sharing(self, command: wire.Join | wire.Leave | wire.Commit) -> None:
        match command:
            case wire.Join(number, group, topics):
                self._join(number, group, topics)
            case wire.Leave(number):
                self._leave(number)
            case wire.Commit(number, positions):
                membership = self._members.get(number)
                if membership is not None:
                    membership.member.commit({TopicPartition(topic, number): at for topic, number, at in positions})

    def _begin(self, command: wire.Begin) -> None:
        partition = TopicPartition(command.topic, command.partition)
        offset = command.offset or 0
        if command.member is not None:
            membership = self._members.get(command.member)
            if membership is None or partition not in membership.told:
                return  # taken away meanwhile: the client hears of it
            if command.offset is None:
                offset = membership.member.position(partition)
        if len(self._cursors) >= CURSORS_MAX:
            raise Fatal(f"one connection reads at most {CURSORS_MAX} partitions at a time")
        self._end_cursor(command.cursor)
        reader = self._log.reader()
        self._cursors[command.cursor] = _Cursor(reader, command.member, partition)
        reader.seek(partition, offset)

    def _end_cursor(self, number: int) -> None:
        cursor = self._cursors.pop(number, None)
        if cursor is not None:
            cursor.reader.close()

    def _join(self, number: int, group: str, topics: Sequence[str]) -> None:
        if len(self._members) >= MEMBERS_MAX or number in self._members:
            raise Fatal(f"one connection has at most {MEMBERS_MAX} members, each with a number of its own")
        self._members[number] = _Membership(self._log.member(group, topics))

    def _leave(self, number: int) -> None:
        membership = self._members.pop(number, None)
        if membership is not None:
            self._end_cursors(number, membership.told)
            membership.member.close()

    def _answer(self, question: wire.Ask) -> wire.Answer:
        try:
            if question.partition is None:
                value = self._log.partitions(question.topic)
            else:
                value = self._log.end_offset(TopicPartition(question.topic, question.partition))
        except Fatal as error:
            return wire.Answer(question.question, 0, str(error))
        return wire.Answer(question.question, value)

    def _tell_assignments(self) -> None:
        for number, membership in self._members.items():
            owned = membership.member.assigned()
            if owned is not membership.told and owned != membership.told:
                self._end_cursors(number, membership.told - owned)
                membership.told = owned
                self._put(wire.Assigned(number, sorted(owned)))

    def _end_cursors(self, member: int, partitions: frozenset[TopicPartition]) -> None:
        for number, cursor in tuple(self._cursors.items()):
            if cursor.member == member and cursor.partition in partitions:
                self._end_cursor(number)

    def _push(self) -> None:
        for number, cursor in self._cursors.items():
            while cursor.records_left > 0 and cursor.bytes_left > 0:
                found = cursor.reader.take(min(TAKE_MAX, cursor.records_left))
                if not found:
                    break
                sizes = [len(record.key or b"") + len(record.value or b"") for record in found]
                for begin, end, size in wire.split(sizes):
                    records = [(record.offset, record.key, record.value) for record in found[begin:end]]
                    self._put(wire.Records(number, records))
                    cursor.records_left -= len(records)
                    cursor.bytes_left -= size

    def _put(self, reply: wire.Reply) -> None:
        wire.put_frame(self._out, reply)
        if len(self._out) >= SEND_BYTES:
            self._send_out()

    def _send(self) -> None:
        if self._acknowledged:
            acknowledged, self._acknowledged = self._acknowledged, []
            self._put(wire.Acknowledged(acknowledged))
        self._send_out()

    def _send_out(self) -> None:
        if self._out:
            self._connection.sendall(self._out)
            self._out.clear()


# --- the socket -------------------------------------------------------------------------------------------------------


def _bind(path: Path) -> socket.socket:
    address = wire.address_of(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path, address)
        listener.bind(address)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)  # before anyone can connect
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise Fatal(f"the socket {path} cannot be made ({error}); is the data folder on a local disk?") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path, address: str) -> None:
    """Remove what an engine that was killed left behind. Fatal: somebody answers there, or it is no socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Fatal(f"{path} is in the way and no socket; move it elsewhere")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(wire.HELLO_S)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise Fatal(f"another scheduler listens at {path}; stop it first, or use another data folder")


def _set_timeouts(connection: socket.socket, timeout_s: float) -> None:
    """A send or receive without progress for so long raises BlockingIOError, each direction for itself."""
    value = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
