"""The application that workers of a measured cluster run: a task that does nothing but say when it was started."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.shared_starts import PLACE, SharedStarts
from benchmarks.stage import noop_app

app, noop = noop_app(SharedStarts(Path(os.environ[PLACE])).note)
