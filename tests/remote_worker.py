"""A worker in a process of its own, at the log of an engine that runs elsewhere.

    python -m tests.remote_worker SOCKET [hold]

`double` answers at once. `hold` says on standard output that it runs; in a worker with `hold` it never ends.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from infra.remote import RemoteLog
from schemas.codec import Codec
from tidewheel import App
from tidewheel.clock import SteadyClock
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

HEARTBEAT_MS = 200
HOLD_S = 120.0  # longer than any test
_is_holding = threading.Event()

app = App()


@app.task(name="double")
async def double(n: int) -> int:
    """Quick work."""
    return 2 * n


@app.task(name="hold")
def hold(n: int) -> int:
    """Work that is interrupted."""
    sys.stdout.write(f"{n}\n")
    sys.stdout.flush()
    if _is_holding.is_set():
        threading.Event().wait(HOLD_S)
    return n


def main(path: str, *options: str) -> None:
    """Work until the scheduler goes away."""
    if "hold" in options:
        _is_holding.set()
    settings = WorkerSettings(worker_id=f"remote-{os.getpid()}", slots=32, threads=16, heartbeat_ms=HEARTBEAT_MS)
    log = RemoteLog(Path(path))
    WorkerRuntime(log, Codec.builtin(), app.registry, SteadyClock(), settings, log.facts.shards).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
