"""When tasks were started, noted by workers in other processes: a file that all of them have in memory."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from benchmarks.load import wait_until

PLACE = "BENCHMARK_STARTS"  # the environment variable that names the file
_CELL = 8


class SharedStarts:
    """The first start of each task by index, in nanoseconds of the monotonic clock, which all processes share.

    Two workers that start one task at the same moment may count as one start; events count them exactly.
    """

    def __init__(self, place: Path, capacity: int | None = None) -> None:
        """Make the file for so many tasks, or open one that is there."""
        if capacity is not None:
            place.write_bytes(bytes(2 * capacity * _CELL))
        descriptor = os.open(place, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        cells = memoryview(self._memory).cast("q")
        self._capacity = len(cells) // 2
        self.first_ns, self._again = cells[: self._capacity], cells[self._capacity :]
        self._seen = 0

    def note(self, index: int) -> None:
        """The task is started now."""
        if self.first_ns[index]:
            self._again[index] += 1
        else:
            self.first_ns[index] = time.perf_counter_ns()

    @property
    def started(self) -> int:
        """How many tasks were started at least once."""
        return self._capacity - self.first_ns.tolist().count(0)

    @property
    def started_again(self) -> int:
        """How many tasks were started more than once."""
        return self._capacity - self._again.tolist().count(0)

    @property
    def duplicates(self) -> int:
        """How many starts there were beyond the first ones."""
        return sum(self._again)

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Return once the first `count` tasks were started, or after `timeout_s`; whether they were."""

        def has_all() -> bool:
            while self._seen < count and self.first_ns[self._seen]:
                self._seen += 1
            return self._seen >= count

        return wait_until(has_all, timeout_s)
