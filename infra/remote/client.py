"""The client's side: `ports.Log` over one connection to a `LogServer`.

There is no thread: the one that calls `poll` receives, and whoever appends sends. The log of a scheduler that went away
does not come back: `append` and `poll` raise `SchedulerGone`, and whoever owns the connection makes a new one (a
restarted scheduler has other offsets in its volatile topics, so its readers must begin anew anyway).
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from infra.remote import wire
from infra.remote.wire import SchedulerGone
from scheduler.ports import Entry, OnAck, Record, TopicPartition
from schemas.errors import Fatal, Retriable, TidewheelIOError

UNACKNOWLEDGED_BYTES_MAX = 16 * 1024 * 1024  # of one connection; the broker takes 64 MiB from all of them
ENTRY_OVERHEAD = 64  # bytes counted for an entry beside its key and value; also bounds their number
APPENDS_MAX = 65_536  # unacknowledged
WAIT_MAX_S = 3_600.0  # of one poll; a longer timeout only returns earlier
ANSWER_S = 10.0  # for a question
CLOSE_S = 2.0  # for the last words


class _Append(NamedTuple):
    """A part of an append that is not reported yet; the last part has the callback."""

    number: int
    is_last: bool
    on_ack: OnAck | None
    size: int


# --- reading ----------------------------------------------------------------------------------------------------------


class _Cursor:
    """What was pushed of one partition and not yet taken."""

    __slots__ = ("number", "partition", "records", "taken", "taken_bytes")

    def __init__(self, number: int, partition: TopicPartition) -> None:
        self.number = number
        self.partition = partition
        self.records: deque[Record] = deque()
        self.taken = 0  # since credit was given last
        self.taken_bytes = 0

    def take(self, limit: int) -> list[Record]:
        taken = [self.records.popleft() for _ in range(min(limit, len(self.records)))]
        self.taken += len(taken)
        self.taken_bytes += sum(len(record.key or b"") + len(record.value or b"") for record in taken)
        return taken

    def claim_credit(self) -> wire.Credit | None:
        """When half of the window was taken, so that the server need not stop and is not told of every record."""
        if 2 * self.taken < wire.WINDOW_RECORDS and 2 * self.taken_bytes < wire.WINDOW_BYTES:
            return None
        credit = wire.Credit(self.number, self.taken, self.taken_bytes)
        self.taken = self.taken_bytes = 0
        return credit


class _Cursors:
    """The cursors of a reader or member; taking is fair: each call begins behind the partition where the last ended."""

    def __init__(self, link: RemoteLog, member: int | None = None) -> None:
        self._link = link
        self._member = member
        self._cursors: dict[TopicPartition, _Cursor] = {}
        self._turn: deque[_Cursor] = deque()

    def begin(self, partition: TopicPartition, offset: int | None) -> None:
        self.end(partition)
        cursor = self._cursors[partition] = self._link.open_cursor(partition)
        self._turn.append(cursor)
        self._link.send(wire.Begin(cursor.number, self._member, *partition, offset))

    def end(self, partition: TopicPartition) -> None:
        cursor = self._cursors.pop(partition, None)
        if cursor is not None:
            self._turn.remove(cursor)
            self._link.close_cursor(cursor)

    def end_all(self) -> None:
        for partition in tuple(self._cursors):
            self.end(partition)

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` records; if there are more, the next `poll` does not wait."""
        taken: list[Record] = []
        turn = self._turn
        for _ in range(len(turn)):
            if len(taken) >= limit:
                break
            cursor = turn[0]
            if cursor.records:
                taken += cursor.take(limit - len(taken))
                credit = cursor.claim_credit()
                if credit is not None:
                    self._link.send(credit)
            turn.rotate(-1)
        if taken and any(cursor.records for cursor in turn):
            self._link.announce()
        return taken


