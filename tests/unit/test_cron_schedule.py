"""Policies for changes of clocks, intervals, calendars, and what bounds a recurrence."""

from __future__ import annotations

import sys
import time
from itertools import islice

import pytest

from cron.errors import InvalidSchedule
from cron.limits import CALENDAR_MAX, DAY_S, EARLIEST_US, EVERY_US_MAX, JITTER_US_MAX, LATEST_US, SECOND_US
from cron.patterns import CalendarPattern, IntervalPattern, Pattern
from cron.schedule import Recurrence
from cron.wall_clock import FoldPolicy, GapPolicy, cron_pattern
from tests.cron_vectors import shown, us

MINUTE_US = 60 * SECOND_US
DAY_US = DAY_S * SECOND_US


def fires(pattern: Pattern, after: str, until: str) -> list[str]:
    """The fires of a pattern between two instants, found in both directions."""
    recurrence = Recurrence(pattern)
    forward = list(recurrence.onward(us(after), us(until)))
    assert recurrence.count(us(after), us(until)) == len(forward)
    assert list(recurrence.back(us(until), us(after))) == forward[::-1]
    return [shown(fire) for fire in forward]


@pytest.mark.parametrize(
    ("text", "gap", "expected"),
    [
        ("30 2 * * *", GapPolicy.ONCE, ["07:00"]),
        ("30 2 * * *", GapPolicy.SHIFT, ["07:30"]),
        ("30 2 * * *", GapPolicy.SKIP, []),
        ("0,30 2,3 * * *", GapPolicy.ONCE, ["07:00", "07:30"]),
        ("0,40 2,3 * * *", GapPolicy.SHIFT, ["07:00", "07:40"]),
        ("0 3 * * *", GapPolicy.SHIFT, ["07:00"]),
        ("15 2-3 * * *", GapPolicy.ONCE, ["07:00", "07:15"]),
        ("0 */2 * * *", GapPolicy.DEFAULT, ["05:00", "08:00"]),
        ("0 */2 * * *", GapPolicy.ONCE, ["05:00", "07:00", "08:00"]),
        ("45 */2 * * *", GapPolicy.SHIFT, ["05:45", "07:45", "08:45"]),
    ],
)
def test_the_hour_that_is_missing(text: str, gap: GapPolicy, expected: list[str]) -> None:
    """New York, 8 March 2026: after 01:59 (06:59Z) comes 03:00 (07:00Z)."""
    pattern = cron_pattern(text, "America/New_York", gap)
    found = fires(pattern, "2026-03-08T04:59Z", "2026-03-08T08:59Z")
    assert found == [f"2026-03-08T{time}:00Z" for time in expected]


def test_shifted_times_fall_between_those_that_were_shown() -> None:
    """Lord Howe Island, 4 October 2026: after 01:59 (15:29Z the day before) comes 02:30, half an hour is missing."""
    pattern = cron_pattern("20,40 2 * * *", "Australia/Lord_Howe", GapPolicy.SHIFT)
    found = fires(pattern, "2026-10-03T12:00Z", "2026-10-03T15:55Z")
    assert found == ["2026-10-03T15:40:00Z", "2026-10-03T15:50:00Z"]


@pytest.mark.parametrize(
    ("text", "fold", "expected"),
    [
        ("30 1 * * *", FoldPolicy.FIRST, ["05:30"]),
        ("30 1 * * *", FoldPolicy.SECOND, ["06:30"]),
        ("30 1 * * *", FoldPolicy.BOTH, ["05:30", "06:30"]),
        ("30 * * * *", FoldPolicy.DEFAULT, ["04:30", "05:30", "06:30", "07:30"]),
        ("30 * * * *", FoldPolicy.FIRST, ["04:30", "05:30", "07:30"]),
        ("30 * * * *", FoldPolicy.SECOND, ["04:30", "06:30", "07:30"]),
        ("0 2 * * *", FoldPolicy.SECOND, ["07:00"]),
    ],
)
def test_the_hour_that_comes_twice(text: str, fold: FoldPolicy, expected: list[str]) -> None:
    """New York, 1 November 2026: after 01:59 (05:59Z) comes 01:00 (06:00Z)."""
    pattern = cron_pattern(text, "America/New_York", fold=fold)
    found = fires(pattern, "2026-11-01T04:00Z", "2026-11-01T07:59Z")
    assert found == [f"2026-11-01T{time}:00Z" for time in expected]


