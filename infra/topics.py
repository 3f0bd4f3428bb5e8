"""The topics as values: how many partitions each has, how they are kept, when readers see them. For both engines.

Rule of the embedded engine: inputs and events are durable; whatever a shard derives again from its state (ready
records, signals, replies, invalid requests) lives in memory. On brokers all of it is on disk, for a time that suits
its use: `TopicSpec.settings`, by the names that brokers give them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.errors import Fatal
from schemas.topics import (
    POLICIES,
    REPLIES,
    SHARD_MESSAGES,
    SHARD_STATE,
    SHARD_STATS,
    TASK_EVENTS,
    TASK_REPORTS,
    TASK_REQUESTS,
    TASK_REQUESTS_INVALID,
    WORKER_SIGNALS,
    delay_topic,
)
from schemas.wheel import WheelShape

READY_PREFIX = "ready."
READY_PARTITIONS = 4  # workers of a queue that can share one priority
REPLY_PARTITIONS = 4  # gateways in one process
EVENT_RETENTION_MS = 7 * 86_400_000  # a week of history for whoever reads the events again

TAIL_RECORDS_MAX = 16_384  # of a durable partition in memory, for readers a little behind; the rest is on disk
TAIL_BYTES_MAX = 8 * 1024 * 1024
SLOT_RECORDS_MAX = 64  # of a slot of the wheel: what is written there is read much later
SLOT_BYTES_MAX = 64 * 1024
SLOT_SEGMENT_BYTES = 32 * 1024 * 1024  # only whole segments go: what was read takes no more room than that
VOLATILE_RECORDS_MAX = 65_536  # far above what the window of a dispatcher lets out
VOLATILE_BYTES_MAX = 64 * 1024 * 1024
INVALID_RECORDS_MAX = 1_000  # for a look at what went wrong; the events have all of them
INVALID_BYTES_MAX = 8 * 1024 * 1024

CLUSTER_REPLY_PARTITIONS = 64  # API processes that rarely read each other's replies
CLUSTER_SHARDS = 8  # one machine; 64 in a cluster
RECORD_BYTES_MAX = 1024 * 1024  # of a request; also what clients in other languages send at most by default
ENVELOPE_BYTES = 64 * 1024  # what an event may add to the request or report that it carries
DEFAULT_WHEEL = WheelShape()
_DAY_MS = 86_400_000
INPUT_RETENTION_MS = 7 * _DAY_MS  # a request that no scheduler has read for so long is lost: the longest outage
READY_RETENTION_MS = 7 * _DAY_MS  # a queue without workers for so long
INVALID_RETENTION_MS = 30 * _DAY_MS  # people look at them
EFFECT_RETENTION_MS = 3_600_000  # of signals and replies, which nobody waits for after seconds
_EFFECT_SEGMENT_MS = 600_000  # only whole segments are removed: without it a quiet partition keeps them for a week
# A checkpoint topic must stay short, since every takeover reads all of it. A segment that is being written is never
# compacted: it ends after 10 minutes or 64 MiB. Tombstones stay for longer than any takeover takes to read.
_COMPACTION: Mapping[str, str] = {
    "segment.ms": "600000",
    "segment.bytes": str(64 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "3600000",
    "delete.retention.ms": "3600000",
}


class Visibility(StrEnum):
    """When readers of the same process see a record."""

    AT_ONCE = "at_once"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic is. With `is_prefix`, `name` begins the names of all topics of the kind.

    `records_max` and `bytes_max` bound what memory holds of one partition: of a durable one the rest is read from
    disk, of a volatile one the oldest records are dropped. `retention_ms` is how long records of a durable topic stay
    after their owner declared them unneeded. These are the embedded engine's; `replication` and `settings` (values by
    the broker's names) are those of a cluster. With `is_kept_until_trimmed` nothing but their owner removes records.
    """

    name: str
    partitions: int
    is_durable: bool
    visibility: Visibility = Visibility.AT_ONCE
    records_max: int = TAIL_RECORDS_MAX
    bytes_max: int = TAIL_BYTES_MAX
    retention_ms: int = 0
    is_prefix: bool = False
    is_kept_until_trimmed: bool = False
    replication: int = 1
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)


