"""C01 to C07: fire times when clocks change, on rare days, and by weekdays. What is computed, not what is run.

Chosen: a date that never comes is refused (C01). Lost and repeated hours, and the two day fields together, are as in
docs/CRON.md; the default is that of the vectors. All vectors are tests in tests/unit/test_cron_vectors.py, and 10,000
answers are fed back for each zone (C04) in tests/property/test_cron.py.
"""

from __future__ import annotations

from itertools import islice

import pytest

from cron.errors import InvalidSchedule
from cron.schedule import Recurrence
from cron.wall_clock import cron_pattern
from tests.cron_vectors import INVALID, VECTORS, shown, us

NEW_YORK, LOS_ANGELES = "America/New_York", "America/Los_Angeles"


def fires(text: str, zone: str, after: str, count: int) -> list[str]:
    """The next fires, without seconds."""
    recurrence = Recurrence(cron_pattern(text, zone))
    return [shown(fire).replace(":00Z", "Z") for fire in islice(recurrence.onward(us(after)), count)]


@pytest.mark.parametrize(
    "text",
    [*(entry["expr"] for entry in INVALID), *(vector["expr"] for vector in VECTORS if vector["class"] == "never")],
)
def test_c01_what_cannot_fire_is_refused_and_the_field_is_named(text: str) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        cron_pattern(text, "UTC")
    assert refused.value.field in str(refused.value)


def test_c01_a_leap_day_after_eight_years_is_found() -> None:
    assert fires("0 0 29 2 *", "UTC", "1996-03-01T00:00Z", 2) == ["2000-02-29T00:00Z", "2004-02-29T00:00Z"]
    assert fires("0 0 29 2 *", "UTC", "2096-03-01T00:00Z", 1) == ["2104-02-29T00:00Z"]


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("30 2 * * *", NEW_YORK, "2026-03-07T12:00Z", ["2026-03-08T07:00Z", "2026-03-09T06:30Z", "2026-03-10T06:30Z"]),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T12:00Z", ["2018-11-04T03:00Z", "2018-11-05T02:00Z"]),
        (
            "15 2 * * *",
            "Australia/Lord_Howe",
            "2026-10-02T00:00Z",
            ["2026-10-02T15:45Z", "2026-10-03T15:30Z", "2026-10-04T15:15Z"],
        ),
    ],
)
def test_c02_a_time_that_does_not_exist_runs_once_after_the_gap(
    text: str, zone: str, after: str, expected: list[str]
) -> None:
    assert fires(text, zone, after, len(expected)) == expected


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("30 1 * * *", "2026-10-31T12:00Z", ["2026-11-01T05:30Z", "2026-11-02T06:30Z"]),
        ("30 1 * * *", "2026-11-01T05:45Z", ["2026-11-02T06:30Z"]),
        ("30 1 * * *", "2026-11-01T06:10Z", ["2026-11-02T06:30Z"]),
        ("15 1 * * *", "2026-11-01T06:00Z", ["2026-11-02T06:15Z"]),
    ],
)
def test_c03_a_time_in_the_repeated_hour_runs_once(text: str, after: str, expected: list[str]) -> None:
    assert fires(text, NEW_YORK, after, len(expected)) == expected


def test_c03_the_latest_fire_is_not_one_of_the_second_pass() -> None:
    """What a scheduler asks that comes back at 06:45Z, after the 01:30 that does not count."""
    recurrence = Recurrence(cron_pattern("30 1 * * *", NEW_YORK))
    assert recurrence.previous_at_or_before(us("2026-11-01T06:45Z")) == us("2026-11-01T05:30Z")


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("0 * * * *", LOS_ANGELES, "2026-11-01T07:30Z", [f"2026-11-01T{hour:02}:00Z" for hour in range(8, 13)]),
        ("30 * * * *", "Europe/Helsinki", "2017-10-29T01:45Z", ["2017-10-29T02:30Z", "2017-10-29T03:30Z"]),
        ("* * * * *", NEW_YORK, "2014-11-02T05:58Z", ["2014-11-02T05:59Z", "2014-11-02T06:00Z", "2014-11-02T06:01Z"]),
    ],
)
def test_c04_what_runs_every_hour_or_minute_goes_on(text: str, zone: str, after: str, expected: list[str]) -> None:
    assert fires(text, zone, after, len(expected)) == expected


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"] in {"V043", "V044", "V045", "V046", "V073"}])
def test_c05_lists_and_steps_of_hours(vector: dict[str, str]) -> None:
    expected = [fire.replace(":00Z", "Z") for fire in vector["expected"]]
    assert fires(vector["expr"], vector["tz"], vector["start"], len(expected)) == expected


@pytest.mark.parametrize(
    ("text", "after", "days"),
    [
        ("0 0 1,15 * 5", "2026-05-01T00:00Z", ["05-08", "05-15", "05-22", "05-29", "06-01"]),
        ("0 0 1-31 * 1", "2026-05-01T00:00Z", ["05-02", "05-03", "05-04", "05-05", "05-06"]),
        ("0 0 */2 * 1", "2026-01-01T00:00Z", ["01-05", "01-19", "02-09"]),
        ("0 0 * * */2", "2025-12-31T12:00Z", ["01-01", "01-03", "01-04", "01-06", "01-08"]),
    ],
)
def test_c06_day_of_month_and_day_of_week_together(text: str, after: str, days: list[str]) -> None:
    assert fires(text, "UTC", after, len(days)) == [f"2026-{day}T00:00Z" for day in days]


def test_c07_weekdays_are_numbered_from_sunday() -> None:
    assert fires("30 7 * * 4", "UTC", "2018-02-09T00:00Z", 1) == ["2018-02-15T07:30Z"]
    sundays = [
        fires(text, "UTC", "2026-01-01T00:00Z", 50) for text in ("0 0 * * 0", "0 0 * * 7", "0 0 * * SUN", "@weekly")
    ]
    assert sundays[0][0] == "2026-01-04T00:00Z"
    assert all(same == sundays[0] for same in [*sundays, fires("0 0 * * 0,7", "UTC", "2026-01-01T00:00Z", 50)])
    friday_on = [f"2026-01-{day}T00:00Z" for day in ("02", "03", "04", "09", "10")]
    assert fires("0 0 * * 5-7", "UTC", "2026-01-01T00:00Z", 5) == friday_on
