"""What waits and runs in all shards, as an API process hears of it, whoever owns them."""

from __future__ import annotations

from collections import Counter
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
    due_soon: int
    waited_us_per_s: float  # of those that started: with `started_per_s` the mean


class LimitAmount(NamedTuple):
    """How much waits for one key of a limit, and is held of it, in all shards."""

    key: str
    waiting: int
    held: int


class Amounts(NamedTuple):
    """What is known of all shards: `heard` of `shards` told of themselves lately."""

    found: Sequence[Amount]
    limits: Sequence[LimitAmount]
    heard: int
    shards: int


class _Rate(NamedTuple):
    started_per_s: float
    waited_us_per_s: float


class _Heard(NamedTuple):
    stats: ShardStats
    rates: dict[tuple[str, Priority, str], _Rate]
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
        for heard in self._lately(now_s):
            for one in heard.stats.queues:
                rate = heard.rates.get(_key(one), _Rate(0.0, 0.0))
                yield Amount(
                    *_key(one),
                    pending=one.pending,
                    throttled=one.throttled,
                    running=one.running,
                    started_per_s=rate.started_per_s,
                    oldest_at=one.oldest_at,
                    due_soon=one.due_soon,
                    waited_us_per_s=rate.waited_us_per_s,
                )

    def limits(self, now_s: float) -> Sequence[LimitAmount]:
        """What is known of keys of limits, in all shards. Safe from any thread."""
        waiting, held = Counter[str](), Counter[str]()
        for heard in self._lately(now_s):
            for one in heard.stats.limits:
                waiting[one.key] += one.waiting
                held[one.key] += one.held
        return [LimitAmount(key, waiting[key], held[key]) for key in waiting]

    def shards(self, now_s: float) -> int:
        """Of how many shards it was heard lately. Safe from any thread."""
        return len(self._lately(now_s))

    def _lately(self, now_s: float) -> list[_Heard]:
        return [heard for heard in list(self._heard.values()) if now_s - heard.heard_s <= STALE_S]

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._reader.close()


def _rates(before: ShardStats | None, after: ShardStats) -> dict[tuple[str, Priority, str], _Rate]:
    """What happened in a second between two words of the same owner; another one counts from its own beginning."""
    if before is None or before.epoch != after.epoch or after.at <= before.at:
        return {}
    seconds = (after.at - before.at) / 1e6
    counted = {_key(one): (one.started, one.waited_us) for one in before.queues}
    rates = {}
    for one in after.queues:
        started, waited_us = counted.get(_key(one), (0, 0))
        if one.started >= started:  # else it was forgotten meanwhile, and counts from its own beginning
            rates[_key(one)] = _Rate((one.started - started) / seconds, max(0, one.waited_us - waited_us) / seconds)
    return rates


def _key(one: QueueStats) -> tuple[str, Priority, str]:
    return one.queue, one.priority, one.tenant_id
