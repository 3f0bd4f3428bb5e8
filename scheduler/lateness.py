"""How late things are done that the clock causes: counted by the shards' thread, read from any other."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LAST_MAX = 1_000  # instants of which the quantiles tell
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3_600.0)


class Histogram(NamedTuple):
    """How many were at most so late, by the bounds of BOUNDS_S, not added up; the last count is of those beyond."""

    counts: Sequence[int]
    sum_us: int


class Lateness:
    """Of everything that was noted since the process began, and of the last ones."""

    def __init__(self) -> None:
        self._bounds_us = [round(bound * 1_000_000) for bound in BOUNDS_S]
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_us = 0
        self._last_us: deque[int] = deque(maxlen=LAST_MAX)

    def note(self, late_us: int) -> None:
        """One was so late. A clock that was set back makes it punctual."""
        late_us = max(0, late_us)
        self._counts[bisect_left(self._bounds_us, late_us)] += 1
        self._sum_us += late_us
        self._last_us.append(late_us)

    def histogram(self) -> Histogram:
        """All of them. Safe from any thread: of copies."""
        return Histogram(self._counts.copy(), self._sum_us)

    def last_us(self) -> list[int]:
        """How late the last ones were, the oldest first. Safe from any thread: of a copy."""
        return list(self._last_us.copy())


class TimerLateness(NamedTuple):
    """Of tasks until they were released, and of nominal times until their run was decided."""

    releases: Lateness
    fires: Lateness
