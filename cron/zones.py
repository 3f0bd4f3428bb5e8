"""Time zones by their IANA names, and when their clocks are changed.

The data is that of the package `tzdata` and of nothing else: all nodes that were installed from one lock file agree,
and the host's own zone and files have no effect. A zone is read once in the life of a process, so a newer package
counts from the next start on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import NamedTuple

from cron.errors import InvalidSchedule
from cron.limits import LATEST_S
from cron.tzif import offset_changes

_NAME_MAX = 64  # characters; the longest name has 32
_DATA = files("tzdata")


class Period(NamedTuple):
    """A time in which the clocks are not touched: `start <= instant < end`, in seconds of Unix time.

    Wall times below `shown_before` were shown in an earlier period, those from `shown_again` on will be in a later one.
    Where `shown_before` is below `wall_start`, the times between are the gap: no clock ever showed them.
    """

    start: int
    end: int
    offset: int
    shown_before: int
    shown_again: int

    @property
    def wall_start(self) -> int:
        """What clocks show at `start`."""
        return self.start + self.offset

    @property
    def wall_end(self) -> int:
        """What clocks would show at `end`, were they not changed."""
        return self.end + self.offset


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Zone:
    """A zone's periods from 1970 to the end of 2399, as columns: a few kilobytes, however many schedules use it."""

    name: str
    _starts: array[int]
    _offsets: array[int]
    _shown_before: array[int]
    _shown_again: array[int]

    @classmethod
    def of(cls, name: str, data: bytes) -> Zone:
        """The zone of a compiled zone file. Raises ValueError if it is none."""
        changes = offset_changes(data)
        starts, offsets = zip(*changes, strict=True)
        ends = [*starts[1:], LATEST_S]
        wall_starts = [start + offset for start, offset in changes]
        wall_ends = [end + offset for end, offset in zip(ends, offsets, strict=True)]
        highest_before = accumulate(wall_ends[:-1], max, initial=wall_starts[0])
        lowest_after = accumulate(reversed(wall_starts[1:]), min, initial=wall_ends[-1])
        return cls(
            name, array("q", starts), array("i", offsets), array("q", highest_before), array("q", [*lowest_after][::-1])
        )

    def __repr__(self) -> str:
        return f"Zone({self.name!r})"

    def period(self, number: int) -> Period:
        """The period of this number, from 0."""
        starts = self._starts
        end = starts[number + 1] if number + 1 < len(starts) else LATEST_S
        return Period(starts[number], end, self._offsets[number], self._shown_before[number], self._shown_again[number])

    def onward(self, instant: int) -> Iterator[Period]:
        """The period of an instant and the later ones; all for an instant before 1970, none for one after 2399."""
        if instant >= LATEST_S:
            return iter(())
        return map(self.period, range(max(self._number_at(instant), 0), len(self._starts)))

    def back(self, instant: int) -> Iterator[Period]:
        """The period of an instant and the earlier ones, the latest first; none for an instant before 1970."""
        return map(self.period, range(self._number_at(instant), -1, -1))

    def _number_at(self, instant: int) -> int:
        return bisect_right(self._starts, instant) - 1


def zone(name: str) -> Zone:
    """The zone of an IANA name in any letter case; `Zone.name` is the name as the data spells it.

    Raises InvalidSchedule for any other text. Files are opened only by names that the data itself lists.
    """
    spelled = _names().get(name.lower()) if name.isascii() else None
    if spelled is None:
        raise InvalidSchedule("timezone", f"{name[:_NAME_MAX]!r} is not known", _suggestion(name))
    return _load(spelled)


def zone_names() -> list[str]:
    """The names of all zones, in alphabetical order."""
    return sorted(_names().values())


@cache
def tzdata_version() -> str:
    """The version of the time zone data, such as 2026f."""
    head = _DATA.joinpath("zoneinfo", "tzdata.zi").read_text(encoding="utf-8").partition("\n")[0]
    return head.removeprefix("# version ")


@cache
def _names() -> dict[str, str]:
    listed = _DATA.joinpath("zones").read_text(encoding="utf-8").split()
    return {name.lower(): name for name in listed}


@cache  # bounded by the names that there are
def _load(name: str) -> Zone:
    return Zone.of(name, _DATA.joinpath("zoneinfo", *name.split("/")).read_bytes())


def _suggestion(name: str) -> str:
    near = get_close_matches(name, _names().values(), n=3) if len(name) <= _NAME_MAX else []
    return " or ".join(near) if near else "names of the IANA time zone database, such as Europe/Paris or UTC"
