"""The agreed answers, forward and backward, and the expressions that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from cron.errors import InvalidSchedule
from cron.parser import parse
from cron.wall_clock import cron_pattern
from cron.zones import tzdata_version
from tests.cron_vectors import INVALID, VECTORS, shown, us

NEVER = [vector for vector in VECTORS if vector["class"] == "never"]
FIRING = [vector for vector in VECTORS if vector["class"] != "never"]


def expected(vector: dict[str, Any]) -> list[str]:
    """The answer, by the version of the zone data where it depends on that."""
    if "tzdata_expected" not in vector:
        return list(vector["expected"])
    versions: dict[str, list[str]] = vector["tzdata_expected"]
    return versions[max(version for version in versions if version <= tzdata_version())]


@pytest.mark.parametrize("vector", FIRING, ids=lambda vector: vector["id"])
def test_a_vector(vector: dict[str, Any]) -> None:
    pattern = cron_pattern(vector["expr"], vector["tz"])
    fires, instant = [], us(vector["start"])
    for _ in expected(vector):
        following = pattern.next_after(instant)
        assert following is not None
        fires.append(instant := following)
    assert [shown(fire) for fire in fires] == expected(vector)
    for fire in reversed(fires):
        assert pattern.previous_at_or_before(instant) == fire
        instant = fire - 1


@pytest.mark.parametrize("vector", NEVER, ids=lambda vector: vector["id"])
def test_what_can_never_fire_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchedule, match=r"^day of month .* does not come in month"):
        parse(vector["expr"])


def test_the_vectors_are_all_there() -> None:
    assert (len(VECTORS), len(NEVER), len(INVALID)) == (97, 3, 25)


@pytest.mark.parametrize("entry", INVALID, ids=lambda entry: entry["expr"] or "empty")
def test_an_invalid_expression_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        parse(entry["expr"])
    assert refused.value.allowed
