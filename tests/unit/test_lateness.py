"""How late things were: counted by bounds, and the last ones kept."""

from __future__ import annotations

from scheduler.lateness import BOUNDS_S, LAST_MAX, Lateness


def test_each_is_counted_below_the_first_bound_that_it_does_not_exceed() -> None:
    lateness = Lateness()
    for late_us in (0, 1_000, 1_001, 3_600_000_001):
        lateness.note(late_us)
    counts, sum_us = lateness.histogram()
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert len(counts) == len(BOUNDS_S) + 1
    assert sum_us == 3_600_002_002


def test_a_clock_that_was_set_back_makes_it_punctual() -> None:
    lateness = Lateness()
    lateness.note(-5)
    assert lateness.histogram().sum_us == 0
    assert lateness.last_us() == [0]


def test_only_the_last_ones_are_kept() -> None:
    lateness = Lateness()
    for late_us in range(LAST_MAX + 10):
        lateness.note(late_us)
    assert lateness.last_us() == list(range(10, LAST_MAX + 10))
