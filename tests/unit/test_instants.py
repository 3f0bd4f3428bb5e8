"""Instants (C12): an offset is required, nothing is rounded to an earlier instant, the host's zone is no matter."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.instants import format_instant, instant_of, parse_instant

NOON = 1_780_315_200_000_000  # 2026-06-01T12:00:00Z
HOUR = 3_600_000_000
EARLIEST = datetime.fromisoformat("1971-01-01")
LATEST = datetime.fromisoformat("2200-01-01")


@pytest.fixture(autouse=True)
def _host_in_kolkata(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(os.environ, "TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-06-01T12:00:00Z", NOON),
        ("2026-06-01t12:00:00z", NOON),
        ("2026-06-01 12:00:00+00:00", NOON),
        ("2026-06-01T12:00:00-00:00", NOON),
        ("2026-06-01T12:00:00+02:00", NOON - 2 * HOUR),
        ("2026-06-01T12:00:00-05:30", NOON + 5 * HOUR + HOUR // 2),
        ("2026-06-01T12:00:00.123456Z", NOON + 123_456),
        ("2026-06-01T12:00:00.1Z", NOON + 100_000),
        ("2026-06-01T12:00:00.1234560000Z", NOON + 123_456),
        ("2026-06-01T12:00:00.1234560001Z", NOON + 123_457),
        ("2026-06-01T12:00:00.999999999Z", NOON + 1_000_000),
        ("1969-12-31T23:59:59.5Z", -500_000),
    ],
)
def test_an_instant_is_read_as_what_it_says(text: str, expected: int) -> None:
    assert parse_instant(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2026-06-01T12:00:00",
        "2026-06-01",
        "2026-06-01T12:00Z",
        "2026-03-08T02:30:00[America/New_York]",
        "2026-03-08T02:30:00-05:00[America/New_York]",
        "1780315200",
        "1780315200000",
        "2026-02-29T00:00:00Z",
        "2026-06-01T24:00:00Z",
        "2026-06-01T23:59:60Z",
        "0000-01-01T00:00:00Z",
        "10000-01-01T00:00:00Z",
        "2026-06-01T12:00:00+24:00",
        "2026-06-01T12:00:00.Z",
        "2026-06-01T12:00:00." + "1" * 31 + "Z",
        "٢٠٢٦-06-01T12:00:00Z",
        " 2026-06-01T12:00:00Z",
        "2026-06-01T12:00:00Z\n",
        "",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|is not|has an offset"):
        parse_instant(text)


@given(
    st.datetimes(min_value=EARLIEST, max_value=LATEST),
    st.integers(-23 * 60, 23 * 60),
)
def test_what_is_written_is_read_back(local: datetime, offset_minutes: int) -> None:
    when = local.replace(tzinfo=timezone(timedelta(minutes=offset_minutes)))
    instant = instant_of(when)
    assert parse_instant(when.isoformat()) == instant
    assert parse_instant(format_instant(instant)) == instant
    assert format_instant(instant).endswith("Z")


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        instant_of(datetime(2026, 6, 1))  # noqa: DTZ001 - this is the case
    assert instant_of(datetime(2026, 6, 1, 12, tzinfo=UTC)) == NOON