class TopicCatalog:
    """Finds the specification of a topic by its name."""

    def __init__(self, specs: Iterable[TopicSpec]) -> None:
        self._specs = tuple(specs)
        self._exact = {spec.name: spec for spec in self._specs if not spec.is_prefix}
        self._prefixes = tuple(spec for spec in self._specs if spec.is_prefix)

    def __iter__(self) -> Iterator[TopicSpec]:
        return iter(self._specs)

    @property
    def durable(self) -> tuple[TopicSpec, ...]:
        """The topics that are kept on disk."""
        return tuple(spec for spec in self._specs if spec.is_durable)

    def spec(self, topic: str) -> TopicSpec:
        """The specification of `topic`. Fatal: no rule knows the name."""
        found = self._exact.get(topic)
        if found is not None:
            return found
        for spec in self._prefixes:
            if topic.startswith(spec.name) and len(topic) > len(spec.name):
                return spec
        known = ", ".join(f"{spec.name}*" if spec.is_prefix else spec.name for spec in self._specs)
        raise Fatal(f"there is no topic {topic!r}; known are {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSizes:
    """What differs between clusters. ValueError names what is not allowed.

    `shards` is fixed for the life of a cluster. `min_insync` is how many copies must have a record before it counts
    as written; by default one less than there are copies, so that one broker may be down.
    """

    shards: int = CLUSTER_SHARDS
    ready_partitions: int = READY_PARTITIONS
    reply_partitions: int = CLUSTER_REPLY_PARTITIONS
    replication: int = 1
    min_insync: int | None = None
    event_retention_ms: int = EVENT_RETENTION_MS
    wheel: WheelShape = DEFAULT_WHEEL

    def __post_init__(self) -> None:
        for name in ("shards", "ready_partitions", "reply_partitions", "replication", "event_retention_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; at least 1")
        if self.min_insync is not None and not 1 <= self.min_insync <= self.replication:
            raise ValueError(
                f"min_insync: {self.min_insync} is not allowed; from 1 to the replication factor, {self.replication}"
            )


def embedded_catalog(
    shards: int, *, ready_partitions: int = READY_PARTITIONS, event_retention_ms: int = EVENT_RETENTION_MS
) -> TopicCatalog:
    """The topics of the embedded engine with `shards` shards."""
    sizes = ClusterSizes(
        shards=shards,
        ready_partitions=ready_partitions,
        reply_partitions=REPLY_PARTITIONS,
        event_retention_ms=event_retention_ms,
    )
    return TopicCatalog(_shared_topics(sizes))


def cluster_catalog(sizes: ClusterSizes) -> TopicCatalog:
    """The topics of a cluster of brokers."""
    state = TopicSpec(
        SHARD_STATE,
        sizes.shards,
        is_durable=True,
        replication=sizes.replication,
        settings=_settings(sizes, None, RECORD_BYTES_MAX + ENVELOPE_BYTES, _COMPACTION),
    )
    return TopicCatalog((*_shared_topics(sizes), state))


def _shared_topics(sizes: ClusterSizes) -> tuple[TopicSpec, ...]:
    """The topics of both engines.

    Inputs are seen at once: what is decided on them goes to the same file behind them. Events are seen when they are
    committed: the view and the state, which follow from them, are other files, and must never be ahead of the log.
    """
    request_bytes, event_bytes = RECORD_BYTES_MAX, RECORD_BYTES_MAX + ENVELOPE_BYTES
    of_inputs = _settings(sizes, INPUT_RETENTION_MS, request_bytes)
    of_events = _settings(sizes, sizes.event_retention_ms, event_bytes)
    of_ready = _settings(sizes, READY_RETENTION_MS, event_bytes)
    of_effects = _settings(sizes, EFFECT_RETENTION_MS, event_bytes, {"segment.ms": str(_EFFECT_SEGMENT_MS)})
    of_invalid = _settings(sizes, INVALID_RETENTION_MS, event_bytes)
    copies = sizes.replication
    events = TopicSpec(
        TASK_EVENTS,
        sizes.shards,
        is_durable=True,
        visibility=Visibility.COMMITTED,
        retention_ms=sizes.event_retention_ms,
        replication=copies,
        settings=of_events,
    )
    invalid = TopicSpec(
        TASK_REQUESTS_INVALID,
        1,
        is_durable=False,
        records_max=INVALID_RECORDS_MAX,
        bytes_max=INVALID_BYTES_MAX,
        replication=copies,
        settings=of_invalid,
    )
    return (
        TopicSpec(TASK_REQUESTS, sizes.shards, is_durable=True, replication=copies, settings=of_inputs),
        TopicSpec(TASK_REPORTS, sizes.shards, is_durable=True, replication=copies, settings=of_inputs),
        events,
        _volatile(READY_PREFIX, sizes.ready_partitions, copies, of_ready, is_prefix=True),
        _volatile(WORKER_SIGNALS, 1, copies, of_effects),
        _volatile(REPLIES, sizes.reply_partitions, copies, of_effects),
        _volatile(SHARD_MESSAGES, sizes.shards, copies, of_effects),
        invalid,
        _volatile(SHARD_STATS, 1, copies, _settings(sizes, None, event_bytes, _COMPACTION)),
        TopicSpec(
            POLICIES,
            1,
            is_durable=True,
            visibility=Visibility.COMMITTED,  # its end is the end of a record, so that who reads up to it knows all
            is_kept_until_trimmed=True,
            replication=copies,
            settings=_settings(sizes, None, RECORD_BYTES_MAX, _COMPACTION),
        ),
        *_wheel_topics(sizes),
    )


def _wheel_topics(sizes: ClusterSizes) -> Iterator[TopicSpec]:
    """The delay wheel, by level. Time removes nothing: a record is read when its task is due, whenever that is."""
    settings = _settings(sizes, -1, RECORD_BYTES_MAX + ENVELOPE_BYTES, {"segment.bytes": str(SLOT_SEGMENT_BYTES)})
    for level in sizes.wheel.levels:
        yield TopicSpec(
            delay_topic(level),
            sizes.shards * sizes.wheel.slots,
            is_durable=True,
            visibility=Visibility.COMMITTED,
            records_max=SLOT_RECORDS_MAX,
            bytes_max=SLOT_BYTES_MAX,
            is_kept_until_trimmed=True,
            replication=sizes.replication,
            settings=settings,
        )


def _settings(
    sizes: ClusterSizes, retention_ms: int | None, record_bytes: int, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The broker's settings of a topic; without a retention it is compacted."""
    min_insync = sizes.min_insync or max(1, sizes.replication - 1)
    settings = {
        "cleanup.policy": "compact" if retention_ms is None else "delete",
        "max.message.bytes": str(record_bytes),
        "min.insync.replicas": str(min_insync),
        "unclean.leader.election.enable": "false",  # a copy that is behind must not become the truth
        # Retention counts from the arrival: a producer with a wrong clock must not have its records removed at once.
        "message.timestamp.type": "LogAppendTime",
    }
    if retention_ms is not None:
        settings |= {"retention.ms": str(retention_ms), "retention.bytes": "-1"}
    return settings | dict(more or {})


def _volatile(
    name: str, partitions: int, replication: int, settings: Mapping[str, str], *, is_prefix: bool = False
) -> TopicSpec:
    return TopicSpec(
        name,
        partitions,
        is_durable=False,
        records_max=VOLATILE_RECORDS_MAX,
        bytes_max=VOLATILE_BYTES_MAX,
        is_prefix=is_prefix,
        replication=replication,
        settings=settings,
    )
