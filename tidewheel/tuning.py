"""Settings of the interpreter that suit the engine; they are the whole process's, so they are put back afterwards."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made before the collector looks for cycles. Tasks are many and long-lived, and none of ours form cycles: with
# the default of 700 a tenth of the time went into looking at them again and again.
GC_THRESHOLD = (50_000, 20, 50)
SWITCH_S = 0.0005  # between threads; with the default of 5 ms a commit that is done waits for whoever computes

_lock = threading.Lock()
_before: list[tuple[tuple[int, int, int], float]] = []  # what the first of several engines found
_engines = 0


@contextmanager
def tuned() -> Iterator[None]:
    """The engine's settings within the block; after the last of several blocks, those from before the first."""
    global _engines
    with _lock:
        if _engines == 0:
            _before.append((gc.get_threshold(), sys.getswitchinterval()))
            gc.set_threshold(*GC_THRESHOLD)
            sys.setswitchinterval(SWITCH_S)
        _engines += 1
    try:
        yield
    finally:
        with _lock:
            _engines -= 1
            if _engines == 0:
                threshold, switch_s = _before.pop()
                gc.set_threshold(*threshold)
                sys.setswitchinterval(switch_s)
