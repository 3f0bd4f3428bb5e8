"""An engine in a process of its own: `python -m tests.serving '{"data": …, "app": "module:app"}'` (see harness.Served).

It says its address in one line and ends in order at SIGTERM, at once at the second one.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from scheduler.core.shard import ShardSettings
from tidewheel import Engine, EngineSettings


def engine_of(settings: dict[str, Any]) -> Engine:
    """The engine that the settings describe, not started."""
    module, _, attribute = settings["app"].partition(":")
    app = getattr(importlib.import_module(module), attribute)
    shard = ShardSettings(**settings.pop("shard", {}))
    return Engine(app, EngineSettings(**{**settings, "data": Path(settings["data"]), "shard": shard}))


def main(settings: dict[str, Any]) -> None:
    """Serve until told to stop."""
    engine = engine_of(settings)
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            engine.hurry()
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    with engine:
        sys.stdout.write(json.dumps({"address": engine.address}) + "\n")
        sys.stdout.flush()
        stop.wait()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
