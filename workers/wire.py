"""What a worker and the processes of its pool say to each other: length-prefixed MessagePack over a socket pair."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeAlias, TypeVar

import msgspec

from schemas.messages import ReadyTask
from workers.execution import Cancelled, Crashed, Failed, GivenBack, Snoozed, Succeeded

_LENGTH = struct.Struct("!I")


class Run(msgspec.Struct, frozen=True, tag=True):
    """To a child: perform this attempt."""

    ready: ReadyTask
    ends_at: int | None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a child: let the handler see that it is to stop."""


class Up(msgspec.Struct, frozen=True, tag=True):
    """From a child: the application is imported and has these task types."""

    task_types: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From a child: the application could not be imported."""

    reason: str


class Saved(msgspec.Struct, frozen=True, tag=True):
    """From a child: the handler saved a checkpoint."""

    checkpoint: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """From a child: the attempt is over."""

    outcome: Succeeded | Failed | Snoozed | Cancelled | Crashed | GivenBack


ToChild: TypeAlias = Run | Stop
FromChild: TypeAlias = Up | Refused | Saved | Done

_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()


def frame(message: ToChild | FromChild) -> bytes:
    """A message with its length before it."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


class Frames(Generic[_M]):
    """Takes bytes as they come, gives the messages that are complete."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, content: bytes) -> Iterator[_M]:
        """The messages that `content` completes."""
        self._buffer += content
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = self._decoder.decode(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield message


def to_child() -> Frames[ToChild]:
    """What a child reads."""
    return Frames(msgspec.msgpack.Decoder(ToChild))


def from_child() -> Frames[FromChild]:
    """What a worker reads."""
    return Frames(msgspec.msgpack.Decoder(FromChild))
