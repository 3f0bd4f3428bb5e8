"""A view that is connected in the background: what needs no view must not wait for one that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from scheduler.ports import Batch, Position, ScheduleFilter, SchedulePage, TaskFilter, TaskPage, TaskRow, View
from schemas.errors import Retriable, TidewheelIOError
from schemas.messages import Schedule

RETRY_S = 1.0  # between tries to connect
REPEAT_LOG_S = 10.0  # between two lines that say why it is not connected

_log = structlog.get_logger(__name__)


class AwaitedView:
    """Implements `ports.View` by the one that `connect` gives; until it gives one, every call raises Retriable.

    What is Fatal at the start ends the start: whoever starts a process is there to mend it. Later the process is of use
    without the view, so then it is only said, and tried again: tables and logins may be mended on the other side.
    """

    def __init__(self, connect: Callable[[], View]) -> None:
        """Try once, and go on in the background if nobody answers. Raises Fatal."""
        self._connect = connect
        self._view: View | str  # or why it is not there
        self._lock = threading.Lock()  # of the view, and of whether it is still wanted
        self._closing = threading.Event()
        try:
            self._view = connect()
        except Retriable as error:
            self._view = str(error)
            # A thread that nobody waits for: to learn that a host is silent takes longer than an end may take.
            threading.Thread(target=self._go_on, name="tidewheel-view-connect", daemon=True).start()

    @property
    def trouble(self) -> str | None:
        """Why it is not connected yet, and what to do; None: it is."""
        view = self._view
        return view if isinstance(view, str) else None

    def _go_on(self) -> None:
        tell_at = time.monotonic()
        while self.trouble is not None:
            if time.monotonic() >= tell_at:
                tell_at += REPEAT_LOG_S
                _log.warning("waiting for the view", reason=self.trouble)
            if self._closing.wait(RETRY_S):
                return
            try:
                self._take(self._connect())
            except TidewheelIOError as error:
                self._view = str(error)
            except Exception as error:  # the edge of the thread: whatever it was, readers must be told
                self._view = f"connecting failed, which is a defect: {error!r}"
                _log.exception("connecting the view failed")

    def _take(self, view: View) -> None:
        with self._lock:
            if not self._closing.is_set():
                self._view = view
                _log.info("the view is connected")
                return
        view.close()

    def _there(self) -> View:
        view = self._view
        if isinstance(view, str):
            raise Retriable(view)
        return view

    def positions(self) -> Mapping[int, Position]:
        """Where to go on, by partition."""
        return self._there().positions()

    def apply(self, batches: Sequence[Batch]) -> None:
        """Upsert rows, move positions."""
        self._there().apply(batches)

    def task(self, task_id: str) -> TaskRow | None:
        """The row of a task."""
        return self._there().task(task_id)

    def rows(self, task_ids: Iterable[str]) -> Mapping[str, TaskRow]:
        """The rows of several tasks."""
        return self._there().rows(task_ids)

    def tasks(self, wanted: TaskFilter, limit: int, cursor: str | None = None) -> TaskPage:
        """A page of rows."""
        return self._there().tasks(wanted, limit, cursor)

    def count(self, wanted: TaskFilter) -> int:
        """How many rows match."""
        return self._there().count(wanted)

    def schedule(self, schedule_id: str) -> Schedule | None:
        """A schedule."""
        return self._there().schedule(schedule_id)

    def schedule_rows(self, schedule_ids: Iterable[str]) -> Mapping[str, Schedule]:
        """Several schedules."""
        return self._there().schedule_rows(schedule_ids)

    def schedules(self, wanted: ScheduleFilter, limit: int, cursor: str | None = None) -> SchedulePage:
        """A page of schedules."""
        return self._there().schedules(wanted, limit, cursor)

    def close(self) -> None:
        """Connect no more, and close what is connected; idempotent."""
        with self._lock:
            self._closing.set()
        view = self._view
        if not isinstance(view, str):
            view.close()
