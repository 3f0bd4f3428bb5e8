"""The application that workers of a measured cluster run: tasks that do nothing but say when they were started."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import shared_keys
from benchmarks.shared_keys import SharedKeys
from benchmarks.shared_starts import PLACE, SharedStarts
from benchmarks.stage import holding, keyed_in, noop_app

_starts = SharedStarts(Path(os.environ[PLACE]))
app, noop = noop_app(_starts.note)
hold = holding(app, _starts.note)
if shared_keys.PLACE in os.environ:
    _keys = SharedKeys(Path(os.environ[shared_keys.PLACE]))
    keyed = keyed_in(app, _starts.note, _keys.enter, _keys.leave)
