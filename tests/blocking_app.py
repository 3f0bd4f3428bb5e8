"""A task type whose handler blocks its thread, for as long as the test likes."""

from __future__ import annotations

import time
from pathlib import Path

from tests.harness import LOOK_EVERY_S, note
from tidewheel import App, current_context

app = App()


@app.task(name="block")
def block(journal: str, gate: str) -> None:
    """Hold a thread until there is a file `gate`; leave a line with the attempt's number at the start."""
    note(journal, f"{current_context().task_id} {current_context().attempt}")
    while not Path(gate).exists():
        time.sleep(LOOK_EVERY_S)


@app.task(name="pass")
def pass_by(journal: str) -> None:
    """Leave a line, nothing else."""
    note(journal, f"{current_context().task_id} {current_context().attempt}")
