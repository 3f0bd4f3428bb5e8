"""Fire times against a scan that looks at every minute, and knows nothing of how they are really found.

The scan asks the standard library what a clock shows at each minute (or second) and applies the rules as they are
written in docs/CRON.md, one by one. Its expressions come with the sets that they stand for, so it has no parser.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cron.errors import InvalidSchedule
from cron.limits import DAY_S, SECOND_US, TEXT_MAX
from cron.schedule import Recurrence
from cron.wall_clock import CronPattern, FoldPolicy, GapPolicy, cron_pattern
from cron.zones import zone
from tests.cron_vectors import VECTORS, ZONES, us

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SOME, MANY, TEXTS = (
    settings(max_examples=examples, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
    for examples in (20, 100, 500)
)
MONTHS = ["jan", "Feb", "MAR", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
WEEKDAYS = ["sun", "Mon", "TUE", "wed", "thu", "fri", "sat"]


# --- expressions with the sets that they stand for --------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    text: str
    values: frozenset[int] = field(repr=False)

    @property
    def is_star(self) -> bool:
        return self.text.startswith("*")


@dataclass(frozen=True)
class Fields:
    second: Field | None
    minute: Field
    hour: Field
    day: Field
    month: Field
    weekday: Field

    @property
    def text(self) -> str:
        fields = (self.second, self.minute, self.hour, self.day, self.month, self.weekday)
        return " ".join(field.text for field in fields if field is not None)

    def matches_day(self, wall: datetime) -> bool:
        is_last = wall.day == calendar.monthrange(wall.year, wall.month)[1]
        by_date = wall.day in self.day.values or (is_last and 0 in self.day.values)
        by_weekday = wall.isoweekday() % 7 in self.weekday.values
        both = self.day.is_star or self.weekday.is_star
        return wall.month in self.month.values and (by_date and by_weekday if both else by_date or by_weekday)

    def matches(self, wall: datetime) -> bool:
        is_second = wall.second == 0 if self.second is None else wall.second in self.second.values
        is_time = is_second and wall.minute in self.minute.values and wall.hour in self.hour.values
        return is_time and self.matches_day(wall)


@st.composite
def elements(draw: st.DrawFn, first: int, last: int, names: list[str] | None = None) -> Field:
    def written(value: int) -> str:
        return names[value - first] if names and draw(st.booleans()) else str(value)

    low = draw(st.integers(first, last))
    high = draw(st.integers(low, last))
    step = draw(st.integers(1, last - first))
    match draw(st.sampled_from(["value", "value", "range", "stepped range", "stepped value", "star", "stepped star"])):
        case "value":
            return Field(written(low), frozenset({low}))
        case "range":
            return Field(f"{low}-{high}", frozenset(range(low, high + 1)))
        case "stepped range":
            return Field(f"{written(low)}-{high}/{step}", frozenset(range(low, high + 1, step)))
        case "stepped value":
            return Field(f"{low}/{step}", frozenset(range(low, last + 1, step)))
        case "star":
            return Field("*", frozenset(range(first, last + 1)))
        case _:
            return Field(f"*/{step}", frozenset(range(first, last + 1, step)))


def joined(parts: list[Field]) -> Field:
    return Field(",".join(part.text for part in parts), frozenset().union(*(part.values for part in parts)))


def fields(first: int, last: int, names: list[str] | None = None) -> st.SearchStrategy[Field]:
    return st.lists(elements(first, last, names), min_size=1, max_size=3).map(joined)


def star(first: int, last: int) -> st.SearchStrategy[Field]:
    return st.just(Field("*", frozenset(range(first, last + 1))))


SIXTIETHS = star(0, 59) | fields(0, 59)
NIGHT = st.sets(st.integers(0, 3), min_size=1)  # most clocks are changed in the first hours of a day
HOURS = star(0, 23) | fields(0, 23) | NIGHT.map(lambda some: Field(",".join(map(str, sorted(some))), frozenset(some)))
DAYS = star(1, 31) | fields(1, 31)
LAST_DAY = st.just(Field("L", frozenset({0})))  # 0 stands for the last day of a month, in this file alone
WEEKDAY = star(0, 6) | fields(0, 6, WEEKDAYS) | st.just(Field("7", frozenset({0})))
ANY = st.builds(
    Fields,
    second=st.none() | SIXTIETHS,
    minute=SIXTIETHS,
    hour=HOURS,
    day=DAYS | LAST_DAY | st.tuples(LAST_DAY, DAYS).map(list).map(joined),
    month=star(1, 12) | fields(1, 12, MONTHS),
    weekday=WEEKDAY,
)


def often(second: st.SearchStrategy[Field | None]) -> st.SearchStrategy[Fields]:
    """Expressions that fire on most days, so that a scan of a few days sees something."""
    often_day = star(1, 31) | st.just(Field("1-31", frozenset(range(1, 32))))
    return st.builds(Fields, second, SIXTIETHS, HOURS, often_day, star(1, 12), WEEKDAY)


# --- the scan ---------------------------------------------------------------------------------------------------------


@cache
def library_zone(name: str) -> ZoneInfo:
    """The same data, read by the standard library."""
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as source:
        return ZoneInfo.from_file(source, key=name)


def scanned(
    of: Fields, name: str, first: int, last: int, *, gap: GapPolicy, fold: FoldPolicy, margin: int
) -> list[int]:
    """All fires from `first` to `last`, in seconds. Clocks are watched from `margin` before until `margin` after."""
    tick = 60 if of.second is None else 1
    instants = range(first - first % 60 - margin, last + margin, tick)
    tz, unit = library_zone(name), timedelta(seconds=tick)
    walls = [datetime.fromtimestamp(instant, tz).replace(tzinfo=None) for instant in instants]
    if gap is GapPolicy.DEFAULT:
        gap = GapPolicy.SKIP if of.hour.is_star else GapPolicy.ONCE
    if fold is FoldPolicy.DEFAULT:
        fold = FoldPolicy.BOTH if of.hour.is_star else FoldPolicy.FIRST
    last_shown = {wall: instant for instant, wall in zip(instants, walls, strict=True)}
    seen: set[datetime] = set()
    fires: set[int] = set()
    expected = walls[0]
    for instant, wall in zip(instants, walls, strict=True):
        lost = [expected + unit * number for number in range((wall - expected) // unit)]
        for place, passed_over in enumerate(lost):
            if gap is not GapPolicy.SKIP and passed_over not in seen and of.matches(passed_over):
                fires.add(instant if gap is GapPolicy.ONCE else instant + place * tick)
        is_due = fold is FoldPolicy.BOTH or (
            wall not in seen if fold is FoldPolicy.FIRST else last_shown[wall] == instant
        )
        if is_due and of.matches(wall):
            fires.add(instant)
        seen.add(wall)
        expected = wall + unit
    return sorted(fire for fire in fires if first <= fire <= last)


@st.composite
def places(draw: st.DrawFn, names: list[str]) -> tuple[str, int]:
    """A zone, and an instant of 1973 to 2110 that is often near to a change of its clocks."""
    name = draw(st.sampled_from(names))
    since, until = us("1973-01-01T00:00Z") // SECOND_US, us("2110-01-01T00:00Z") // SECOND_US
    changes = [period.start for period in zone(name).onward(since) if since < period.start < until]
    near = st.builds(lambda at, away: at + away, st.sampled_from(changes), st.integers(-5 * 3600, 5 * 3600))
    return name, draw(near | st.integers(since, until) if changes else st.integers(since, until))


def pattern_of(
    of: Fields, name: str, gap: GapPolicy = GapPolicy.DEFAULT, fold: FoldPolicy = FoldPolicy.DEFAULT
) -> CronPattern:
    """The pattern of fields; an example whose day never comes is passed over, once it is known to be refused."""
    assume(len(of.text) <= TEXT_MAX)
    try:
        return cron_pattern(of.text, name, gap, fold)
    except InvalidSchedule as refused:
        assert "does not come in month" in refused.problem
        assume(False)
        raise


def agrees(of: Fields, name: str, first: int, last: int, gap: GapPolicy, fold: FoldPolicy, margin: int) -> None:
    recurrence = Recurrence(pattern_of(of, name, gap, fold))
    expected = scanned(of, name, first, last, gap=gap, fold=fold, margin=margin)
    after_us, until_us = (first - 1) * SECOND_US, last * SECOND_US
    assert [fire // SECOND_US for fire in recurrence.onward(after_us, until_us)] == expected
    assert [fire // SECOND_US for fire in recurrence.back(until_us, after_us)] == expected[::-1]
    assert recurrence.count(after_us, until_us) == len(expected)


GAPS, FOLDS = st.sampled_from(GapPolicy), st.sampled_from(FoldPolicy)
ODD = [
    "Pacific/Apia",
    "Africa/Casablanca",
    "America/St_Johns",
    "Africa/Cairo",
    "Asia/Gaza",
    "America/Nuuk",
    "Asia/Tehran",
]
ALL_ODD = [*ZONES, *ODD]


@MANY
@given(of=often(st.none()), place=places(ALL_ODD), gap=GAPS, fold=FOLDS)
def test_every_minute_of_a_day(of: Fields, place: tuple[str, int], gap: GapPolicy, fold: FoldPolicy) -> None:
    name, at = place
    agrees(of, name, at - DAY_S // 2, at + DAY_S // 2, gap, fold, margin=26 * 3600)


@SOME
@given(of=often(SIXTIETHS), place=places([name for name in ALL_ODD if name != "Pacific/Apia"]), gap=GAPS, fold=FOLDS)
def test_every_second_of_an_hour(of: Fields, place: tuple[str, int], gap: GapPolicy, fold: FoldPolicy) -> None:
    name, at = place
    agrees(of, name, at, at + 3600, gap, fold, margin=5 * 3600 // 2)


@MANY
@given(of=ANY, at=st.integers(us("1970-01-01T00:00Z"), us("2300-01-01T00:00Z")))
def test_every_day_until_the_first_that_matches(of: Fields, at: int) -> None:
    """However rare a date is: in UTC, where a day is a day."""
    pattern = pattern_of(of, "UTC")
    found = pattern.next_after(at)
    assert found is not None
    at_wall, found_wall = EPOCH + timedelta(microseconds=at), EPOCH + timedelta(microseconds=found)
    assert found > at
    assert of.matches(found_wall)
    day = at_wall.replace(hour=23, minute=59, second=59) + timedelta(days=1)
    while day.date() < found_wall.date():
        assert not of.matches_day(day), f"{day} was passed over"
        day += timedelta(days=1)
    assert pattern.previous_at_or_before(found) == found
    before = pattern.previous_at_or_before(found - 1)
    assert before is None or before <= at


@MANY
@given(of=ANY, place=places(ALL_ODD), gap=GAPS, fold=FOLDS)
def test_forward_and_backward_are_the_same_times(
    of: Fields, place: tuple[str, int], gap: GapPolicy, fold: FoldPolicy
) -> None:
    name, at = place
    recurrence = Recurrence(pattern_of(of, name, gap, fold))
    after_us = at * SECOND_US
    fires = list(islice(recurrence.onward(after_us), 30))
    assert all(earlier < later for earlier, later in zip([after_us, *fires], fires, strict=False))
    assert list(recurrence.back(fires[-1], after_us)) == fires[::-1]
    assert recurrence.count(after_us, fires[-1]) == len(fires)
    assert recurrence.count(after_us, fires[-1] - 1) == recurrence.count(fires[0], fires[-1]) == len(fires) - 1
    for fire in fires[:3]:
        assert recurrence.next_after(fire - 1) == recurrence.previous_at_or_before(fire) == fire


@TEXTS
@given(text=st.text(max_size=40) | st.text(alphabet="0123456789*/-,LlA@SUNsun \t", max_size=40))
def test_any_text_is_an_expression_or_is_refused(text: str) -> None:
    try:
        pattern = cron_pattern(text, "Europe/Paris")
    except InvalidSchedule as refused:
        assert refused.field
        assert refused.position is None or 0 <= refused.position <= len(text)
        return
    assert pattern.next_after(us("2026-01-01T00:00Z")) is not None


@pytest.mark.parametrize("name", ZONES)
@pytest.mark.parametrize("text", ["* * * * *", "*/20 1-3 * * *"])
def test_ten_thousand_answers_fed_back(name: str, text: str) -> None:
    """C04. From an hour before each of the vectors' change of clocks in the zone."""
    pattern = cron_pattern(text, name)
    starts = [us(vector["start"]) - 3600 * SECOND_US for vector in VECTORS if vector["tz"] == name]
    for start in starts:
        instant = start
        for _ in range(10_000 // len(starts) + 1):
            following = pattern.next_after(instant)
            assert following is not None
            assert following > instant
            instant = following
