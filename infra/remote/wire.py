"""What goes over the socket: frames, each a length and one msgpack message.

A connection begins with `Hello` and `Welcome`, whose first two fields never change. After them either side sends what
it has, without waiting for the other, except that

- records are pushed for a **cursor** (one partition read from one offset), never beyond the window of a cursor; the
  client gives credit back when it has handed records to its caller;
- appends bear numbers and are acknowledged in their order. When one is refused, so are all behind it of the same
  `generation`; the client begins a new one when it has reported them all, so the log gets no holes;
- the client sends a `Ping` every few seconds; a side that hears nothing for `SILENCE_MAX_S` gives the other one up.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from scheduler.ports import Entry
from schemas.errors import Fatal

SOCKET_NAME = "log.sock"  # in the data folder
PATH_BYTES_MAX = 103  # what sun_path holds on every system (macOS: 104 with its end, Linux: 108)
MAGIC = "tidewheel-log"
PROTOCOL = 1
HELLO_S = 5.0  # for connecting and for each half of the greeting
PING_S = 3.0
SILENCE_MAX_S = 20.0  # a side that stands still for so long has lost its attempts anyway
FRAME_MAX = 16 * 1024 * 1024  # also bounds what one side holds of the other's unread words
GREETING_MAX = 64 * 1024
RECORD_MAX = FRAME_MAX - 64 * 1024  # key and value; a frame has room for the rest
PART_BYTES = 1024 * 1024  # about: longer runs of entries and records go in several frames
RECEIVE_BYTES = 256 * 1024
WINDOW_RECORDS = 256  # of a cursor, sent and not yet handed out; a partition has about as many ready records at a time
WINDOW_BYTES = 1024 * 1024

_HEAD = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


class SchedulerGone(Fatal):
    """Nobody listens at the path, or who did went away; connecting again later may succeed."""


class BadFrame(Fatal):
    """The other side does not speak this protocol."""


# --- the greeting -----------------------------------------------------------------------------------------------------


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a client must know of the engine before it can work."""

    shards: int
    version: str  # of the engine's package, for people to read


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who connects, and which protocol it speaks."""

    magic: str
    protocol: int
    version: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer: the engine's facts, or why there is no connection. `is_final`: trying again changes nothing."""

    magic: str
    protocol: int
    refusal: str | None = None
    is_final: bool = False
    facts: Facts | None = None


# --- from the client --------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message after the greeting."""


class Append(_Message, frozen=True, tag=1):
    """`Log.append`, whole or a part of it."""

    number: int
    generation: int
    entries: list[Entry]


class Begin(_Message, frozen=True, tag=2):
    """Read a partition from `offset` on; with a member and without an offset, from where its group committed last."""

    cursor: int
    member: int | None
    topic: str
    partition: int
    offset: int | None


class End(_Message, frozen=True, tag=3):
    """Stop reading."""

    cursor: int


class Credit(_Message, frozen=True, tag=4):
    """So much of what was pushed for the cursor was handed out."""

    cursor: int
    records: int
    bytes: int


class Join(_Message, frozen=True, tag=5):
    """`Log.member`."""

    member: int
    group: str
    topics: list[str]


class Leave(_Message, frozen=True, tag=6):
    """`Member.close`."""

    member: int


class Commit(_Message, frozen=True, tag=7):
    """`Member.commit`."""

    member: int
    positions: list[tuple[str, int, int]]


class Ask(_Message, frozen=True, tag=8):
    """`Log.end_offset`, or without a partition `Log.partitions`; `Answer` answers."""

    question: int
    topic: str
    partition: int | None


class Trim(_Message, frozen=True, tag=9):
    """`Log.trim`."""

    topic: str
    partition: int
    before_offset: int


class Ping(_Message, frozen=True, tag=10):
    """Still here; `Pong` answers."""


Command: TypeAlias = Append | Begin | End | Credit | Join | Leave | Commit | Ask | Trim | Ping


# --- from the server --------------------------------------------------------------------------------------------------


class Acknowledged(_Message, frozen=True, tag=32):
    """The offsets of appends, by number, in their order."""

    appends: list[tuple[int, list[int]]]


class Refused(_Message, frozen=True, tag=33):
    """This append failed, and with it all behind it of its generation."""

    number: int
    is_retriable: bool
    reason: str


class Records(_Message, frozen=True, tag=34):
    """Offset, key and value of records that follow one another in the partition of a cursor."""

    cursor: int
    records: list[tuple[int, bytes | None, bytes | None]]


