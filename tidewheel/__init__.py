"""Tidewheel: a durable, event-sourced task scheduler.

    from tidewheel import App

    app = App()

    @app.task()
    def thumbnail(path: str, width: int = 200) -> str: ...

    thumbnail.submit("photo.jpg")

`tidewheel dev module:app` runs it; docs/GUIDE.md tells the rest.
"""

from __future__ import annotations

from tidewheel._neighbours import check_neighbours

check_neighbours()

from schemas.messages import Backoff, Jitter, Priority, Status  # noqa: E402 (the check must come first)
from tidewheel.app import App, TaskType  # noqa: E402
from tidewheel.embedded import Engine, EngineSettings  # noqa: E402
from tidewheel.errors import (  # noqa: E402
    NotSubmitted,
    ResultNotKept,
    ResultTimeout,
    TaskFailed,
    TaskNotFound,
    TaskWasCancelled,
    TidewheelError,
)
from tidewheel.handles import TaskHandle  # noqa: E402
from tidewheel.options import Retry  # noqa: E402
from workers.context import Context, current_context  # noqa: E402
from workers.errors import PermanentError, RetryableError, Snooze, TaskCancelled  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "App",
    "TaskType",
    "TaskHandle",
    "Retry",
    "Context",
    "current_context",
    "PermanentError",
    "RetryableError",
    "Snooze",
    "TaskCancelled",
    "TidewheelError",
    "NotSubmitted",
    "TaskFailed",
    "TaskWasCancelled",
    "TaskNotFound",
    "ResultTimeout",
    "ResultNotKept",
    "Priority",
    "Status",
    "Backoff",
    "Jitter",
    "Engine",
    "EngineSettings",
]
