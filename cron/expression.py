"""A parsed cron expression: which wall-clock seconds match, and where the nearest ones are.

Wall time is what a clock on the wall shows, counted in seconds from its 1970-01-01 00:00, in no zone at all. Fields are
sets of small numbers, kept as the bits of an integer: the nearest member of a set is found by shifting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import takewhile

from cron.limits import DAY_S

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_EPOCH_WEEKDAY = 4  # a Thursday; Sunday is 0
_EVERY_SEVENTH = sum(1 << day for day in range(0, 29, 7))  # the 1st, 8th, 15th, 22nd and 29th of a month
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Expression:
    """What matches. Bit n of a set stands for the value n; of `days`, bit 0 is the first of a month.

    Raises nothing, and each search ends: `parse` lets only expressions through that match some day of some year, and
    the calendar comes round within 40 years.
    """

    text: str
    seconds: int
    minutes_of_day: int  # hours and minutes in one set of 1,440
    days: int
    has_last_day: bool  # `L`: also the last day of the month, whichever that is
    months: int
    weekdays: int  # Sunday is 0
    needs_both_days: bool  # day of month and day of week must match, not only one of them
    is_every_hour: bool  # the hour field begins with `*`: what counts is time that passes, not what the clock shows

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"

    @property
    def has_dates(self) -> bool:
        """Whether any date matches. A month's days follow from its length and first weekday, so these are all tried."""
        months = [month for month in range(1, 13) if self.months >> month & 1]
        lengths = {_LENGTHS[month - 1] for month in months} | ({29} if 2 in months else set())
        return any(self._matching_days(length, weekday) for length in lengths for weekday in range(7))

    def match_at_or_after(self, wall: int) -> int:
        """The first matching second of wall time that is not before `wall`."""
        day, second_of_day = divmod(wall, DAY_S)
        found = self._day_at_or_after(day)
        if found == day:
            if (time := self._time_at_or_after(second_of_day)) is not None:
                return day * DAY_S + time
            found = self._day_at_or_after(day + 1)
        return found * DAY_S + _lowest(self.minutes_of_day) * 60 + _lowest(self.seconds)

    def match_at_or_before(self, wall: int) -> int:
        """The last matching second of wall time that is not after `wall`."""
        day, second_of_day = divmod(wall, DAY_S)
        found = self._day_at_or_before(day)
        if found == day:
            if (time := self._time_at_or_before(second_of_day)) is not None:
                return day * DAY_S + time
            found = self._day_at_or_before(day - 1)
        return found * DAY_S + _highest(self.minutes_of_day) * 60 + _highest(self.seconds)

    def count(self, first: int, end: int) -> int:
        """How many seconds of wall time match from `first` to before `end`."""
        if first >= end:
            return 0
        first_day, first_time = divmod(first, DAY_S)
        end_day, end_time = divmod(end, DAY_S)
        of_whole_days = self._count_days(first_day, end_day) * self._count_times(DAY_S)
        begun = self._count_days(end_day, end_day + 1) * self._count_times(end_time)
        left_out = self._count_days(first_day, first_day + 1) * self._count_times(first_time)
        return of_whole_days + begun - left_out

    # --- the time of the day ------------------------------------------------------------------------------------------

    def _time_at_or_after(self, second_of_day: int) -> int | None:
        minute, second = divmod(second_of_day, 60)
        if self.minutes_of_day >> minute & 1 and (rest := _from(self.seconds, second)):
            return minute * 60 + _lowest(rest)
        rest = _from(self.minutes_of_day, minute + 1)
        return _lowest(rest) * 60 + _lowest(self.seconds) if rest else None

    def _time_at_or_before(self, second_of_day: int) -> int | None:
        minute, second = divmod(second_of_day, 60)
        if self.minutes_of_day >> minute & 1 and (rest := _below(self.seconds, second + 1)):
            return minute * 60 + _highest(rest)
        rest = _below(self.minutes_of_day, minute)
        return _highest(rest) * 60 + _highest(self.seconds) if rest else None

    def _count_times(self, second_of_day: int) -> int:
        """How many times of a day match before this one."""
        minute, second = divmod(second_of_day, 60)
        of_whole_minutes = _below(self.minutes_of_day, minute).bit_count() * self.seconds.bit_count()
        return of_whole_minutes + (self.minutes_of_day >> minute & 1) * _below(self.seconds, second).bit_count()

    # --- the day, counted from 1970-01-01 -----------------------------------------------------------------------------

    def _day_at_or_after(self, day: int) -> int:
        months = ((first, _from(days, day - first)) for first, days in self._months_from(day))
        return next(first + _lowest(days) for first, days in months if days)

    def _day_at_or_before(self, day: int) -> int:
        months = ((first, _below(days, day - first + 1)) for first, days in self._months_back_from(day))
        return next(first + _highest(days) for first, days in months if days)

    def _count_days(self, first_day: int, end_day: int) -> int:
        months = takewhile(lambda month: month[0] < end_day, self._months_from(first_day))
        return sum(_from(_below(days, end_day - first), first_day - first).bit_count() for first, days in months)

    def _months_from(self, day: int) -> Iterator[tuple[int, int]]:
        """The month of a day, and those after it: for each that may match its first day, and its days that do."""
        year, month = _month_of(day)
        while True:
            if self.months >> month & 1:
                yield self._month(year, month)
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)

    def _months_back_from(self, day: int) -> Iterator[tuple[int, int]]:
        """The month of a day, and those before it."""
        year, month = _month_of(day)
        while True:
            if self.months >> month & 1:
                yield self._month(year, month)
            year, month = (year, month - 1) if month > 1 else (year - 1, 12)

    def _month(self, year: int, month: int) -> tuple[int, int]:
        first = date(year, month, 1).toordinal() - _EPOCH_ORDINAL
        is_leap_february = month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return first, self._matching_days(_LENGTHS[month - 1] + is_leap_february, (first + _EPOCH_WEEKDAY) % 7)

    def _matching_days(self, length: int, first_weekday: int) -> int:
        """The days that match in a month of this length that begins on this weekday. Bit 0 is its first day."""
        by_date = self.days | (1 << length - 1 if self.has_last_day else 0)
        first_week = (self.weekdays | self.weekdays << 7) >> first_weekday & 0b1111111
        by_weekday = first_week * _EVERY_SEVENTH
        return _below(by_date & by_weekday if self.needs_both_days else by_date | by_weekday, length)


def _month_of(day: int) -> tuple[int, int]:
    there = date.fromordinal(day + _EPOCH_ORDINAL)
    return there.year, there.month


# --- sets as bits -----------------------------------------------------------------------------------------------------


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    return bits.bit_length() - 1


def _from(bits: int, place: int) -> int:
    """The members that are not below `place`, which may be negative."""
    return bits >> place << place if place > 0 else bits


def _below(bits: int, place: int) -> int:
    """The members that are below `place`."""
    return bits & (1 << place) - 1
