"""Zones: the changes of clocks are those that the standard library knows, and a name opens nothing but its zone."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from cron.errors import InvalidSchedule
from cron.limits import DAY_S, LATEST_S, LATEST_YEAR
from cron.tzif import offset_changes
from cron.zones import Period, Zone, tzdata_version, zone, zone_names
from tests.cron_vectors import DATA

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@cache
def library_zone(name: str) -> ZoneInfo:
    """The same data, read by the standard library."""
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as source:
        return ZoneInfo.from_file(source, key=name)


def library_offset(name: str, instant: int) -> int:
    offset = (EPOCH + timedelta(seconds=instant)).astimezone(library_zone(name)).utcoffset()
    assert offset is not None
    return offset // timedelta(seconds=1)


def periods(of: Zone) -> list[Period]:
    return list(of.onward(0))


@pytest.mark.parametrize("area", sorted({name.partition("/")[0] for name in zone_names()}))
def test_the_changes_are_those_that_the_standard_library_knows(area: str) -> None:
    for name in zone_names():
        if name.partition("/")[0] == area:
            found = periods(zone(name))
            assert (found[0].start, found[-1].end) == (0, LATEST_S), name
            for before, period in pairwise(found):
                assert (before.end, before.offset != period.offset) == (period.start, True), name
            for period in found:
                between = range(period.start, min(period.end, 2**31), 20 * DAY_S)
                offsets = {library_offset(name, instant) for instant in (*between, period.end - 1)}
                assert offsets == {period.offset}, f"{name} in {period}"


def test_no_gap_is_longer_than_the_period_that_it_begins() -> None:
    """Shifted fires of a gap stay in their period: the search relies on it."""
    for name in zone_names():
        for period in periods(zone(name)):
            assert period.wall_start - period.shown_before <= period.end - period.start, name


def test_what_was_shown_before_and_will_be_again() -> None:
    for name in ("America/New_York", "Pacific/Apia", "Antarctica/Troll", "Africa/Casablanca"):
        found = periods(zone(name))
        for number, period in enumerate(found):
            assert period.shown_before == max((p.wall_end for p in found[:number]), default=period.wall_start)
            assert period.shown_again == min((p.wall_start for p in found[number + 1 :]), default=period.wall_end)
            assert next(zone(name).onward(period.start)) == next(zone(name).back(period.end - 1)) == period


def test_the_version_of_the_data_is_visible() -> None:
    assert re.fullmatch(r"20[0-9]{2}[a-z]", tzdata_version())


def test_letter_case_does_not_matter_and_the_name_is_spelled_as_in_the_data() -> None:
    for written, spelled in (("utc", "UTC"), ("europe/PARIS", "Europe/Paris"), ("est5edt", "EST5EDT")):
        assert zone(written) is zone(spelled)
        assert zone(written).name == spelled


HOSTILE = ["", " ", "Europe/Nowhere", "+02:00", "UTC+2", "../../etc/passwd", "/etc/passwd", "Europe/../UTC", "Europe",
           "zone.tab", "tzdata.zi", "__init__.py", "Europe/Paris\0", "Europe/Paris ", "Asia/\u212aabul", "posix/UTC",
           ".", "\ud800", "a" * 100_000, "localtime"]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:20]))
def test_any_other_name_is_refused_and_opens_no_file(name: str) -> None:
    zone("UTC")  # the list of names is read
    opened: list[Any] = []
    is_watching = True
    sys.addaudithook(lambda event, of: opened.append(of[0]) if event == "open" and is_watching else None)
    try:
        with pytest.raises(InvalidSchedule, match=r"^timezone ") as refused:
            zone(name)
    finally:
        is_watching = False
    assert opened == []
    assert len(str(refused.value)) < 300


def test_what_was_perhaps_meant_is_suggested() -> None:
    with pytest.raises(InvalidSchedule, match="Europe/Paris"):
        zone("Europe/Pariss")


@pytest.mark.parametrize("data", [b"", b"TZif", b"TZif1" + bytes(39), b"GIF89a" + bytes(100)])
def test_data_that_is_no_zone_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a compiled zone file"):
        offset_changes(data)


@pytest.mark.parametrize("footer", [b"XXX3EDT4,0/0,J365/23", b"EST5EDT,M3.2.0", b"EST5EDT,M3.2.0,M11.1.7", b"5"])
def test_a_rule_that_is_not_understood_is_not_guessed(footer: bytes) -> None:
    data = (DATA / "America_Vancouver.2025b.tzif").read_bytes()
    with pytest.raises(ValueError, match="unknown rule"):
        offset_changes(data.replace(b"PST8PDT,M3.2.0,M11.1.0", footer))


def test_the_rule_of_the_last_years_holds_to_the_end() -> None:
    last = periods(zone("America/New_York"))[-1]
    assert library_offset("America/New_York", last.start) == last.offset
    assert (EPOCH + timedelta(seconds=last.start)).year == LATEST_YEAR - 1
