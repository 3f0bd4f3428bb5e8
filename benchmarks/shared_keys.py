"""Who is at work under each key, noted by workers in other processes: a file that all of them have in memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

PLACE = "BENCHMARK_KEYS"  # the environment variable that names the file
_CELL = 8


class SharedKeys:
    """For each key the attempt that is at work, and how often another one was there at the same time."""

    def __init__(self, place: Path, keys: int | None = None) -> None:
        """Make the file for so many keys, or open one that is there."""
        if keys is not None:
            place.write_bytes(bytes((keys + 1) * _CELL))
        descriptor = os.open(place, os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._memory).cast("q")

    @property
    def met(self) -> int:
        """How often two were at work under one key, as far as they saw each other."""
        return self._cells[-1]

    def enter(self, key: int, index: int) -> int:
        """An attempt of a task begins; what to leave with."""
        mine = os.getpid() << 32 | index + 1
        other = self._cells[key]
        if other and other != mine and _is_alive(other >> 32):
            self._cells[-1] += 1
        self._cells[key] = mine
        return mine

    def leave(self, key: int, mine: int) -> None:
        """It ends."""
        if self._cells[key] == mine:
            self._cells[key] = 0
        else:
            self._cells[-1] += 1


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
