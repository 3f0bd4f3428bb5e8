"""What waits and runs in all shards, as an API process hears of it, whoever owns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import structlog

from scheduler.ports import Log, MessageCodec, TopicPartition
from schemas.errors import DecodeError, Retriable
from schemas.messages import Priority, QueueStats, ShardStats
from schemas.topics import SHARD_STATS

TAKE_MAX = 1_000
STALE_S = 30.0  # owners repeat themselves every 10 s: a shard that is silent for so long has none just now
_PARTITION = TopicPartition(SHARD_STATS, 0)

_log = structlog.get_logger(__name__)


class Amount(NamedTuple):
    """How much there is of one queue, priority and tenant, in all shards. `oldest_at` in microseconds."""

    queue: str
    priority: Priority
    tenant_id: str
    pending: int
    throttled: int
    running: int
    started_per_s: float
    oldest_at: int | None


class Amounts(NamedTuple):
    """What is known of all shards: `heard` of `shards` told of themselves lately."""

    found: Sequence[Amount]
    heard: int
    shards: int


class _Heard(NamedTuple):
    stats: ShardStats
    rates: dict[tuple[str, Priority, str], float]
    heard_s: float


class StatsFollower:
    """Listens to the shards. Belongs to the thread that polls the log; what it knows may be read by any."""

    def __init__(self, log: Log, codec: MessageCodec) -> None:
        """Listen from now on. Raises what the log raises."""
        self._codec = codec
        self._heard: dict[int, _Heard] = {}
        self._reader = log.reader()
        self._reader.seek(_PARTITION, log.end_offset(_PARTITION))

    def follow(self, now_s: float) -> None:
        """Take in what is there now; `now_s` is of a clock that never goes back."""
        for record in self._reader.take(TAKE_MAX):
            try:
                stats = self._codec.decode(record.value or b"")
            except (DecodeError, Retriable) as error:  # the next one comes within seconds
                _log.warning("stats of a shard cannot be read", offset=record.offset, reason=str(error))
                continue
            if isinstance(stats, ShardStats):
                self._take(stats, now_s)

    def _take(self, stats: ShardStats, now_s: float) -> None:
        last = self._heard.get(stats.shard)
        if last is not None and stats.epoch < last.stats.epoch:
            return  # of an owner that does not know yet that it was followed
        self._heard[stats.shard] = _Heard(stats, _rates(None if last is None else last.stats, stats), now_s)

    def amounts(self, now_s: float) -> Iterator[Amount]:
        """What the shards that were heard of lately have, one by one. Safe from any thread."""
        for heard in list(self._heard.values()):
            if now_s - heard.heard_s <= STALE_S:
                for one in heard.stats.queues:
                    rate = heard.rates.get(_key(one), 0.0)
                    yield Amount(*_key(one), one.pending, one.throttled, one.running, rate, one.oldest_at)

    def shards(self, now_s: float) -> int:
        """Of how many shards it was heard lately. Safe from any thread."""
        return sum(now_s - heard.heard_s <= STALE_S for heard in list(self._heard.values()))

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._reader.close()


def _rates(before: ShardStats | None, after: ShardStats) -> dict[tuple[str, Priority, str], float]:
    """Starts a second between two words of the same owner; another one counts from its own beginning."""
    if before is None or before.epoch != after.epoch or after.at <= before.at:
        return {}
    seconds = (after.at - before.at) / 1e6
    started = {_key(one): one.started for one in before.queues}
    return {_key(one): max(0, one.started - started.get(_key(one), 0)) / seconds for one in after.queues}


def _key(one: QueueStats) -> tuple[str, Priority, str]:
    return one.queue, one.priority, one.tenant_id
