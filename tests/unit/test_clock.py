"""The clock of a process follows the system's, and never stands still or goes back."""

from __future__ import annotations

import pytest

from tidewheel import clock
from tidewheel.clock import SteadyClock

SECOND = 1_000_000
HOUR = 3_600 * SECOND


class System:
    """What the system's two clocks say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 1_000 * HOUR, 5 * SECOND
        monkeypatch.setattr(clock, "_wall_us", lambda: self.wall)
        monkeypatch.setattr(clock, "_monotonic_us", lambda: self.monotonic)

    def passes(self, microseconds: int) -> None:
        """Time passes."""
        self.wall += microseconds
        self.monotonic += microseconds


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    """The clocks of a machine."""
    return System(monkeypatch)


def test_it_follows_the_system_and_a_small_correction_does_not_turn_it_back(system: System) -> None:
    steady = SteadyClock()
    assert steady.now_us() == system.wall
    system.passes(SECOND)
    before = steady.now_us()
    system.wall -= SECOND // 2
    assert steady.now_us() == before
    system.passes(SECOND)
    assert steady.now_us() == before + SECOND


def test_a_clock_that_is_set_forward_is_followed_at_once(system: System) -> None:
    steady = SteadyClock()
    steady.now_us()
    system.wall += HOUR
    assert steady.now_us() == system.wall


def test_a_clock_that_is_set_back_is_waited_for_at_half_speed(system: System) -> None:
    steady = SteadyClock()
    begun = steady.now_us()
    system.wall -= HOUR
    for seconds in range(1, 7_200):
        system.passes(SECOND)
        now = steady.now_us()
        assert now == max(system.wall, begun + seconds * SECOND // 2)
    system.passes(2 * SECOND)
    assert steady.now_us() == system.wall


def test_however_often_it_is_asked_meanwhile(system: System) -> None:
    steady = SteadyClock()
    begun = steady.now_us()
    system.wall -= HOUR
    for _ in range(1_000):
        system.passes(1)
        steady.now_us()
    assert steady.now_us() == pytest.approx(begun + 500, abs=2)
