"""The text of a cron expression becomes an `Expression`. Whatever is not certainly meant is refused, never guessed.

[second] minute hour day-of-month month day-of-week      or  @hourly, @daily, …
field    element[,element…]
element  *  */step  value  value/step  low-high  low-high/step      and L as a day of month
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from cron.errors import InvalidSchedule
from cron.expression import Expression
from cron.limits import TEXT_MAX


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an expression: the values that `*` stands for, and how else they may be written."""

    name: str
    first: int
    last: int
    names: Mapping[str, int] = field(default_factory=dict)
    highest: int = 0  # the highest number that may be written, where it is not `last`: 7 is another name of Sunday

    @property
    def number_max(self) -> int:
        """The highest number that may be written."""
        return self.highest or self.last

    @property
    def allowed(self) -> str:
        """What may be written, for messages."""
        names = f" or {next(iter(self.names))} to {list(self.names)[-1]}" if self.names else ""
        return f"{self.first} to {self.number_max}{names}"


def _numbered(names: str, first: int) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split(), first)}


SECOND = Field("second", 0, 59)
MINUTE = Field("minute", 0, 59)
HOUR = Field("hour", 0, 23)
DAY = Field("day of month", 1, 31)
MONTH = Field("month", 1, 12, _numbered("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1))
WEEKDAY = Field("day of week", 0, 6, _numbered("SUN MON TUE WED THU FRI SAT", 0), highest=7)
FIELDS = (SECOND, MINUTE, HOUR, DAY, MONTH, WEEKDAY)

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
LAST_DAY = "L"
_SYNTAX = "values, ranges a-b, and *, a or a-b with a step /n, joined by commas"
_PART = re.compile(r"[^ \t]+")
_VALUE = r"[0-9]+|[A-Za-z]+"
_ELEMENT = re.compile(rf"(?:\*|(?P<low>{_VALUE})(?:-(?P<high>{_VALUE}))?)(?:/(?P<step>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of the text, and where it begins."""

    text: str
    position: int

    def invalid(self, of: Field, problem: str, allowed: str) -> InvalidSchedule:
        return InvalidSchedule(of.name, f"{self.text[:40]!r} {problem}", allowed, position=self.position)

    def elements(self) -> list[_Part]:
        position, elements = self.position, []
        for text in self.text.split(","):
            elements.append(_Part(text, position))
            position += len(text) + 1
        return elements


_interned: WeakValueDictionary[str, Expression] = WeakValueDictionary()


def parse(text: str) -> Expression:
    """The expression of a text. All who use one text share one object, for as long as any of them does.

    Raises InvalidSchedule, which names the field, for what is no expression and for one that matches no date.
    """
    expression = _interned.get(text)
    if expression is None:
        expression = _interned[text] = _parse(text)
    return expression


def _parse(text: str) -> Expression:
    if len(text) > TEXT_MAX:
        raise InvalidSchedule("expression", f"has {len(text)} characters", f"at most {TEXT_MAX}")
    parts = [_Part(match.group(), match.start()) for match in _PART.finditer(text)]
    if len(parts) == 1 and parts[0].text.startswith("@"):
        return parse(_spelled_out(parts[0]))
    if len(parts) not in (5, 6):
        problem = f"has {len(parts)} fields" if parts else "is empty"
        raise InvalidSchedule(
            "expression", problem, "minute, hour, day of month, month, day of week; optionally second before these"
        )
    *optional_second, minute, hour, day, month, weekday = parts
    seconds = _members(SECOND, optional_second[0]) if optional_second else 1
    minutes, hours = _members(MINUTE, minute), _members(HOUR, hour)
    days, has_last_day = _days(day)
    expression = Expression(
        text=" ".join(part.text for part in parts),
        seconds=seconds,
        minutes_of_day=sum(minutes << 60 * at for at in range(24) if hours >> at & 1),
        days=days,
        has_last_day=has_last_day,
        months=_members(MONTH, month),
        weekdays=_members(WEEKDAY, weekday),
        needs_both_days=_begins_with_star(day) or _begins_with_star(weekday),
        is_every_hour=_begins_with_star(hour),
    )
    if not expression.has_dates:
        raise day.invalid(DAY, f"does not come in month {month.text[:40]}", "a day that some year has")
    return expression


def _spelled_out(alias: _Part) -> str:
    text = ALIASES.get(alias.text.lower())
    if text is None:
        raise InvalidSchedule("expression", f"{alias.text[:40]!r} is not known", ", ".join(ALIASES))
    return text


def _begins_with_star(part: _Part) -> bool:
    """Cron looks at the text, not at the values: `1-31` is every day of the month, and yet not a star."""
    return part.text.startswith("*")


def _days(part: _Part) -> tuple[int, bool]:
    """The numbered days of the month, and whether its last one is among them."""
    elements = part.elements()
    numbered = [element for element in elements if element.text.upper() != LAST_DAY]
    return _union(DAY, numbered) >> DAY.first, len(numbered) < len(elements)


def _members(of: Field, part: _Part) -> int:
    return _union(of, part.elements())


def _union(of: Field, elements: list[_Part]) -> int:
    members = 0
    for element in elements:
        for value in _range(of, element):
            members |= 1 << (value if value <= of.last else of.first)
    return members


def _range(of: Field, element: _Part) -> range:
    match = _ELEMENT.fullmatch(element.text)
    if match is None:
        allowed = f"{_SYNTAX}, or {LAST_DAY}" if of is DAY else _SYNTAX
        raise element.invalid(of, "is not understood" if element.text else "is an empty element", allowed)
    low_text, high_text, step_text = match.group("low", "high", "step")
    step = 1 if step_text is None else _step(of, element, step_text)
    if low_text is None:
        return range(of.first, of.last + 1, step)
    low = _value(of, element, low_text)
    if high_text is None:
        return range(low, low + 1 if step_text is None else max(low, of.last) + 1, step)
    high = _value(of, element, high_text)
    if of is WEEKDAY and high_text.upper() == "SUN" and low > high:
        high = of.number_max
    if low > high:
        raise element.invalid(of, "runs backwards", f"two ranges, such as {low}-{of.last},{of.first}-{high}")
    return range(low, high + 1, step)


def _value(of: Field, element: _Part, text: str) -> int:
    value = int(text) if text.isdigit() else of.names.get(text.upper(), -1)
    if not of.first <= value <= of.number_max:
        raise element.invalid(of, "is out of range" if text.isdigit() else "is not a name", of.allowed)
    return value


def _step(of: Field, element: _Part, text: str) -> int:
    step, step_max = int(text), of.last - of.first
    if not 1 <= step <= step_max:
        raise element.invalid(of, "has a step out of range", f"steps from 1 to {step_max}")
    return step
