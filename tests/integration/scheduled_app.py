"""An application that declares a schedule."""

from __future__ import annotations

from tidewheel import App

app = App(name="scheduled")


@app.cron("@hourly")
@app.task(name="hourly")
def hourly() -> None:
    """Nothing to do."""
