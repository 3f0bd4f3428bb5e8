"""C08: zones whose rules change, and names that are none.

Chosen: the data is that of the package `tzdata`, the same on every node. Legacy names and any letter case are accepted.
(Odd offsets are vectors; the host's zone, and files that are opened, are in tests/unit/test_cron_*.py.)
"""

from __future__ import annotations

from itertools import islice

import pytest

from cron.errors import InvalidSchedule
from cron.parser import parse
from cron.schedule import Recurrence
from cron.wall_clock import CronPattern
from cron.zones import Zone, tzdata_version, zone
from tests.cron_vectors import DATA, VECTORS, shown, us

VANCOUVER = "America/Vancouver"
(VECTOR,) = (vector for vector in VECTORS if vector["id"] == "V088")
OLD = Recurrence(
    CronPattern(parse(VECTOR["expr"]), Zone.of(VANCOUVER, (DATA / "America_Vancouver.2025b.tzif").read_bytes()))
)
NEW = Recurrence(CronPattern(parse(VECTOR["expr"]), zone(VANCOUVER)))


def fires(recurrence: Recurrence) -> list[str]:
    return [shown(fire) for fire in islice(recurrence.onward(us(VECTOR["start"])), 5)]


def test_fires_follow_the_rules_that_the_process_has() -> None:
    assert fires(OLD) == VECTOR["tzdata_expected"]["2025b"]
    assert tzdata_version() >= "2026f"
    assert fires(NEW) == VECTOR["tzdata_expected"]["2026f"]


def test_no_fire_is_lost_or_doubled_whenever_the_data_is_changed() -> None:
    """A restart with the new data, before the clocks were to change and after any number of fires: one fire a day."""
    old = list(OLD.onward(us("2026-10-26T00:00Z"), us("2026-11-01T09:00Z")))
    for count in range(1, len(old) + 1):
        new = list(NEW.onward(old[count - 1], us("2026-11-08T23:00Z")))
        days = [shown(fire)[:10] for fire in (*old[:count], *new)]
        assert days == [f"2026-10-{day}" for day in range(26, 32)] + [f"2026-11-0{day}" for day in range(1, 9)]


@pytest.mark.parametrize("name", ["Europe/Nowhere", "+02:00", "", "../../etc/passwd"])
def test_what_is_no_name_is_refused_at_once(name: str) -> None:
    with pytest.raises(InvalidSchedule, match="timezone"):
        zone(name)


@pytest.mark.parametrize(("name", "spelled"), [("EST5EDT", "EST5EDT"), ("utc", "UTC")])
def test_legacy_names_and_letter_case_are_accepted(name: str, spelled: str) -> None:
    assert zone(name).name == spelled