class RemoteReader:
    """Implements `ports.Reader`. Records come with a `poll` after the `seek`."""

    def __init__(self, link: RemoteLog) -> None:
        self._link = link
        self._cursors = _Cursors(link)
        self._is_closed = False

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read `partition` from `offset` on; below the oldest record kept, from there."""
        if self._is_closed:
            raise Fatal("the reader is closed")
        self._cursors.begin(partition, offset)

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` records that were received."""
        return self._cursors.take(limit)

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._is_closed = True
        self._cursors.end_all()
        self._link.forget(self)


class RemoteMember:
    """Implements `ports.Member`. Assignments change in `poll` alone."""

    def __init__(self, link: RemoteLog, number: int) -> None:
        self._link = link
        self._number = number
        self._cursors = _Cursors(link, number)
        self._told: frozenset[TopicPartition] = frozenset()
        self._lost: frozenset[TopicPartition] = frozenset()  # since the last `poll`
        self._owned: frozenset[TopicPartition] = frozenset()
        self._is_closed = False

    def assigned(self) -> frozenset[TopicPartition]:
        """What belongs to this member now; a new partition is silent until `seek` or `resume`."""
        return self._owned

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Begin an assigned partition at `offset`; nothing happens if it was taken away meanwhile."""
        self._begin(partition, offset)

    def resume(self, partition: TopicPartition) -> None:
        """Begin an assigned partition where the group committed last, or at its oldest record."""
        self._begin(partition, None)

    def take(self, limit: int) -> Sequence[Record]:
        """Up to `limit` received records of begun partitions."""
        return self._cursors.take(limit)

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        """Remember the next offset to read; of durable topics with the next commit of the log."""
        if positions:
            changes = [(topic, partition, offset) for (topic, partition), offset in positions.items()]
            self._link.send(wire.Commit(self._number, changes))

    def close(self) -> None:
        """Leave; the partitions go to the other members. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._owned = frozenset()
        self._cursors.end_all()
        self._link.send(wire.Leave(self._number), is_urgent=True)
        self._link.forget(self)

    def hear(self, told: frozenset[TopicPartition]) -> None:
        """The server tells what belongs to this member; shown with the next `follow`."""
        self._lost |= self._told - told
        self._told = told

    def follow(self) -> None:
        """Show what was told. What was lost and given back is missing for one poll, so that it is begun anew."""
        if self._is_closed or self._told is self._owned:
            return
        lost, self._lost = self._lost & self._owned, frozenset()
        for partition in lost:
            self._cursors.end(partition)
        self._owned = self._told - lost if lost & self._told else self._told
        self._link.announce()

    def _begin(self, partition: TopicPartition, offset: int | None) -> None:
        if partition in self._owned:
            self._cursors.begin(partition, offset)


# --- the connection ---------------------------------------------------------------------------------------------------


