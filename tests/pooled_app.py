"""Task types that run in processes of the pool, and that only a kill ends; what they do is to be read in files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

from tests.harness import note
from tidewheel import App, current_context

app = App()
LONG_S = 60  # longer than any test waits

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"


@app.task(name="note", executor="process")
def write(journal: str, text: str) -> str:
    """Leave a line with the attempt's number."""
    note(journal, f"{text} {current_context().attempt}")
    return text


@app.task(name="kill", executor="process")
def kill(journal: str) -> None:
    """Die without a word."""
    note(journal, f"killing {current_context().attempt}")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="busy", executor="process")
def busy(journal: str) -> None:
    """Never give up the processor."""
    note(journal, f"pid {os.getpid()}")
    while True:
        pass


@app.task(name="blocked", executor="process")
def blocked(journal: str) -> None:
    """A call into C that keeps the interpreter's lock."""
    note(journal, f"pid {os.getpid()}")
    ctypes.PyDLL(None).sleep(LONG_S)


@app.task(name="swallowing", executor="process")
def swallowing(journal: str) -> None:
    """Let no exception through."""
    note(journal, f"pid {os.getpid()}")
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(LONG_S)


@app.task(name="with-child", executor="process")
def with_child(journal: str) -> None:
    """Wait for a process that ignores SIGTERM."""
    child = subprocess.Popen([sys.executable, "-c", _STUBBORN], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    note(journal, f"pid {child.pid}")
    time.sleep(LONG_S)


@app.task(name="just-in-time", executor="process")
def just_in_time(seconds: float) -> str:
    """End at about the limit."""
    time.sleep(seconds)
    return "in time"
