"""The application that workers of a measured cluster run: tasks that do nothing but say when they were started."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.shared_starts import PLACE, SharedStarts
from benchmarks.stage import holding, noop_app

_starts = SharedStarts(Path(os.environ[PLACE]))
app, noop = noop_app(_starts.note)
hold = holding(app, _starts.note)
