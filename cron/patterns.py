"""Rules by which instants follow each other: intervals and calendars. Cron, the third, is in `cron.wall_clock`.

Instants are microseconds of Unix time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from cron.errors import InvalidSchedule
from cron.limits import CALENDAR_MAX, EARLIEST_US, EVERY_US_MAX, EVERY_US_MIN, LATEST_US


class Pattern(Protocol):
    """A strictly increasing sequence of instants, which may be asked from any point of time."""

    def next_after(self, instant_us: int) -> int | None:
        """The first instant that is later; None if there is none."""

    def previous_at_or_before(self, instant_us: int) -> int | None:
        """The last instant that is not later; None if there is none."""

    def count(self, after_us: int, until_us: int) -> int:
        """How many there are with `after_us < instant <= until_us`; not by visiting each."""


@dataclass(frozen=True, slots=True)
class IntervalPattern:
    """Every so often: a grid with a line at the anchor, without beginning or end. Raises InvalidSchedule."""

    every_us: int
    anchor_us: int = EARLIEST_US

    def __post_init__(self) -> None:
        if not EVERY_US_MIN <= self.every_us <= EVERY_US_MAX:
            raise InvalidSchedule("every", f"is {self.every_us} µs", f"{EVERY_US_MIN} to {EVERY_US_MAX} µs")
        if not EARLIEST_US <= self.anchor_us < LATEST_US:
            raise InvalidSchedule("anchor", "is out of range", "an instant from 1970 to 2399")

    def next_after(self, instant_us: int) -> int | None:
        """The first line of the grid after the instant."""
        return instant_us + self.every_us - (instant_us - self.anchor_us) % self.every_us

    def previous_at_or_before(self, instant_us: int) -> int | None:
        """The last line of the grid up to the instant."""
        return instant_us - (instant_us - self.anchor_us) % self.every_us

    def count(self, after_us: int, until_us: int) -> int:
        """How many lines there are with `after_us < line <= until_us`."""
        return (until_us - self.anchor_us) // self.every_us - (after_us - self.anchor_us) // self.every_us


@dataclass(frozen=True, slots=True)
class CalendarPattern:
    """The instants of a list, which are in order and differ. Raises InvalidSchedule."""

    instants_us: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.instants_us) <= CALENDAR_MAX:
            raise InvalidSchedule("calendar", f"has {len(self.instants_us)} instants", f"1 to {CALENDAR_MAX}")
        if not all(earlier < later for earlier, later in pairwise(self.instants_us)):
            raise InvalidSchedule("calendar", "is not in order", "instants of which each is later than the one before")
        if self.instants_us[0] < EARLIEST_US or self.instants_us[-1] >= LATEST_US:
            raise InvalidSchedule("calendar", "is out of range", "instants from 1970 to 2399")

    def next_after(self, instant_us: int) -> int | None:
        """The first instant of the list after this one."""
        place = bisect_right(self.instants_us, instant_us)
        return self.instants_us[place] if place < len(self.instants_us) else None

    def previous_at_or_before(self, instant_us: int) -> int | None:
        """The last instant of the list up to this one."""
        place = bisect_right(self.instants_us, instant_us)
        return self.instants_us[place - 1] if place else None

    def count(self, after_us: int, until_us: int) -> int:
        """How many of the list there are with `after_us < instant <= until_us`."""
        return bisect_right(self.instants_us, until_us) - bisect_right(self.instants_us, after_us)