def test_seconds_of_the_day_before_are_found_backward() -> None:
    found = fires(cron_pattern("15,45 30 2 * * *"), "2026-01-01T12:00Z", "2026-01-03T00:00Z")
    assert found == ["2026-01-02T02:30:15Z", "2026-01-02T02:30:45Z"]


def test_an_interval_is_a_grid_about_its_anchor() -> None:
    pattern = IntervalPattern(90 * SECOND_US, anchor_us=us("2026-01-01T00:00:10Z"))
    assert fires(pattern, "2026-01-01T00:00:10Z", "2026-01-01T00:04:40Z") == [
        "2026-01-01T00:01:40Z",
        "2026-01-01T00:03:10Z",
        "2026-01-01T00:04:40Z",
    ]
    assert fires(pattern, "2025-12-31T23:57:00Z", "2026-01-01T00:00:00Z") == [
        "2025-12-31T23:57:10Z",
        "2025-12-31T23:58:40Z",
    ]


def test_a_calendar_is_its_list() -> None:
    instants = (us("2026-01-01T00:00Z"), us("2026-01-01T00:00Z") + 1, us("2027-05-05T12:00Z"))
    recurrence = Recurrence(CalendarPattern(instants))
    assert tuple(recurrence.onward(instants[0] - 1)) == instants
    assert tuple(recurrence.back(LATEST_US)) == instants[::-1]
    assert recurrence.next_after(instants[-1]) is None
    assert recurrence.previous_at_or_before(instants[0] - 1) is None


PATTERNS: list[Pattern] = [
    cron_pattern("* * * * *"),
    cron_pattern("0 0 * * *", "Europe/Paris"),
    IntervalPattern(DAY_US),
    CalendarPattern(tuple(us("2026-03-01T00:00Z") + number * DAY_US for number in range(60))),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: type(pattern).__name__)
def test_the_start_counts_and_the_end_does_not(pattern: Pattern) -> None:
    first = pattern.next_after(us("2026-03-10T00:00Z"))
    last = pattern.previous_at_or_before(us("2026-03-20T00:00Z"))
    assert first is not None
    assert last is not None
    recurrence = Recurrence(pattern, start_us=first, end_us=last)
    times = list(recurrence.onward(EARLIEST_US - 1))
    assert times[0] == first == recurrence.next_after(first - 1) == recurrence.previous_at_or_before(first)
    assert times[-1] == pattern.previous_at_or_before(last - 1) == recurrence.previous_at_or_before(LATEST_US)
    assert recurrence.previous_at_or_before(first - 1) is None
    assert recurrence.next_after(times[-1]) is None
    assert list(recurrence.back(LATEST_US)) == times[::-1]
    assert recurrence.count(EARLIEST_US - 1, LATEST_US) == recurrence.count(first - 1, last) == len(times)
    assert recurrence.count(first, times[-1] - 1) == len(times) - 2
    assert recurrence.count(last, first) == recurrence.count(LATEST_US, 10**30) == recurrence.count(-(10**30), 0) == 0


@pytest.mark.parametrize("pattern", PATTERNS[:3], ids=lambda pattern: type(pattern).__name__)
def test_nothing_fires_before_1970_or_after_2399(pattern: Pattern) -> None:
    recurrence = Recurrence(pattern)
    for instant in (-(10**30), -1):
        assert recurrence.previous_at_or_before(instant) is None
        first = recurrence.next_after(instant)
        assert first is not None
        assert EARLIEST_US <= first < EARLIEST_US + DAY_US
    for instant in (LATEST_US - 1, LATEST_US, 10**30):
        assert recurrence.next_after(instant) is None
        last = recurrence.previous_at_or_before(instant)
        assert last is not None
        assert LATEST_US - 2 * DAY_US < last < LATEST_US