class RemoteLog:
    """Implements `ports.Log` over the socket at `path`, made by a `LogServer`.

    Whoever does not poll for `wire.SILENCE_MAX_S` is given up by the server. Records that one `poll` announced and that
    were not taken do not keep the next one from waiting.
    """

    def __init__(self, path: Path, *, version: str = "") -> None:
        """Connect. SchedulerGone: nobody answers there; Fatal: it is no scheduler, or one of another release."""
        self.path = path
        self._socket, self.facts = _connect(path, version)
        self._lock = threading.Lock()  # of what appending threads touch: from here to `_refusal`
        self._out = bytearray()
        self._appends: deque[_Append] = deque()
        self._unacknowledged_bytes = 0
        self._next_append = 0
        self._generation = 0
        self._refused_from: int | None = None  # appends from this number on failed and are not all reported yet
        self._refusal: TidewheelIOError = Retriable("")
        self._failure: TidewheelIOError | None = None
        self._acknowledged: deque[tuple[int, list[int]]] = deque()
        self._offsets: list[int] = []  # of the parts so far of the append that is reported next
        self._frames = wire.Frames()
        self._cursors: dict[int, _Cursor] = {}
        self._next_cursor = 0
        self._members: dict[int, RemoteMember] = {}
        self._next_member = 0
        self._readers: list[RemoteReader] = []
        self._partitions: dict[str, int] = {}
        self._answers: dict[int, wire.Answer] = {}
        self._next_question = 0
        self._has_news = False
        self._is_closed = False
        self._ping_at = time.monotonic() + wire.PING_S
        self._unanswered_since: float | None = None
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._poller.register(self._woken, select.POLLIN)

    # --- ports.Log ------------------------------------------------------------------------------------------------

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Fatal: no such topic, or the scheduler went away."""
        if topic not in self._partitions:
            self._partitions[topic] = self._ask(topic, None)
        return self._partitions[topic]

    def ready_partitions(self, topic: str) -> int:
        """As `partitions`; workers write none of them."""
        return self.partitions(topic)

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Append entries; sent at once as far as the socket takes them. Raises Retriable when full."""
        sizes = [ENTRY_OVERHEAD + len(key or b"") + len(value or b"") for _, _, key, value in entries]
        if sizes and max(sizes) > wire.RECORD_MAX:
            raise Fatal(f"a record of {max(sizes)} bytes cannot be sent; at most {wire.RECORD_MAX}")
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._check_room(sum(sizes))
            for begin, end, size in wire.split(sizes):
                self._add(list(entries[begin:end]), size, end == len(entries), on_ack)
            is_stuck = self._send_some() or self._refused_from is not None
        if is_stuck:
            self.wake()

    def poll(self, timeout_s: float) -> None:
        """Send, receive, call due `on_ack`s; then wait if there was no news. SchedulerGone: see above."""
        deadline = time.monotonic() + min(timeout_s, WAIT_MAX_S)
        wait_s = 0.0
        while True:
            if self._failure is None:
                self._exchange(wait_s)
            for member in self._members.values():
                member.follow()
            if self._report_appends() or self._has_news:
                self._has_news = False
                return
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            if now >= deadline:
                return
            wait_s = deadline - now

    def wake(self) -> None:
        """End a waiting `poll`, or the next one. Safe in a signal handler."""
        # Full: it is awake already. Closed: there is nothing to wake.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def reader(self) -> RemoteReader:
        """A reader of explicit partitions."""
        reader = RemoteReader(self)
        self._readers.append(reader)
        return reader

    def member(self, group: str, topics: Iterable[str]) -> RemoteMember:
        """Join a group; topics that do not exist yet are created. A topic that no rule knows ends the connection."""
        number = self._next_member
        self._next_member += 1
        member = self._members[number] = RemoteMember(self, number)
        self.send(wire.Join(number, group, sorted(set(topics))))
        return member

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset behind the last record that readers may see. Fatal: no such partition, or nobody answers."""
        return self._ask(*partition)

    def is_disturbed(self) -> bool:
        """Never: it is there, or nothing is."""
        return False

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below `before_offset` are not needed any more."""
        self.send(wire.Trim(*partition, before_offset))

    def close(self) -> None:
        """Leave the groups and disconnect, after what was appended is sent (for up to `CLOSE_S`). Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for member in tuple(self._members.values()):
            member.close()
        for reader in tuple(self._readers):
            reader.close()
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            while self._failure is None and self._send_some() and time.monotonic() < deadline:
                self._poller.modify(self._socket, select.POLLOUT)
                self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            self._failure = Fatal("the connection to the log is closed")
            self._appends.clear()
            self._socket.close()
        self._waker.close()
        self._woken.close()

    # --- for readers and members ----------------------------------------------------------------------------------

    def open_cursor(self, partition: TopicPartition) -> _Cursor:
        """A cursor with a number of its own."""
        cursor = self._cursors[self._next_cursor] = _Cursor(self._next_cursor, partition)
        self._next_cursor += 1
        return cursor

    def close_cursor(self, cursor: _Cursor) -> None:
        """What still comes for it is dropped."""
        del self._cursors[cursor.number]
        self.send(wire.End(cursor.number))

    def send(self, message: wire.Command, *, is_urgent: bool = False) -> None:
        """Send now or with the next `poll` or append. A connection that is lost is told of by them."""
        with self._lock:
            if self._failure is None:
                wire.put_frame(self._out, message)
                if is_urgent:
                    self._send_some()

    def announce(self) -> None:
        """The next `poll` does not wait."""
        self._has_news = True

    def forget(self, source: RemoteReader | RemoteMember) -> None:
        """It was closed."""
        if isinstance(source, RemoteReader):
            if source in self._readers:
                self._readers.remove(source)
        else:
            self._members = {number: member for number, member in self._members.items() if member is not source}

    # --- appending; the lock is held ------------------------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        # One append larger than the bound is taken when nothing else is pending: it could never be, otherwise.
        pending = self._unacknowledged_bytes
        if pending and pending + size > UNACKNOWLEDGED_BYTES_MAX:
            raise Retriable(f"{pending} bytes of at most {UNACKNOWLEDGED_BYTES_MAX} are not acknowledged: try later")
        if len(self._appends) >= APPENDS_MAX:
            raise Retriable(f"{APPENDS_MAX} appends are not acknowledged: try later")

    def _add(self, entries: list[Entry], size: int, is_last: bool, on_ack: OnAck | None) -> None:
        number = self._next_append
        if self._refused_from is None:
            wire.put_frame(self._out, wire.Append(number, self._generation, entries))
        self._next_append = number + 1
        self._unacknowledged_bytes += size
        self._appends.append(_Append(number, is_last, on_ack, size))

    def _send_some(self) -> bool:
        """Send what the socket takes; whether something is left."""
        while self._out:
            try:
                sent = self._socket.send(self._out)
            except BlockingIOError:
                return True
            except OSError:
                self._out.clear()  # the connection is lost; who receives finds out why
                return False
            del self._out[:sent]
        return False

    def _collect(self) -> list[tuple[OnAck, Sequence[int] | TidewheelIOError]]:
        due: list[tuple[OnAck, Sequence[int] | TidewheelIOError]] = []
        while self._appends:
            part = self._appends[0]
            is_refused = self._refused_from is not None and part.number >= self._refused_from
            if not is_refused:
                if not self._acknowledged:
                    break
                number, offsets = self._acknowledged.popleft()
                if number != part.number:
                    raise Fatal(f"append {number} was acknowledged where {part.number} should be: the log is broken")
                self._offsets += offsets
            self._appends.popleft()
            self._unacknowledged_bytes -= part.size
            if part.is_last:
                offsets, self._offsets = self._offsets, []
                if part.on_ack is not None:
                    due.append((part.on_ack, self._refusal if is_refused else offsets))
        if self._refused_from is not None and not self._appends:
            self._refused_from = None
            self._generation += 1
        return due

    # --- receiving ------------------------------------------------------------------------------------------------

    def _report_appends(self) -> bool:
        if not self._appends:
            return False
        with self._lock:
            due = self._collect()
        for on_ack, result in due:
            on_ack(result)
        return bool(due)

    def _exchange(self, wait_s: float) -> None:
        """Send and receive; wait until something can be received or sent, at most for `wait_s` and to the next ping."""
        self._maybe_ping()
        if self._failure is not None:
            return
        with self._lock:
            is_blocked = self._send_some()
        wait_s = max(0.0, min(wait_s, self._ping_at - time.monotonic()))
        if is_blocked:
            self._poller.modify(self._socket, select.POLLIN | select.POLLOUT)
        for descriptor, event in self._poller.poll(wait_s * 1000):
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)
                self._has_news = True
            elif event & ~select.POLLOUT:
                self._receive()
        if is_blocked and self._failure is None:
            self._poller.modify(self._socket, select.POLLIN)

    def _maybe_ping(self) -> None:
        now = time.monotonic()
        if now < self._ping_at:
            return
        self._ping_at = now + wire.PING_S
        self.send(wire.Ping())
        if self._unanswered_since is None:
            self._unanswered_since = now
        elif now - self._unanswered_since > wire.SILENCE_MAX_S:
            self._fail(self._gone(f"has not answered for {wire.SILENCE_MAX_S:.0f} s"))

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(wire.RECEIVE_BYTES)
            if not chunk:
                self._fail(self._gone("went away"))
            self._unanswered_since = None
            for frame in self._frames.feed(chunk):
                self._hear(wire.decode_reply(frame))
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(self._gone(f"went away ({error})"))
        except wire.BadFrame as error:
            self._fail(Fatal(f"the scheduler at {self.path} sent {error}; install the same release for both"))

    def _hear(self, reply: wire.Reply) -> None:
        match reply:
            case wire.Records(number, records):
                cursor = self._cursors.get(number)
                if cursor is not None:
                    topic, partition = cursor.partition
                    cursor.records.extend([Record(topic, partition, *record) for record in records])
                    self._has_news = True
            case wire.Acknowledged(appends):
                self._acknowledged.extend(appends)
            case wire.Refused(number, is_retriable, reason):
                self._refuse(number, Retriable(reason) if is_retriable else Fatal(reason))
            case wire.Assigned(number, partitions):
                member = self._members.get(number)
                if member is not None:
                    member.hear(frozenset(TopicPartition(*partition) for partition in partitions))
            case wire.Answer():
                self._answers[reply.question] = reply
            case wire.Goodbye(reason, is_final):
                message = f"the scheduler at {self.path} ended the connection: {reason}"
                self._fail(Fatal(message) if is_final else SchedulerGone(message))
            case wire.Pong():
                pass

    def _refuse(self, number: int, error: TidewheelIOError) -> None:
        with self._lock:
            if self._refused_from is None:
                self._refused_from, self._refusal = number, error

    def _fail(self, error: TidewheelIOError) -> None:
        """The connection is lost: nothing that was not acknowledged will be."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            self._out.clear()
            self._refusal = error
            if self._appends:
                first = self._appends[0].number + len(self._acknowledged)
                self._refused_from = first if self._refused_from is None else min(first, self._refused_from)
        self._poller.unregister(self._socket)

    def _gone(self, how: str) -> SchedulerGone:
        return SchedulerGone(f"the scheduler at {self.path} {how}; start it again, then connect again")

    def _ask(self, topic: str, partition: int | None) -> int:
        question = self._next_question
        self._next_question += 1
        self.send(wire.Ask(question, topic, partition))
        deadline = time.monotonic() + ANSWER_S
        while question not in self._answers:
            if self._failure is not None:
                raise self._failure
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                self._fail(self._gone(f"has not answered for {ANSWER_S:.0f} s"))
                continue
            self._exchange(remaining_s)
        answer = self._answers.pop(question)
        if answer.error is not None:
            raise Fatal(answer.error)
        return answer.value


def _connect(path: Path, version: str) -> tuple[socket.socket, wire.Facts]:
    address = wire.address_of(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(wire.HELLO_S)
        connection.connect(address)
        facts = _greet(connection, path, version)
        connection.setblocking(False)
    except OSError as error:
        connection.close()
        raise SchedulerGone(
            f"no scheduler answers at {path} ({error}): start one with this data folder on this machine"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection, facts


def _greet(connection: socket.socket, path: Path, version: str) -> wire.Facts:
    with contextlib.suppress(BrokenPipeError):  # refused before it was read: the reason can be read
        wire.send_greeting(connection, wire.Hello(wire.MAGIC, wire.PROTOCOL, version))
    try:
        welcome = wire.decode_welcome(wire.receive_greeting(connection))
    except wire.BadFrame as error:
        raise Fatal(f"what listens at {path} is no tidewheel scheduler: {error}") from error
    if welcome.refusal is not None or welcome.facts is None:
        message = f"the scheduler at {path} refused the connection: {welcome.refusal}"
        raise Fatal(message) if welcome.is_final else SchedulerGone(message)
    return welcome.facts
