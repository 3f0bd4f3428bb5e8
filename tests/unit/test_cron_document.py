"""The examples in docs/CRON.md are what is computed."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest

from cron.limits import CALENDAR_MAX, DAY_S, JITTER_US_MAX, SECOND_US, TEXT_MAX
from cron.parser import ALIASES
from cron.schedule import Recurrence
from cron.wall_clock import FoldPolicy, GapPolicy, cron_pattern
from tests.cron_vectors import us

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "CRON.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^\| `([^`]+)` \| (\S+) \| (?:(gap|fold) (\w+) )?\| (\S+) \| (.+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("text", "zone", "policy", "choice", "after", "fires"), EXAMPLES)
def test_an_example(text: str, zone: str, policy: str, choice: str, after: str, fires: str) -> None:
    gap = GapPolicy(choice) if policy == "gap" else GapPolicy.DEFAULT
    fold = FoldPolicy(choice) if policy == "fold" else FoldPolicy.DEFAULT
    expected = [us(fire) for fire in fires.split(", ")]
    recurrence = Recurrence(cron_pattern(text, zone, gap, fold))
    assert list(islice(recurrence.onward(us(after)), len(expected))) == expected


def test_no_example_was_overlooked() -> None:
    assert len(EXAMPLES) == sum(line.startswith("| `") and line.count("|") == 6 for line in TEXT.splitlines()) == 21


def test_names_and_bounds_are_those_of_the_code() -> None:
    for alias in ALIASES:
        assert f"`{alias}`" in TEXT
    for policy in (*GapPolicy, *FoldPolicy):
        assert policy == "default" or f"| `{policy}` |" in TEXT
    assert f"at most {CALENDAR_MAX:,} |" in TEXT
    assert f"more than {TEXT_MAX} characters" in TEXT
    assert JITTER_US_MAX == DAY_S * SECOND_US
