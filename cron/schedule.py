"""A recurrence: a pattern between a start and an end, with jitter. Instants are microseconds of Unix time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from cron.errors import InvalidSchedule
from cron.limits import EARLIEST_US, JITTER_US_MAX, LATEST_US
from cron.patterns import Pattern


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The nominal times of a schedule: those of the pattern with `start_us <= time < end_us`.

    No answer depends on anything but the arguments, so every node gives the same. None takes longer for a far answer
    than for a near one, nor for having missed much. Raises InvalidSchedule for bounds that make no sense.
    """

    pattern: Pattern
    start_us: int = EARLIEST_US
    end_us: int = LATEST_US
    jitter_us: int = 0

    def __post_init__(self) -> None:
        if not EARLIEST_US <= self.start_us < LATEST_US:
            raise InvalidSchedule("start", "is out of range", "an instant from 1970 to 2399")
        if not self.start_us < self.end_us <= LATEST_US:
            raise InvalidSchedule("end", "is out of range", "an instant after the start, up to the end of 2399")
        if not 0 <= self.jitter_us <= JITTER_US_MAX:
            raise InvalidSchedule("jitter", f"is {self.jitter_us} µs", f"0 to {JITTER_US_MAX} µs")

    def next_after(self, instant_us: int) -> int | None:
        """The first nominal time that is later than the instant; None if there is none."""
        time = self.pattern.next_after(max(instant_us, self.start_us - 1))
        return time if time is not None and time < self.end_us else None

    def previous_at_or_before(self, instant_us: int) -> int | None:
        """The last nominal time that is not later than the instant; None if there is none."""
        time = self.pattern.previous_at_or_before(min(instant_us, self.end_us - 1))
        return time if time is not None and time >= self.start_us else None

    def onward(self, after_us: int, until_us: int = LATEST_US) -> Iterator[int]:
        """The nominal times with `after_us < time <= until_us`, the earliest first; each is found when it is asked."""
        time = self.next_after(after_us)
        while time is not None and time <= until_us:
            yield time
            time = self.next_after(time)

    def back(self, until_us: int, after_us: int = EARLIEST_US - 1) -> Iterator[int]:
        """The same times as those of `onward`, the latest first."""
        time = self.previous_at_or_before(until_us)
        while time is not None and time > after_us:
            yield time
            time = self.previous_at_or_before(time - 1)

    def count(self, after_us: int, until_us: int) -> int:
        """How many nominal times there are with `after_us < time <= until_us`, without visiting each."""
        first_us, last_us = max(after_us, self.start_us - 1), min(until_us, self.end_us - 1)
        return self.pattern.count(first_us, last_us) if first_us < last_us else 0

    def run_at(self, schedule_id: str, nominal_us: int) -> int:
        """When the run of a nominal time is due: at most `jitter_us` later, and the same whoever asks."""
        if self.jitter_us == 0:
            return nominal_us
        digest = blake2b(f"{schedule_id}.{nominal_us}".encode(), digest_size=8).digest()
        return nominal_us + int.from_bytes(digest, "big") % (self.jitter_us + 1)
