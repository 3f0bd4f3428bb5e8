"""When the clocks of a zone are changed, out of a compiled zone file (RFC 9636).

The standard library reads these files too, but tells only what a clock shows at an instant. What a schedule has to know
is when the clocks change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from itertools import pairwise
from struct import calcsize, unpack_from
from typing import NamedTuple

from cron.limits import DAY_S, EARLIEST_S, LATEST_S, LATEST_YEAR

_HEADER = ">4sc15x6L"
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()


class OffsetChange(NamedTuple):
    """From `at` (seconds of Unix time) on, clocks are `offset` seconds ahead of UTC."""

    at: int
    offset: int


def offset_changes(data: bytes) -> list[OffsetChange]:
    """The changes from 1970 to the end of 2399; the first one, at 1970, is the offset that was in force then.

    Raises ValueError for data that is no zone file of version 2 or later, or has a rule of a kind that no zone has.
    """
    listed, footer = _read(data)
    last_listed = listed[-1].at
    ruled = [change for change in _by_rule(footer) if change.at > last_listed] if footer else []
    changes = [*listed, *ruled]
    in_force = [change for change in changes if change.at <= EARLIEST_S][-1]
    later = (change for change in changes if EARLIEST_S < change.at < LATEST_S)
    all_of_them = [OffsetChange(EARLIEST_S, in_force.offset), *later]
    # Some entries change a name or the season alone.
    return [all_of_them[0], *(new for old, new in pairwise(all_of_them) if new.offset != old.offset)]


def _read(data: bytes) -> tuple[list[OffsetChange], str]:
    """The changes that the file lists, after one of long ago, and its rule for all time after them."""
    if data[:4] != b"TZif" or data[4:5] < b"2":
        raise ValueError("not a compiled zone file of version 2 or later")
    start = calcsize(_HEADER)
    _, _, *counts = unpack_from(_HEADER, data)
    start += _block_size(counts, instant_size=4)  # the same once more, in 32 bits
    _, _, *counts = unpack_from(_HEADER, data, start)
    start += calcsize(_HEADER)
    end = start + _block_size(counts, instant_size=8)

    _, _, _, change_count, type_count, _ = counts
    instants = unpack_from(f">{change_count}q", data, start)
    types = unpack_from(f">{change_count}B", data, start + 8 * change_count)
    offsets = [unpack_from(">l", data, start + 9 * change_count + 6 * number)[0] for number in range(type_count)]
    listed = [OffsetChange(at, offsets[number]) for at, number in zip(instants, types, strict=True)]
    return [OffsetChange(-(2**62), offsets[0]), *listed], data[end:].decode("ascii").strip()


def _block_size(counts: list[int], *, instant_size: int) -> int:
    is_utc_count, is_standard_count, leap_count, change_count, type_count, name_size = counts
    changes = change_count * (instant_size + 1)
    leaps = leap_count * (instant_size + 4)
    return changes + type_count * 6 + name_size + leaps + is_standard_count + is_utc_count


# --- the rule in the footer, such as EST5EDT,M3.2.0,M11.1.0 (a TZ string of POSIX, extended by RFC 9636) --------------

_NAME = r"(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]{3,}>)"
_HMS = r"[+-]?[0-9]{1,3}(?::[0-9]{2}){0,2}"
_ZONE = re.compile(rf"{_NAME}({_HMS})(?:{_NAME}({_HMS})?)?")
_RULE = re.compile(rf"M([0-9]{{1,2}})\.([1-5])\.([0-6])(?:/({_HMS}))?")


def _by_rule(footer: str) -> Iterator[OffsetChange]:
    """The changes of all years by the rule; none where the clocks never change again."""
    zone, *rules = footer.split(",")
    match = _ZONE.fullmatch(zone)
    if match is None or len(rules) not in (0, 2):
        raise ValueError(f"unknown rule for a zone: {footer!r}")
    standard = -_seconds(match[1])  # POSIX counts westward
    if not rules:
        return
    summer = -_seconds(match[2]) if match[2] else standard + 3600
    for year in range(1970, LATEST_YEAR):
        begins = OffsetChange(_wall(year, rules[0]) - standard, summer)
        ends = OffsetChange(_wall(year, rules[1]) - summer, standard)
        yield from sorted((begins, ends))


def _wall(year: int, rule: str) -> int:
    """The wall time, in seconds since 1970, of a rule such as M3.2.0/2: the 2nd Sunday of March at 2:00; 5 is last."""
    match = _RULE.fullmatch(rule)
    if match is None:
        raise ValueError(f"unknown rule for a change of clocks: {rule!r}")
    month, week, weekday = int(match[1]), int(match[2]), int(match[3])
    first = date(year, month, 1).toordinal()
    after = date(year + month // 12, month % 12 + 1, 1).toordinal()
    day = first + (weekday - first) % 7 + 7 * (week - 1)  # ordinals count from a Monday, 1: a Sunday is 0 modulo 7
    while day >= after:
        day -= 7
    return (day - _EPOCH_ORDINAL) * DAY_S + _seconds(match[4] or "2")


def _seconds(text: str) -> int:
    hours, minutes, seconds = [*map(int, text.lstrip("+-").split(":")), 0, 0][:3]
    size = hours * 3600 + minutes * 60 + seconds
    return -size if text.startswith("-") else size
