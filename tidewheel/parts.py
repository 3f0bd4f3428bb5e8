"""The parts of a process: threads with names that work together. If one of them dies, all are to be stopped."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from random import SystemRandom

import structlog

from schemas.errors import Fatal

LOOK_EVERY_S = 0.002  # between looks for what a part brings about

_log = structlog.get_logger(__name__)


class Parts:
    """Threads, and the first failure of any of them."""

    def __init__(self, whole: str) -> None:
        """`whole` is what they are parts of, for the log."""
        self._whole = whole
        self.stopping = threading.Event()  # what ends after it was set has not failed
        self.failure: BaseException | None = None
        self._failed = threading.Event()
        self._threads: list[threading.Thread] = []

    def run(self, part: str, run: Callable[[], None]) -> None:
        """Run a part in a thread of its own."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # the edge of the part's loop: whatever it was, the process must not go on
                self.failure = self.failure or error
                _log.critical(f"a part of the {self._whole} died", part=part, reason=str(error), exc_info=error)
            finally:
                if not self.stopping.is_set() and self.failure is not None:
                    self._failed.set()

        thread = threading.Thread(target=guarded, name=part, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a part fails; whether one did."""
        return self._failed.wait(timeout_s)

    def wait_until(self, what: str, is_so: Callable[[], bool], within_s: float) -> None:
        """Wait for what a part brings about. Raises the failure of a part; Fatal: not within the time."""
        give_up_at = time.monotonic() + within_s
        while not is_so():
            if self._failed.wait(LOOK_EVERY_S):
                raise self.failure or Fatal(f"a part died before {what}")
            if time.monotonic() > give_up_at:
                raise Fatal(f"after {within_s:.0f} s it is still not so that {what}")

    def is_alive(self, part: str) -> bool:
        """Whether the thread of a part runs."""
        return any(thread.name == part and thread.is_alive() for thread in self._threads)

    def join(self, part: str, timeout_s: float) -> None:
        """Wait for the end of a part; nothing happens if there is none of the name."""
        for thread in self._threads:
            if thread.name == part:
                thread.join(max(0.0, timeout_s))

    def join_all(self, timeout_s: float) -> None:
        """Wait for the end of all parts, for so long of each, and forget them."""
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.error("a part did not stop", part=thread.name)
        self._threads.clear()


def process_name() -> str:
    """Unique to this start of this process: the fencing of attempts goes by number, the accounting by this name."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:64]
    return f"{host or 'host'}-{os.getpid()}-{SystemRandom().getrandbits(32):08x}"
