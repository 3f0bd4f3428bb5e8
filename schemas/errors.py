"""What can go wrong with I/O, named by who must act. Adapters raise these; runtimes catch them.

TidewheelIOError
├── Retriable   try again within the deadline you have
├── Fenced      somebody else owns this now: drop the shard
└── Fatal       this process cannot go on: exit, the supervisor restarts

DecodeError
├── UnknownSchema   the framing is right, the schema id is not known here
└── Undecodable     the bytes are not what their schema says
"""

from __future__ import annotations


class TidewheelIOError(Exception):
    """An operation on a log, a state store or a view failed."""


class Retriable(TidewheelIOError):
    """The same call may succeed later; nothing is known to have happened."""


class Fenced(TidewheelIOError):
    """Another owner took over; nothing that this one wrote afterwards counts."""


class Fatal(TidewheelIOError):
    """The process cannot continue; the message says what the operator must do."""


class DecodeError(Exception):
    """A record's bytes did not become a message."""


class UnknownSchema(DecodeError):
    """The record names a schema that is not known here (a newer writer, or another system's record)."""


class Undecodable(DecodeError):
    """The record is broken: wrong framing, truncated, or not of its schema."""
