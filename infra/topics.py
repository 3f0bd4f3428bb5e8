"""The topics as values: how many partitions each has, whether it is on disk, when readers see it, how much is kept.

Rule of the embedded engine: inputs and events are durable; whatever a shard derives again from its state (ready
records, signals, replies) lives in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from schemas.errors import Fatal
from schemas.topics import REPLIES, TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS, WORKER_SIGNALS

READY_PREFIX = "ready."
READY_PARTITIONS = 4  # workers of a queue that can share one priority in the embedded engine
REPLY_PARTITIONS = 4  # gateways in one process
EVENT_RETENTION_MS = 7 * 86_400_000  # a week of history for whoever reads the events again

TAIL_RECORDS_MAX = 16_384  # of a durable partition in memory, for readers a little behind; the rest is on disk
TAIL_BYTES_MAX = 8 * 1024 * 1024
VOLATILE_RECORDS_MAX = 65_536  # far above what the window of a dispatcher lets out
VOLATILE_BYTES_MAX = 64 * 1024 * 1024


class Visibility(StrEnum):
    """When readers of the same process see a record."""

    AT_ONCE = "at_once"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """What a topic is. With `is_prefix`, `name` begins the names of all topics of the kind.

    `records_max` and `bytes_max` bound what memory holds of one partition: of a durable one the rest is read from
    disk, of a volatile one the oldest records are dropped. `retention_ms` is how long records of a durable topic stay
    after their owner declared them unneeded.
    """

    name: str
    partitions: int
    is_durable: bool
    visibility: Visibility = Visibility.AT_ONCE
    records_max: int = TAIL_RECORDS_MAX
    bytes_max: int = TAIL_BYTES_MAX
    retention_ms: int = 0
    is_prefix: bool = False


class TopicCatalog:
    """Finds the specification of a topic by its name."""

    def __init__(self, specs: Iterable[TopicSpec]) -> None:
        self._specs = tuple(specs)
        self._exact = {spec.name: spec for spec in self._specs if not spec.is_prefix}
        self._prefixes = tuple(spec for spec in self._specs if spec.is_prefix)

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


def embedded_catalog(
    shards: int, *, ready_partitions: int = READY_PARTITIONS, event_retention_ms: int = EVENT_RETENTION_MS
) -> TopicCatalog:
    """The topics of the embedded engine with `shards` shards.

    Inputs are seen at once: what is decided on them goes to the same file behind them. Events are seen when they are
    committed: the view and the state, which follow from them, are other files, and must never be ahead of the log.
    """
    if shards < 1:
        raise ValueError(f"shards: {shards} is not allowed; at least 1")
    return TopicCatalog(
        (
            TopicSpec(TASK_REQUESTS, shards, is_durable=True),
            TopicSpec(TASK_REPORTS, shards, is_durable=True),
            TopicSpec(
                TASK_EVENTS,
                shards,
                is_durable=True,
                visibility=Visibility.COMMITTED,
                retention_ms=event_retention_ms,
            ),
            _volatile(READY_PREFIX, ready_partitions, is_prefix=True),
            _volatile(WORKER_SIGNALS, 1),
            _volatile(REPLIES, REPLY_PARTITIONS),
        )
    )


def _volatile(name: str, partitions: int, *, is_prefix: bool = False) -> TopicSpec:
    return TopicSpec(
        name,
        partitions,
        is_durable=False,
        records_max=VOLATILE_RECORDS_MAX,
        bytes_max=VOLATILE_BYTES_MAX,
        is_prefix=is_prefix,
    )
