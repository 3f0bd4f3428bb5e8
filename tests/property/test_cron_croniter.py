"""croniter gives the same answers, in the part of the language in which it is right.

Which part that is, `is_common` says; the reasons are in the decision 0015. It was written by others for others, so a
mistake about what a text means is hardly made by both.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from croniter import croniter  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from tests.cron_vectors import us
from tests.property.test_cron import ANY, EPOCH, MANY, MONTHS, WEEKDAYS, Field, Fields, pattern_of

NUMBERS = {
    name.lower(): number for names, first in ((MONTHS, 1), (WEEKDAYS, 0)) for number, name in enumerate(names, first)
}


def is_common(of: Fields) -> bool:
    """Elsewhere it differs: where seconds stand, what a range of one value means, when a day field counts as a star."""
    fields = (of.minute, of.hour, of.day, of.month, of.weekday)
    is_plain = not any(field.is_star and field.text != "*" for field in (of.day, of.weekday))
    return of.second is None and is_plain and all(map(_is_common_field, fields))


def _is_common_field(field: Field) -> bool:
    parts = field.text.split(",")
    has_star_among_others = len(parts) > 1 and any(part.startswith("*") for part in parts)
    ends = [part.partition("/")[0].lower().split("-") for part in parts]
    numbers = [[NUMBERS.get(end, end) for end in pair] for pair in ends if len(pair) == 2]
    return not has_star_among_others and not any(int(low) == int(high) for low, high in numbers)


@MANY
@given(of=ANY.filter(is_common), at=st.integers(us("1970-01-01T00:00Z"), us("2060-01-01T00:00Z")))
def test_the_same_answers_in_utc(of: Fields, at: int) -> None:
    pattern = pattern_of(of, "UTC")
    start = EPOCH + timedelta(microseconds=at)
    theirs = croniter(of.text, start.replace(microsecond=0), max_years_between_matches=50)
    ours = pattern.next_after(at - at % 1_000_000)
    for _ in range(5):
        assert ours is not None
        expected: datetime = theirs.get_next(datetime)
        assert EPOCH + timedelta(microseconds=ours) == expected.astimezone(UTC)
        ours = pattern.next_after(ours)
