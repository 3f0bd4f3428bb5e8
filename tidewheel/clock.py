"""The clock of a process."""

from __future__ import annotations

import time

STEP_US = 1_000_000  # a difference beyond this is a clock that was set, not drift


class SteadyClock:
    """Wall time that runs with the monotonic clock, so that small corrections of the system's clock never turn it back.

    When the system's clock was set by more than a second, it follows: forward at once, backward by running at half
    speed until the other has come up. It never stands still: timers, heartbeats and health go by it.
    """

    def __init__(self) -> None:
        self._offset_us = _wall_us() - _monotonic_us()
        self._latest = self._latest_monotonic = 0

    def now_us(self) -> int:
        """Microseconds of Unix time; never less than what it said before."""
        monotonic, wall = _monotonic_us(), _wall_us()
        if abs(wall - monotonic - self._offset_us) > STEP_US:
            self._offset_us = wall - monotonic
        least = self._latest + max(0, monotonic - self._latest_monotonic) // 2
        if least > self._latest or monotonic + self._offset_us > self._latest:
            self._latest, self._latest_monotonic = max(monotonic + self._offset_us, least), monotonic
        return self._latest


def _wall_us() -> int:
    return time.time_ns() // 1000


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
