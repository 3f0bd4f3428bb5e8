"""How a process ends in which handlers may still be running in threads that nobody can stop."""

from __future__ import annotations

import os
import sys
import threading
import time

import structlog

LEFTOVER_S = 1.0  # how long threads that are left at the end may take before the process ends without them

_log = structlog.get_logger(__name__)


def leave(code: int) -> None:
    """End the process with `code` if threads are left that would keep it alive; otherwise return."""
    give_up_at = time.monotonic() + LEFTOVER_S
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, give_up_at - time.monotonic()))
    left = [thread.name for thread in others if thread.is_alive()]
    if left:
        _log.warning("handlers did not end and are left behind", threads=left)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
