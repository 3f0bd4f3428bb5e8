"""An application for `tidewheel dev` in a process of its own."""

from __future__ import annotations

import asyncio
import threading
import time

from tidewheel import App, TaskCancelled

app = App()


@app.task(name="served.double")
async def double(n: int) -> int:
    return 2 * n


@app.task(name="served.wait")
async def wait() -> None:
    """Keep a slot until one is told to stop."""
    await asyncio.Event().wait()


@app.task(name="served.leave-thread")
def leave_thread() -> None:
    """Start a thread that would keep the interpreter alive."""
    threading.Thread(target=time.sleep, args=(300,), name="left-by-a-handler", daemon=False).start()


@app.task(name="served.block")
def block() -> None:
    """Run for longer than any grace, whatever one is told."""
    give_up_at = time.monotonic() + 300
    while time.monotonic() < give_up_at:
        try:
            time.sleep(300)
        except TaskCancelled:
            continue
