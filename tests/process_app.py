"""Task types for schedulers in a process of their own: what they do is to be read in files."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from tests.harness import note
from tidewheel import App, Retry, current_context

app = App()
STARTED_S = 0.2  # after so long the start is in the log; one that was not yet is not known to anyone afterwards


@app.task(name="note")
async def write(journal: str, text: str) -> str:
    """Leave a line with the attempt's number."""
    note(journal, f"{text} {current_context().attempt}")
    return text


@app.task(name="hold")
async def hold(journal: str, gate: str) -> str:
    """Run until there is a file `gate`; leave a line at the start and at the end."""
    context = current_context()
    note(journal, f"begin {context.task_id} {context.attempt}")
    try:
        while not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 (another process makes it)
            await asyncio.sleep(0.005)
    finally:
        note(journal, f"end {context.task_id} {context.attempt}")
    return context.task_id


@app.task(name="fail", retry=Retry(delay=0.0))
async def fail(journal: str) -> None:
    """Fail at every attempt."""
    note(journal, f"failing {current_context().attempt}")
    raise ConnectionError("refused")


@app.task(name="kill")
def kill(journal: str) -> None:
    """Work a little, then take the whole process down without a word."""
    time.sleep(STARTED_S)
    note(journal, f"killing {current_context().attempt}")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="kill_at_once")
async def kill_at_once(journal: str) -> None:
    """Take the whole process down before anybody can know of the start."""
    note(journal, f"killing {current_context().attempt}")
    os.kill(os.getpid(), signal.SIGKILL)
