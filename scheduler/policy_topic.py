"""The topic of policies: what is written there, and how a process keeps up with it."""

from __future__ import annotations

import structlog

from scheduler.core.policies import Policies
from scheduler.ports import Entry, Log, MessageCodec, TopicPartition
from schemas.errors import DecodeError, Retriable
from schemas.messages import LimitPolicy, Policy, QueuePolicy, TenantPolicy
from schemas.topics import POLICIES

TAKE_MAX = 1_000
AGAIN_US = 1_000_000  # between tries to read what a registry knows and does not tell now
_PARTITION = TopicPartition(POLICIES, 0)

_log = structlog.get_logger(__name__)


def policy_entry(policy: Policy, codec: MessageCodec) -> Entry:
    """The record of a policy. Its key is what it is about: compaction keeps the last one of each."""
    return Entry(*_PARTITION, _about(policy).encode(), codec.encode(policy))


def _about(policy: Policy) -> str:
    match policy:
        case QueuePolicy():
            return f"queue/{policy.queue}"
        case TenantPolicy():
            return f"tenant/{policy.tenant_id}"
        case LimitPolicy():
            return f"limit/{policy.name}"


class PolicyFollower:
    """Keeps `policies` up to date from the topic. Belongs to the thread that polls the log."""

    def __init__(self, log: Log, codec: MessageCodec) -> None:
        """Begin at the first record. Raises what the log raises."""
        self.policies = Policies()
        self._codec = codec
        self.read_to = 0  # the offset of what comes next
        self._again_at: int | None = None
        self._end = log.end_offset(_PARTITION)  # of what was there when this process began
        self._reader = log.reader()
        self._reader.seek(_PARTITION, 0)

    @property
    def is_current(self) -> bool:
        """Whether all that was said before this process began is known. Nothing may be let go before."""
        return self.read_to >= self._end

    def follow(self, now: int) -> bool:
        """Take in what is there now; whether there was anything. `now` is in microseconds."""
        if self._again_at is not None:
            if now < self._again_at:
                return False
            self._again_at = None
            self._reader.seek(_PARTITION, self.read_to)
        records = self._reader.take(TAKE_MAX)
        for record in records:
            try:
                self._take(record.value, record.offset)
            except Retriable as error:  # the registry's trouble: the record waits, and those behind it
                _log.warning("a policy waits", offset=record.offset, reason=str(error))
                self._again_at = now + AGAIN_US
                break
            self.read_to = record.offset + 1
        return bool(records)

    def _take(self, value: bytes | None, offset: int) -> None:
        try:
            message = self._codec.decode(value or b"")
        except DecodeError as error:  # of a newer release, or nobody's: what was said before goes on to hold
            _log.error("a policy cannot be read", offset=offset, reason=str(error))
            return
        if not isinstance(message, Policy):
            _log.error("that is no policy", offset=offset, found=type(message).__name__)
        elif problem := self.policies.put(message):
            _log.error("a policy is left out", offset=offset, reason=problem)

    def close(self) -> None:
        """Stop reading; idempotent."""
        self._reader.close()
