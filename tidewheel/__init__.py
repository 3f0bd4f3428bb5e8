"""Tidewheel: a durable, event-sourced task scheduler.

    from tidewheel import App

    app = App()

    @app.task()
    def thumbnail(path: str, width: int = 200) -> str: ...

    thumbnail.submit("photo.jpg")

`tidewheel dev module:app` runs it; docs/GUIDE.md tells the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidewheel._neighbours import check_neighbours

check_neighbours()

if TYPE_CHECKING:
    from schemas.messages import Backoff, Jitter, Priority, Status
    from tidewheel.app import App, TaskType
    from tidewheel.embedded import Engine, EngineSettings
    from tidewheel.errors import (
        NotSubmitted,
        ResultNotKept,
        ResultTimeout,
        ScheduleNotFound,
        TaskFailed,
        TaskNotFound,
        TaskWasCancelled,
        TidewheelError,
    )
    from tidewheel.handles import TaskHandle
    from tidewheel.options import Debounce, Retry, Unique
    from workers.batches import Batch
    from workers.context import Context, current_context
    from workers.errors import PermanentError, RetryableError, Snooze, TaskCancelled

__version__ = "0.1.0"

__all__ = [
    "App",
    "TaskType",
    "TaskHandle",
    "Debounce",
    "Retry",
    "Unique",
    "Batch",
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
    "ScheduleNotFound",
    "ResultTimeout",
    "ResultNotKept",
    "Priority",
    "Status",
    "Backoff",
    "Jitter",
    "Engine",
    "EngineSettings",
]

# Each name is imported when it is first asked for: a worker needs no API, a command no engine.
_HOMES = {
    "schemas.messages": ("Backoff", "Jitter", "Priority", "Status"),
    "tidewheel.app": ("App", "TaskType"),
    "tidewheel.embedded": ("Engine", "EngineSettings"),
    "tidewheel.errors": (
        "NotSubmitted",
        "ResultNotKept",
        "ResultTimeout",
        "ScheduleNotFound",
        "TaskFailed",
        "TaskNotFound",
        "TaskWasCancelled",
        "TidewheelError",
    ),
    "tidewheel.handles": ("TaskHandle",),
    "tidewheel.options": ("Debounce", "Retry", "Unique"),
    "workers.batches": ("Batch",),
    "workers.context": ("Context", "current_context"),
    "workers.errors": ("PermanentError", "RetryableError", "Snooze", "TaskCancelled"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'tidewheel' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(home), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
