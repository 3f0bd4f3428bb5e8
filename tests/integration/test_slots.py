"""The slots of a shard's wheel over a log whose buffer may be full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.core.shard import Shard, ShardSettings
from scheduler.ports import Entry, OnAck
from scheduler.slots import Slots
from schemas.codec import Codec
from schemas.errors import Retriable
from schemas.messages import TaskReleased
from schemas.wheel import MINUTE_US
from tests.cases.shard_stage import START, ShardStage

TURNS = 20  # of the loop, for what is on its way


class Full:
    """A log that takes nothing for a while."""

    def __init__(self, log: LocalLog) -> None:
        self._log = log
        self.is_full = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Send entries, or not."""
        if self.is_full:
            raise Retriable("the buffer is full")
        self._log.append(entries, on_ack)


@pytest.fixture
def log() -> Iterator[Full]:
    storage = SqliteLogStorage(":memory:")
    broker = LocalBroker(storage, embedded_catalog(1))
    yield Full(broker.connect(commits=True))
    broker.close()
    storage.close()


def turned(slots: Slots, log: Full, now: int) -> None:
    """As the loop turns: what is to be read comes before what is to be written."""
    for _ in range(TURNS):
        log.poll(0)
        slots.read(now)
        slots.park(now)


def test_a_record_that_found_no_room_is_not_written_to_a_slot_that_was_closed_meanwhile(log: Full) -> None:
    at = ShardStage(Shard(0, ShardSettings(), Random(1), START))
    slots = Slots(log, Codec.builtin(), at.shard)
    due_at = START + MINUTE_US  # in the first window that is open
    at.submit("a", scheduled_at=due_at)
    turned(slots, log, START)
    log.is_full = False
    turned(slots, log, due_at - 1)
    released = at.shard.fire_timers(due_at).events
    assert [(event.entity_id, type(event.body)) for event in released] == [("a", TaskReleased)]


def test_a_record_that_found_no_room_is_written_when_there_is_some(log: Full) -> None:
    at = ShardStage(Shard(0, ShardSettings(), Random(1), START))
    slots = Slots(log, Codec.builtin(), at.shard)
    at.submit("a", scheduled_at=START + 60 * MINUTE_US)
    turned(slots, log, START)
    assert at.shard.known("a") is at.task("a") and slots.next_at(START) is not None
    log.is_full = False
    turned(slots, log, START)
    assert "a" not in at.shard.state.tasks
    assert [level for level, _, _ in at.shard.parking.wheel.waiting()] == [1]
    assert slots.next_at(START) is None