@pytest.mark.parametrize(
    "text", ["0 0 29 2 *", "* * 29 2 *", "0 */23 29 2 */6", "0 0 29 2 */6", "59 59 23 31 12 *", "30 2 8-14 3 *"]
)
@pytest.mark.parametrize("gap", GapPolicy)
@pytest.mark.parametrize("fold", FoldPolicy)
def test_rare_dates_are_found_until_the_end(text: str, gap: GapPolicy, fold: FoldPolicy) -> None:
    recurrence = Recurrence(cron_pattern(text, "America/New_York", gap, fold))
    times = list(islice(recurrence.onward(us("2000-03-01T00:00Z")), 3_000))
    assert len(times) > 10
    assert list(islice(recurrence.back(times[-1]), len(times))) == times[::-1]
    assert recurrence.count(us("2000-03-01T00:00Z"), times[-1]) == len(times)
    assert recurrence.next_after(LATEST_US - 1) is None


def test_a_year_of_seconds_is_counted_but_not_visited() -> None:
    recurrence = Recurrence(cron_pattern("* * * * * *", "Europe/Paris"))
    now = us("2027-01-01T00:00:30Z")
    assert recurrence.count(us("2026-01-01T00:00:30Z"), now) == 365 * DAY_S
    assert list(islice(recurrence.back(now), 3)) == [now, now - SECOND_US, now - 2 * SECOND_US]


def test_a_run_is_late_by_its_jitter_and_always_by_the_same() -> None:
    recurrence = Recurrence(cron_pattern("* * * * *"), jitter_us=30 * SECOND_US)
    nominal = list(islice(recurrence.onward(us("2026-01-01T00:00Z")), 2_000))
    delays = [recurrence.run_at("report", time) - time for time in nominal]
    assert delays == [recurrence.run_at("report", time) - time for time in nominal]
    assert delays != [recurrence.run_at("other", time) - time for time in nominal]
    assert min(delays) >= 0
    assert max(delays) <= 30 * SECOND_US
    for tenth in range(10):  # of 2,000 evenly spread ones, 200 ± 75 fall in each tenth
        assert 125 < sum(tenth * 3 * SECOND_US <= delay < (tenth + 1) * 3 * SECOND_US for delay in delays) < 275
    assert recurrence.run_at("report", us("2026-01-01T00:00Z")) == 1_767_225_622_462_175
    assert Recurrence(recurrence.pattern).run_at("report", nominal[0]) == nominal[0]


NEW_YEAR = us("2026-01-01T00:00Z")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("every", lambda: IntervalPattern(SECOND_US - 1)),
        ("every", lambda: IntervalPattern(0)),
        ("every", lambda: IntervalPattern(EVERY_US_MAX + 1)),
        ("anchor", lambda: IntervalPattern(SECOND_US, anchor_us=-1)),
        ("anchor", lambda: IntervalPattern(SECOND_US, anchor_us=LATEST_US)),
        ("calendar", lambda: CalendarPattern(())),
        ("calendar", lambda: CalendarPattern((2, 1))),
        ("calendar", lambda: CalendarPattern((1, 1))),
        ("calendar", lambda: CalendarPattern((-1, 1))),
        ("calendar", lambda: CalendarPattern((1, LATEST_US))),
        ("calendar", lambda: CalendarPattern(tuple(range(CALENDAR_MAX + 1)))),
        ("start", lambda: Recurrence(PATTERNS[0], start_us=-1)),
        ("start", lambda: Recurrence(PATTERNS[0], start_us=LATEST_US)),
        ("end", lambda: Recurrence(PATTERNS[0], start_us=NEW_YEAR, end_us=NEW_YEAR)),
        ("end", lambda: Recurrence(PATTERNS[0], end_us=LATEST_US + 1)),
        ("jitter", lambda: Recurrence(PATTERNS[0], jitter_us=-1)),
        ("jitter", lambda: Recurrence(PATTERNS[0], jitter_us=JITTER_US_MAX + 1)),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(InvalidSchedule) as refused:
        wrong()
    assert refused.value.field == field
    assert refused.value.allowed


def test_the_zone_of_the_host_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = cron_pattern("30 1 * * *")
    expected = fires(pattern, "2022-10-29T12:00Z", "2022-11-02T00:00Z")
    monkeypatch.setenv("TZ", "Europe/London")
    time.tzset()
    try:
        assert fires(pattern, "2022-10-29T12:00Z", "2022-11-02T00:00Z") == expected
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_schedule_is_small_beside_what_it_shares() -> None:
    one, other = (Recurrence(cron_pattern("0 9 * * MON-FRI", "Europe/Paris"), jitter_us=jitter) for jitter in (0, 1))
    assert one.pattern is other.pattern
    assert sys.getsizeof(one) <= 64
