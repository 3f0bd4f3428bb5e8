"""What an expression's text means, and how what is wrong with it is told."""

from __future__ import annotations

import gc
import weakref

import pytest

from cron.errors import InvalidSchedule
from cron.expression import Expression
from cron.limits import TEXT_MAX
from cron.parser import parse
from cron.wall_clock import cron_pattern


def members(bits: int) -> set[int]:
    return {value for value in range(bits.bit_length()) if bits >> value & 1}


def times(expression: Expression) -> set[tuple[int, int]]:
    return {divmod(minute, 60) for minute in members(expression.minutes_of_day)}


@pytest.mark.parametrize(
    ("field", "minutes"),
    [
        ("*", set(range(60))),
        ("7", {7}),
        ("07", {7}),
        ("1,1,3", {1, 3}),
        ("5-8", {5, 6, 7, 8}),
        ("5-5", {5}),
        ("*/25", {0, 25, 50}),
        ("*/59", {0, 59}),
        ("50/4", {50, 54, 58}),
        ("5-20/7", {5, 12, 19}),
        ("59/2", {59}),
        ("*/30,1-2,58/1", {0, 30, 1, 2, 58, 59}),
    ],
)
def test_elements_of_a_field(field: str, minutes: set[int]) -> None:
    assert times(parse(f"{field} 3 * * *")) == {(3, minute) for minute in minutes}


@pytest.mark.parametrize(
    ("field", "weekdays"),
    [
        ("7", {0}),
        ("sun", {0}),
        ("0-7", set(range(7))),
        ("sun-sat", set(range(7))),
        ("mon-SUN", set(range(7))),
        ("sat-sun", {6, 0}),
        ("sun-sun", {0}),
        ("5-7", {5, 6, 0}),
        ("Fri-7/2", {5, 0}),
        ("*/2", {0, 2, 4, 6}),
        ("1/2", {1, 3, 5}),
        ("7/2", {0}),
        ("mon,wed-4", {1, 3, 4}),
    ],
)
def test_weekdays(field: str, weekdays: set[int]) -> None:
    assert members(parse(f"0 0 * * {field}").weekdays) == weekdays


def test_seconds_come_first_and_are_otherwise_zero() -> None:
    assert members(parse("5,10 1 2 * * *").seconds) == {5, 10}
    assert times(parse("5,10 1 2 * * *")) == {(2, 1)}
    assert members(parse("1 2 * * *").seconds) == {0}


def test_names_of_months_in_any_case() -> None:
    assert members(parse("0 0 1 jan-Mar,DEC *").months) == {1, 2, 3, 12}


@pytest.mark.parametrize("alias", ["@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@HOURLY"])
def test_an_alias_is_another_name_of_an_expression(alias: str) -> None:
    expression = parse(f" {alias}\t")
    assert expression is parse(expression.text)
    assert len(expression.text.split()) == 5


@pytest.mark.parametrize(
    ("text", "needs_both"),
    [("0 0 1 * 1", False), ("0 0 * * 1", True), ("0 0 */2 * 1", True), ("0 0 1 * */2", True), ("0 0 1-31 * 1", False),
     ("0 0 *,1 * 1", True), ("0 0 1,* * 1", False), ("0 0 L * 1", False)],
)  # fmt: skip
def test_the_day_rule_goes_by_the_text(text: str, needs_both: bool) -> None:
    assert parse(text).needs_both_days is needs_both


@pytest.mark.parametrize(("hours", "is_every_hour"), [("*", True), ("*/3", True), ("0-23", False), ("1", False)])
def test_the_hour_rule_goes_by_the_text(hours: str, is_every_hour: bool) -> None:
    assert parse(f"0 {hours} * * *").is_every_hour is is_every_hour


@pytest.mark.parametrize(
    ("text", "field", "position"),
    [
        ("60 * * * *", "minute", 0),
        ("  0 24 * * *", "hour", 4),
        ("0 0 1,2,32 * *", "day of month", 8),
        ("0 0 * foo *", "month", 6),
        ("0 0 * 13 *", "month", 6),
        ("0 0 * * mon-day", "day of week", 8),
        ("60 0 0 * * *", "second", 0),
        ("0 0 ? * *", "day of month", 4),
        ("0 0 * * 5L", "day of week", 8),
        ("0 0 * * L", "day of week", 8),
        ("0 0 LW * *", "day of month", 4),
        ("0 0 L-3 * *", "day of month", 4),
        ("0 0 L/2 * *", "day of month", 4),
        ("0 0 * * 5#2", "day of week", 8),
        ("1- * * * *", "minute", 0),
        ("1-2-3 * * * *", "minute", 0),
        ("1/2/3 * * * *", "minute", 0),
        ("*/ * * * *", "minute", 0),
        ("*5 * * * *", "minute", 0),
        (", * * * *", "minute", 0),
        ("0 23-22 * * *", "hour", 2),
        ("0 0 31-1 * *", "day of month", 4),
        ("0 0 * dec-jan *", "month", 6),
        ("0 0 31 4,6 *", "day of month", 4),
        ("0 0 30-31 feb *", "day of month", 4),
        ("0 0 * * 5-0", "day of week", 8),
        ("0\u00a00 * * *", "expression", None),
        ("0 0 * *\n*", "expression", None),
        ("0 0 0 1 1 * 2026", "expression", None),
        ("@daily 0", "expression", None),
        ("@every 5m", "expression", None),
        ("@", "expression", None),
        ("\u0663 * * * *", "minute", 0),
        ("\u00b2 * * * *", "minute", 0),
        ("*\x00 * * * *", "minute", 0),
    ],
)
def test_what_is_wrong_is_named(text: str, field: str, position: int | None) -> None:
    with pytest.raises(InvalidSchedule) as refused:
        parse(text)
    assert (refused.value.field, refused.value.position) == (field, position)
    assert str(refused.value).startswith(field)
    assert refused.value.allowed
    assert refused.value.allowed in str(refused.value)


@pytest.mark.parametrize("text", ["9" * 500 + " * * * *", "1," * 240 + "1 * * * *", "*/" + "0" * 400 + "1 * * * *"])
def test_long_texts_are_answered_with_short_messages(text: str) -> None:
    try:
        parse(text)
    except InvalidSchedule as refused:
        assert len(str(refused)) < 300


def test_a_text_has_a_bound() -> None:
    with pytest.raises(InvalidSchedule, match=f"at most {TEXT_MAX}"):
        parse("* " * TEXT_MAX)
    every = ",".join(map(str, range(60)))
    assert len(parse(f"{every} {every} * * * *").text) < TEXT_MAX


def test_a_text_is_parsed_once_for_all_who_use_it() -> None:
    first = cron_pattern("17 3 * * *", "Europe/Paris")
    assert cron_pattern("17 3 * * *", "Europe/Paris") is first
    assert cron_pattern("17 3 * * *", "UTC").expression is first.expression
    reference = weakref.ref(first.expression)
    del first
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("text", ["0 0 29 2 *", "0 0 30 2 1", "0 0 31 2,3 *", "0 0 29 2 */6", "0 0 L 2 *"])
def test_a_rare_date_is_no_impossible_one(text: str) -> None:
    assert parse(text).has_dates