class Assigned(_Message, frozen=True, tag=35):
    """What belongs to a member from now on; cursors of what is missing have ended."""

    member: int
    partitions: list[tuple[str, int]]


class Answer(_Message, frozen=True, tag=36):
    """The answer to `Ask`: a number, or why there is none."""

    question: int
    value: int
    error: str | None = None


class Pong(_Message, frozen=True, tag=37):
    """The answer to `Ping`."""


class Goodbye(_Message, frozen=True, tag=38):
    """The server ends the connection. `is_final`: the client did what is not allowed, and would do it again."""

    reason: str
    is_final: bool = False


Reply: TypeAlias = Acknowledged | Refused | Records | Assigned | Answer | Pong | Goodbye

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_command(frame: bytes) -> Command:
    """Raises BadFrame."""
    try:
        return _commands.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrame(f"a message that the log protocol does not know ({error})") from error


def decode_reply(frame: bytes) -> Reply:
    """Raises BadFrame."""
    try:
        return _replies.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrame(f"a message that the log protocol does not know ({error})") from error


# --- frames -----------------------------------------------------------------------------------------------------------


def put_frame(buffer: bytearray, message: msgspec.Struct) -> None:
    """Add the frame of a message to `buffer`. BadFrame: it is too long; then nothing is added."""
    start = len(buffer)
    buffer += bytes(_HEAD.size)
    _encoder.encode_into(message, buffer, -1)
    size = len(buffer) - start - _HEAD.size
    if size > FRAME_MAX:
        del buffer[start:]
        raise BadFrame(f"{type(message).__name__} of {size} bytes; at most {FRAME_MAX}")
    _HEAD.pack_into(buffer, start, size)


class Frames:
    """Cuts what is received into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The frames that `chunk` completes. Raises BadFrame if the next one is longer than allowed."""
        buffer = self._buffer
        buffer += chunk
        complete = []
        start = 0
        while len(buffer) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(buffer, start)
            if size > FRAME_MAX:
                raise BadFrame(f"a frame of {size} bytes; at most {FRAME_MAX}")
            begin = start + _HEAD.size
            if len(buffer) < begin + size:
                break
            start = begin + size
            complete.append(bytes(buffer[begin:start]))
        del buffer[:start]
        return complete


def split(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut a run of things of these sizes into parts of about `PART_BYTES`: begin, end and bytes; at least one part."""
    start = total = 0
    for place, size in enumerate(sizes):
        if total and total + size > PART_BYTES:
            yield start, place, total
            start, total = place, 0
        total += size
    yield start, len(sizes), total


def send_greeting(connection: socket.socket, greeting: Hello | Welcome) -> None:
    """Send the first message. Raises OSError."""
    buffer = bytearray()
    put_frame(buffer, greeting)
    connection.sendall(buffer)


def receive_greeting(connection: socket.socket) -> bytes:
    """The other side's first message, and not a byte more. Raises OSError, BadFrame."""
    (size,) = _HEAD.unpack(_receive_exactly(connection, _HEAD.size))
    if size > GREETING_MAX:
        raise BadFrame(f"a greeting of {size} bytes; at most {GREETING_MAX}")
    return _receive_exactly(connection, size)


_Greeting = TypeVar("_Greeting", Hello, Welcome)


def decode_hello(frame: bytes) -> Hello:
    """Raises BadFrame."""
    return _of_this_protocol(msgspec.msgpack.Decoder(Hello), frame)


def decode_welcome(frame: bytes) -> Welcome:
    """Raises BadFrame."""
    return _of_this_protocol(msgspec.msgpack.Decoder(Welcome), frame)


def _of_this_protocol(decoder: msgspec.msgpack.Decoder[_Greeting], frame: bytes) -> _Greeting:
    try:
        greeting = decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrame(f"a greeting of something else ({error})") from error
    if greeting.magic != MAGIC:
        raise BadFrame(f"a greeting of something else ({greeting.magic!r})")
    return greeting


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise ConnectionResetError("closed before it had greeted")
        received += chunk
    return bytes(received)


def address_of(path: Path) -> str:
    """The socket's address. Fatal: the path is longer than the system allows."""
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise Fatal(
            f"the path of the socket {path} has {size} bytes; at most {PATH_BYTES_MAX}: use a data folder with a "
            "shorter path"
        )
    return str(path)
