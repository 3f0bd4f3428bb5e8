"""What the raw topics say after a benchmark of the Kafka engine: the only witness that no process can deceive."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.cluster import ClusterStage
from benchmarks.contract import NothingMeasured
from benchmarks.stage import WAIT_S
from schemas.codec import Codec
from schemas.errors import DecodeError
from schemas.messages import Event, ShardOpened, TaskStarted, TaskSubmitted, TaskSucceeded
from schemas.topics import TASK_EVENTS

QUIET_S = 2.0  # without an event: nothing more comes of itself
LOOK_S = 0.25
LOOK_AGAIN_S = 5.0  # a lost attempt is noticed by the silence of its worker

_codec = Codec.builtin()


@dataclass
class Audit:
    """The fold of all valid events. Instants are in microseconds; `void` events had a writer that was superseded."""

    due_at: dict[str, int] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    succeeded: set[str] = field(default_factory=set)
    early: int = 0
    void: int = 0
    decided_twice: int = 0

    def lost(self, acknowledged: Collection[str]) -> int:
        """How many of the acknowledged tasks have not succeeded."""
        return sum(task_id not in self.succeeded for task_id in acknowledged)

    def missing(self, acknowledged: Collection[str]) -> int:
        """How many of the acknowledged tasks were never started."""
        return sum(task_id not in self.starts for task_id in acknowledged)

    def again(self) -> int:
        """How many starts there were beyond the first of each task."""
        return self.starts.total() - len(self.starts)


def audit(stage: ClusterStage) -> Audit:
    """Read all events. Raises NothingMeasured: they cannot be read."""
    found = Audit()
    sources: Counter[tuple[str | None, int, int | None]] = Counter()
    for partition, event, is_valid in events_of(stage):
        if not is_valid:
            found.void += 1
            continue
        if event.source_offset is not None:
            sources[event.source_topic, partition, event.source_offset] += 1
        _fold(found, event)
    found.decided_twice = sum(count > 1 for count in sources.values())
    return found


def events_of(stage: ClusterStage) -> Iterator[tuple[int, Event, bool]]:
    """All events but openings: the partition, the event, and whether its writer had the shard."""
    epochs = Counter[int]()
    for record in stage.records(TASK_EVENTS):
        try:
            event = _codec.decode(record.value)
        except DecodeError as error:
            raise NothingMeasured(f"an event cannot be read: {error}") from error
        assert isinstance(event, Event)
        if isinstance(event.body, ShardOpened):
            epochs[record.partition] = max(epochs[record.partition], event.epoch)
        else:
            yield record.partition, event, event.epoch >= epochs[record.partition]


def _fold(found: Audit, event: Event) -> None:
    body, task_id = event.body, event.entity_id
    if isinstance(body, TaskSubmitted):
        found.due_at[task_id] = body.next_run_at
    elif isinstance(body, TaskStarted):
        found.starts[task_id] += 1
        found.early += body.started_at < found.due_at.get(task_id, 0)
    elif isinstance(body, TaskSucceeded):
        found.succeeded.add(task_id)


def settled(stage: ClusterStage, acknowledged: Mapping[int, str]) -> Audit:
    """Wait until all that was acknowledged has succeeded, or nothing more happens for long; then read the events."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        _wait_until_quiet(stage)
        found = audit(stage)
        if not found.lost(acknowledged.values()) or time.monotonic() > give_up_at:
            return found
        time.sleep(LOOK_AGAIN_S)


def _wait_until_quiet(stage: ClusterStage) -> None:
    give_up_at = time.monotonic() + WAIT_S
    with stage.log() as log:
        ends, since = stage.end_offsets(log), time.monotonic()
        while time.monotonic() < min(give_up_at, since + QUIET_S):
            time.sleep(LOOK_S)
            now = stage.end_offsets(log)
            if now != ends:
                ends, since = now, time.monotonic()
