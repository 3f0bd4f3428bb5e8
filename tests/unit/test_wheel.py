"""Where tasks wait in the wheel, and that each slot is read in time, whole, and once in a rotation."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from scheduler.core.wheel import Place, Wheel
from schemas.wheel import MINUTE_US, SECOND_US, WheelShape

DAY_US = 24 * 60 * MINUTE_US
START = 1_800_000_000 * SECOND_US
SMALL = WheelShape(widths_us=(4, 16, 64), leads_us=(4, 4, 4), slots=4)


def opened(wheel: Wheel, now: int) -> list[Place]:
    """What is to be read at `now`, as if all of it was read at once."""
    wheel.close_due(now)
    places = []
    while (place := wheel.next_to_open()) is not None:
        wheel.has_opened(place)
        places.append(place)
    return places


def test_what_is_due_soon_stays_in_memory_and_the_rest_has_the_finest_slot_in_reach() -> None:
    wheel = Wheel(WheelShape(), START)
    assert wheel.place_for(START + 20 * SECOND_US) is None
    levels = {}
    for name, ahead in (("10 min", 10), ("2 h", 120), ("2 days", 2_880), ("30 days", 43_200), ("10 years", 5_256_000)):
        place = wheel.place_for(START + ahead * MINUTE_US)
        assert place is not None
        levels[name] = place.level
    assert levels == {"10 min": 0, "2 h": 1, "2 days": 2, "30 days": 3, "10 years": 3}


@pytest.mark.parametrize("shape", [SMALL, WheelShape()])
@pytest.mark.parametrize("seed", range(20))
def test_a_task_is_back_in_memory_before_it_is_due_however_often_it_moved(shape: WheelShape, seed: int) -> None:
    rng = Random(seed)
    scale = shape.widths_us[0]
    now = START
    wheel = Wheel(shape, now)
    slots: dict[tuple[int, int], list[int]] = {}
    memory: set[int] = set()

    def put(due_at: int) -> None:
        place = wheel.place_for(due_at)
        if place is None:
            memory.add(due_at)
        else:
            slots.setdefault((place.level, wheel.slot_of(place)), []).append(due_at)

    dues = [now + rng.randrange(200 * scale) * rng.choice((1, 1, 4)) for _ in range(200)]
    for due_at in dues:
        put(due_at)
    while now < max(dues):
        now += rng.choice((1, scale // 4, scale, 3 * scale))
        for place in opened_lazily(wheel, now):
            for due_at in slots.pop((place.level, wheel.slot_of(place)), []):
                assert not wheel.is_late(due_at, place)
                put(due_at)
            wheel.has_opened(place)
        overdue = [due_at for due_at in dues if due_at <= now]
        assert memory.issuperset(overdue), f"seed {seed}"
        assert wheel.read_until() > now
    assert sorted(memory) == sorted(set(dues))


def opened_lazily(wheel: Wheel, now: int) -> Iterator[Place]:
    wheel.close_due(now)
    while (place := wheel.next_to_open()) is not None:
        yield place


def test_coarse_slots_are_read_first_since_they_feed_the_finer_ones() -> None:
    wheel = Wheel(SMALL, 0)
    levels = [place.level for place in opened(wheel, 70)]
    assert levels == sorted(levels, reverse=True)


def test_after_an_outage_each_slot_is_read_once_and_the_hands_leap() -> None:
    wheel = Wheel(WheelShape(), START)
    places = opened(wheel, START + 365 * DAY_US)
    slots = [(place.level, wheel.slot_of(place)) for place in places]
    assert len(set(slots)) == len(slots) == 16 * 4
    assert wheel.was_opened(START + 365 * DAY_US)
    assert opened(wheel, START + 365 * DAY_US) == []


def test_what_was_overdue_in_an_outage_is_not_taken_for_late() -> None:
    wheel = Wheel(SMALL, 0)
    due_at = 17
    place = wheel.place_for(due_at)
    assert place is not None
    wheel.close_due(10_000)
    met = [p for p in drain(wheel) if p.level == place.level and wheel.slot_of(p) == wheel.slot_of(place)]
    assert [wheel.is_late(due_at, p) for p in met] == [False]


def drain(wheel: Wheel) -> list[Place]:
    places = []
    while (place := wheel.next_to_open()) is not None:
        wheel.has_opened(place)
        places.append(place)
    return places


def test_a_clock_that_was_set_back_opens_nothing_again() -> None:
    wheel = Wheel(WheelShape(), START)
    opened(wheel, START + 10 * MINUTE_US)
    before = [(hand.closed, hand.opened) for hand in wheel.hands]
    assert opened(wheel, START) == []
    assert [(hand.closed, hand.opened) for hand in wheel.hands] == before


def test_a_wheel_goes_on_where_its_marks_say() -> None:
    wheel = Wheel(WheelShape(), START)
    for ahead in (5, 50, 500, 5_000):
        wheel.note_parked(wheel.place_for(START + ahead * MINUTE_US))  # type: ignore[arg-type]
    opened(wheel, START + 7 * MINUTE_US)
    wheel.has_read(Place(0, 3), 17)
    another = Wheel(WheelShape(), START + DAY_US)
    another.resume(wheel.marks())
    assert another.marks() == wheel.marks()
    assert sorted(another.waiting()) == sorted(wheel.waiting())


@pytest.mark.parametrize(
    ("widths", "leads", "slots", "message"),
    [
        ((), (), 4, "at least one level"),
        ((4,), (1,), 1, "at least two slots"),
        ((4, 15), (1, 1), 4, "no multiple"),
        ((4, 4), (1, 1), 4, "no multiple"),
        ((4, 16), (1, 0), 4, "before its window begins"),
        ((4, 16), (1, 2), 4, "does not reach"),
        ((4, 32), (1, 1), 4, "does not reach"),
    ],
)
def test_a_wheel_that_would_lose_or_delay_tasks_is_refused(
    widths: tuple[int, ...], leads: tuple[int, ...], slots: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WheelShape(widths_us=widths, leads_us=leads, slots=slots)
