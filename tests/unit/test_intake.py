"""What waits in a worker: settled offsets, weights, and memory that stays bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.messages import Priority, ReadyTask
from tests.samples import minimal
from workers.intake import Intake, Progress, Recent, Waiting
from workers.registry import Handler
from workers.settings import WorkerSettings


def nothing() -> None: ...


HANDLER = Handler(nothing, name="t")


def waiting(number: int, priority: Priority = Priority.MEDIUM, progress: Progress | None = None) -> Waiting:
    ready = minimal(ReadyTask, task_id=f"t{number}", attempt=1, task_version=1, priority=priority)
    return Waiting(ready, HANDLER, progress or Progress(), number, number)


@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_no_position_is_beyond_an_open_record(order: list[int], left_open: set[int]) -> None:
    """C31: settled out of order, gaps in the offsets; the position follows the first that is open."""
    progress = Progress()
    offsets = [3 * number for number in range(12)]
    for offset in offsets:
        progress.take(offset)
    settled: set[int] = set()
    for number in order:
        if number not in left_open:
            progress.settle(offsets[number])
            settled.add(offsets[number])
        contiguous = [o for o in offsets if all(earlier in settled for earlier in offsets if earlier <= o)]
        assert progress.position == (contiguous[-1] + 1 if contiguous else None)
    assert progress.is_settled == (not left_open)


def test_priorities_share_the_slots_by_weight_and_none_starves() -> None:
    intake = Intake()
    for number in range(300):
        intake.put(waiting(number, list(Priority)[number % 3]))
    (lane,) = intake.lanes()
    counts = Counter(one.ready.priority for one in intake.pick(lane, 100))
    assert counts == {Priority.HIGH: 70, Priority.MEDIUM: 25, Priority.LOW: 5}


def test_a_high_task_is_next_however_many_low_ones_wait() -> None:
    """C27."""
    intake = Intake()
    for number in range(100):
        intake.put(waiting(number, Priority.LOW))
    (lane,) = intake.lanes()
    assert len(intake.pick(lane, 50)) == 50
    intake.put(waiting(1000, Priority.HIGH))
    assert [one.ready.task_id for one in intake.pick(lane, 1)] == ["t1000"]


def test_records_leave_the_intake_in_every_way_once() -> None:
    intake = Intake()
    mine, lost = Progress(), Progress()
    for number in range(6):
        intake.put(waiting(number, progress=lost if number == 5 else mine))
    assert (waits := intake.find(("t3", 1))) and waits.task_id == "t3"
    removed = intake.remove(("t3", 1))
    assert removed and removed.offset == 3
    assert intake.remove(("t3", 1)) is None
    intake.drop([lost])
    assert [one.offset for one in intake.pop_to_call_until(1)] == [0, 1]
    assert intake.call_at() == 2
    assert len(intake) == 2
    (lane,) = intake.lanes()
    assert [one.offset for one in intake.pick(lane, 3)] == [2, 4]
    assert intake.pick(lane, 1) == []
    assert intake.call_at() is None
    assert intake.lanes() == [] and len(intake) == 0
    intake.put(waiting(7, progress=mine))
    assert [one.offset for one in intake.pop_all()] == [7]
    assert intake.find(("t7", 1)) is None


def test_recent_keys_are_remembered_within_a_bound() -> None:
    recent: Recent[tuple[str, int], int] = Recent(10)
    for number in range(1000):
        recent.put(("t", number), number)
    assert all(recent.get(("t", number)) == number for number in range(990, 1000))
    assert sum(recent.get(("t", number)) is not None for number in range(1000)) <= 20
    assert recent.pop(("t", 999)) == 999
    assert recent.pop(("t", 999)) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", "a b"),
        ("queues", ()),
        ("queues", ("a", "a")),
        ("queues", ("a/b",)),
        ("slots", 0),
        ("threads", 0),
        ("grace_ms", -1),
        ("heartbeat_ms", 0),
    ],
)
def test_a_setting_that_is_not_allowed_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        WorkerSettings(**{"worker_id": "w", field: value})  # type: ignore[arg-type]
