"""A parsed cron expression: which wall-clock seconds match, and where the nearest ones are.

Wall time is what a clock on the wall shows, counted in seconds from its 1970-01-01 00:00, in no zone at all. Fields are
sets of small numbers, kept as the bits of an integer: the nearest member of a set is found by shifting.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from cron.limits import DAY_S

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_EPOCH_WEEKDAY = 4  # a Thursday; Sunday is 0
_EVERY_SEVENTH = sum(1 << day for day in range(1, 32, 7))  # days 1, 8, 15, 22 and 29 of a month
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Expression:
    """What matches. Bit n of a set stands for the value n.

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

    # --- the time of the day ------------------------------------------------------------------------------------------

    def _time_at_or_after(self, second_of_day: int) -> int | None:
        minute, second = divmod(second_of_day, 60)
        if self.minutes_of_day >> minute & 1 and (rest := self.seconds >> second):
            return second_of_day + _lowest(rest)
        rest = self.minutes_of_day >> minute + 1
        return (minute + 1 + _lowest(rest)) * 60 + _lowest(self.seconds) if rest else None

    def _time_at_or_before(self, second_of_day: int) -> int | None:
        minute, second = divmod(second_of_day, 60)
        if self.minutes_of_day >> minute & 1 and (rest := _up_to(self.seconds, second)):
            return minute * 60 + _highest(rest)
        rest = _up_to(self.minutes_of_day, minute - 1)
        return _highest(rest) * 60 + _highest(self.seconds) if rest else None

    # --- the day, counted from 1970-01-01 -----------------------------------------------------------------------------

    def _day_at_or_after(self, day: int) -> int:
        year, month, day_of_month = _civil(day)
        while True:
            if self.months >> month & 1:
                first = _first_day(year, month)
                days = self._matching_days(_length(year, month), _weekday(first))
                if rest := days >> day_of_month:
                    return first - 1 + day_of_month + _lowest(rest)
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
            day_of_month = 1

    def _day_at_or_before(self, day: int) -> int:
        year, month, day_of_month = _civil(day)
        while True:
            if self.months >> month & 1:
                first = _first_day(year, month)
                days = self._matching_days(_length(year, month), _weekday(first))
                if rest := _up_to(days, day_of_month):
                    return first - 1 + _highest(rest)
            year, month = (year, month - 1) if month > 1 else (year - 1, 12)
            day_of_month = 31

    def _matching_days(self, length: int, first_weekday: int) -> int:
        """The days that match in a month of this length that begins on this weekday, as bits 1 to `length`."""
        by_date = self.days | (1 << length if self.has_last_day else 0)
        first_week = (self.weekdays | self.weekdays << 7) >> first_weekday & 0b1111111
        by_weekday = first_week * _EVERY_SEVENTH
        matching = by_date & by_weekday if self.needs_both_days else by_date | by_weekday
        return _up_to(matching, length)


# --- sets as bits -----------------------------------------------------------------------------------------------------


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    return bits.bit_length() - 1


def _up_to(bits: int, place: int) -> int:
    """The members that are not above `place`, which may be -1."""
    return bits & (1 << place + 1) - 1


# --- the calendar -----------------------------------------------------------------------------------------------------


def _civil(day: int) -> tuple[int, int, int]:
    there = date.fromordinal(day + _EPOCH_ORDINAL)
    return there.year, there.month, there.day


def _first_day(year: int, month: int) -> int:
    return date(year, month, 1).toordinal() - _EPOCH_ORDINAL


def _length(year: int, month: int) -> int:
    is_leap_february = month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return _LENGTHS[month - 1] + is_leap_february


def _weekday(day: int) -> int:
    return (day + _EPOCH_WEEKDAY) % 7
