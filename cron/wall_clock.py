"""Cron in a time zone: wall times that match become instants.

While the clocks are not touched, wall time is the instant plus an offset, and a search is one in plain numbers. So time
is taken period by period (`zones.Period`), and of each period it is said which wall times fire in it, and when:

    its own   what its clocks show; perhaps without what an earlier period showed, or what a later one will show again
    the gap   what was passed over when it began: never, all together at its start, or each as if nothing were changed

That is all there is to the change of clocks. Instants are microseconds outside, whole seconds inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakValueDictionary

from cron.expression import Expression
from cron.limits import SECOND_US
from cron.parser import parse
from cron.zones import Period, Zone, zone


class GapPolicy(StrEnum):
    """What becomes of wall times that no clock shows, because clocks were put forward over them."""

    DEFAULT = "default"  # SKIP if the hour field begins with `*`, ONCE otherwise
    ONCE = "once"  # all of a gap together run once, at the first instant after it
    SHIFT = "shift"  # each runs as long after the change as it would have been: 02:30 at 03:30
    SKIP = "skip"


class FoldPolicy(StrEnum):
    """What becomes of wall times that clocks show twice, because they were put back."""

    DEFAULT = "default"  # BOTH if the hour field begins with `*`, FIRST otherwise
    FIRST = "first"
    SECOND = "second"
    BOTH = "both"


class _Shown(NamedTuple):
    """Wall times from `first` to before `end`, which fire `offset` seconds earlier in UTC."""

    first: int
    end: int
    offset: int

    def fire_after(self, expression: Expression, instant: int) -> int | None:
        wall = expression.match_at_or_after(max(self.first, instant + 1 + self.offset))
        return wall - self.offset if wall < self.end else None

    def fire_at_or_before(self, expression: Expression, instant: int) -> int | None:
        wall = expression.match_at_or_before(min(self.end - 1, instant + self.offset))
        return wall - self.offset if wall >= self.first else None

    def fires_between(self, expression: Expression, first: int, end: int) -> int:
        return expression.count(max(self.first, first + self.offset), min(self.end, end + self.offset))


class _Lost(NamedTuple):
    """Wall times from `first` to before `end`, which fire together at one instant."""

    first: int
    end: int
    at: int

    def fire_after(self, expression: Expression, instant: int) -> int | None:
        return self.at if self.at > instant and self._has_match(expression) else None

    def fire_at_or_before(self, expression: Expression, instant: int) -> int | None:
        return self.at if self.at <= instant and self._has_match(expression) else None

    def _has_match(self, expression: Expression) -> bool:
        return expression.match_at_or_after(self.first) < self.end


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CronPattern:
    """An expression in a zone, with what it does when the clocks change."""

    expression: Expression
    zone: Zone
    gap: GapPolicy = GapPolicy.DEFAULT
    fold: FoldPolicy = FoldPolicy.DEFAULT

    def next_after(self, instant_us: int) -> int | None:
        """The first fire after the instant; None if there is none up to the end of 2399."""
        instant = instant_us // SECOND_US
        for period in self.zone.onward(instant):
            found = [part.fire_after(self.expression, instant) for part in self._parts(period)]
            if fires := [fire for fire in found if fire is not None]:
                return min(fires) * SECOND_US
        return None

    def previous_at_or_before(self, instant_us: int) -> int | None:
        """The last fire up to the instant; None if there is none from 1970 on."""
        instant = instant_us // SECOND_US
        for period in self.zone.back(instant):
            found = [part.fire_at_or_before(self.expression, instant) for part in self._parts(period)]
            if fires := [fire for fire in found if fire is not None]:
                return max(fires) * SECOND_US
        return None

    def count(self, after_us: int, until_us: int) -> int:
        """How many fires there are with `after_us < fire <= until_us`, without visiting each."""
        first, end = after_us // SECOND_US + 1, until_us // SECOND_US + 1
        periods = takewhile(lambda period: period.start < end, self.zone.onward(first))
        return sum(self._count_in(period, max(first, period.start), min(end, period.end)) for period in periods)

    def _count_in(self, period: Period, first: int, end: int) -> int:
        own = self._own(period)
        count = own.fires_between(self.expression, first, end)
        for part in self._gap(period):
            fire = part.fire_after(self.expression, first - 1)
            while fire is not None and fire < end:
                count += own.fire_after(self.expression, fire - 1) != fire
                fire = part.fire_after(self.expression, fire)
        return count

    def _parts(self, period: Period) -> list[_Shown | _Lost]:
        """What may fire in a period, if it matches."""
        return [self._own(period), *self._gap(period)]

    def _own(self, period: Period) -> _Shown:
        fold = self.fold
        if fold is FoldPolicy.DEFAULT:
            fold = FoldPolicy.BOTH if self.expression.is_every_hour else FoldPolicy.FIRST
        first, end = period.wall_start, period.wall_end
        if fold is FoldPolicy.FIRST:
            first = max(first, period.shown_before)
        elif fold is FoldPolicy.SECOND:
            end = min(end, period.shown_again)
        return _Shown(first, end, period.offset)

    def _gap(self, period: Period) -> tuple[_Shown | _Lost, ...]:
        first, end = period.shown_before, period.wall_start
        if first >= end:
            return ()
        gap = self.gap
        if gap is GapPolicy.DEFAULT:
            gap = GapPolicy.SKIP if self.expression.is_every_hour else GapPolicy.ONCE
        if gap is GapPolicy.ONCE:
            return (_Lost(first, end, period.start),)
        if gap is GapPolicy.SHIFT:
            return (_Shown(first, end, first - period.start),)
        return ()


_interned: WeakValueDictionary[tuple[str, str, GapPolicy, FoldPolicy], CronPattern] = WeakValueDictionary()


def cron_pattern(
    text: str, timezone: str = "UTC", gap: GapPolicy = GapPolicy.DEFAULT, fold: FoldPolicy = FoldPolicy.DEFAULT
) -> CronPattern:
    """The pattern of an expression in a zone. All who ask for the same share one object, while any of them keeps it.

    Raises InvalidSchedule for an expression or a zone that is none.
    """
    key = (text, timezone, gap, fold)
    pattern = _interned.get(key)
    if pattern is None:
        pattern = _interned[key] = CronPattern(parse(text), zone(timezone), gap, fold)
    return pattern
