"""An engine in a process of its own: `python -m tests.serving '{"data": …, "app": "module:app"}'` (see harness.Served).

As `tidewheel dev` runs it, but with all settings; it says its address in one line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scheduler.core.shard import ShardSettings
from tidewheel import Engine, EngineSettings
from tidewheel.leaving import leave
from tidewheel.loading import load_app
from tidewheel.logs import configure_logs
from tidewheel.serving import serve


def main(given: dict[str, Any]) -> None:
    """Serve until told to stop."""
    shard = ShardSettings(**given.pop("shard", {}))
    settings = EngineSettings(**{**given, "data": Path(given["data"]), "shard": shard})
    configure_logs("info", is_json=False)
    serve(load_app(given["app"]), settings, announce)
    leave(0)


def announce(engine: Engine) -> None:
    """Say where it is."""
    sys.stdout.write(json.dumps({"address": engine.address}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
