"""The projector of an engine: a thread if the view is in memory, a process of its own if it is a file.

Folding the events is a quarter of the work for a task, and all threads of a process share one interpreter lock. So the
view of an engine on disk is written by a child process, which reads the events over the engine's socket; the engine
only reads the file. The child ends with its standard input: that is how the engine stops it, and what a killed engine
leaves of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from infra.remote import RemoteLog, SchedulerGone
from infra.sqlite import SqliteView
from scheduler.projector import Projector
from schemas.errors import Fatal, Retriable, TidewheelIOError
from tidewheel import child as children
from tidewheel.codecs import codec_of
from tidewheel.logs import LogStyle, apply_style, style
from tidewheel.tuning import tuned

WATCH_S = 0.25  # between looks at the child and at its progress
_WHAT = "the projector's process"

_log = structlog.get_logger(__name__)


class Projection(Protocol):
    """What an engine needs of its projector."""

    def run(self, stop: threading.Event) -> None:
        """Work until `stop` is set. Raises what ended it before."""

    def stalled_s(self) -> float:
        """Seconds since the view moved, or had nothing to catch up with."""


class _Task(msgspec.Struct, frozen=True):
    """What a child is started with."""

    socket: str
    view: str
    shards: int
    registry: str | None
    logs: LogStyle


class ProjectorProcess:
    """The projector as a child of this process."""

    def __init__(
        self,
        socket: Path,
        view: Path,
        shards: int,
        registry: str | None,
        *,
        applied: Callable[[], int],
        lag: Callable[[], int],
    ) -> None:
        """`applied` and `lag` count the events that are in the view and those that are not yet."""
        self._task = _Task(str(socket.resolve()), str(view.resolve()), shards, registry, style())
        self._applied, self._lag = applied, lag
        self._applied_before = 0
        self._moved_at = time.monotonic()

    def stalled_s(self) -> float:
        """Seconds since the view moved, or had nothing to catch up with."""
        return time.monotonic() - self._moved_at

    def run(self, stop: threading.Event) -> None:
        """Start the child and watch it until `stop` is set. Fatal: it could not be started, or ended by itself."""
        child = children.spawn(_WHAT, __name__, msgspec.json.encode(self._task))
        with child:
            try:
                while not stop.wait(WATCH_S):
                    if child.poll() is not None:
                        raise Fatal(f"{_WHAT} ended: {children.end_of(child.returncode)}")
                    self._look()
            finally:
                children.end(child, "the projector")

    def _look(self) -> None:
        with contextlib.suppress(Retriable):  # a view that cannot be read just now has not moved
            applied = self._applied()
            if applied != self._applied_before or not self._lag():
                self._moved_at = time.monotonic()
            self._applied_before = applied


# --- in the child -----------------------------------------------------------------------------------------------------


def main(task: bytes) -> None:
    """Project until standard input ends or the engine goes away."""
    stop = threading.Event()
    logs: list[RemoteLog] = []  # once it is connected

    def end() -> None:
        stop.set()
        for log in logs:
            log.wake()

    children.begin(end)
    given = msgspec.json.decode(task, type=_Task)
    apply_style(given.logs)
    try:
        with contextlib.ExitStack() as files:
            files.enter_context(tuned())
            _project(given, files, stop, logs)
    except SchedulerGone:
        return
    except TidewheelIOError as error:
        _log.error("the projector cannot go on", reason=str(error))
        sys.exit(children.TOLD)


def _project(task: _Task, files: contextlib.ExitStack, stop: threading.Event, logs: list[RemoteLog]) -> None:
    codec = codec_of(task.registry, files)
    view = files.enter_context(contextlib.closing(SqliteView(task.view)))
    log = files.enter_context(contextlib.closing(RemoteLog(Path(task.socket))))
    logs.append(log)
    Projector(log, view, codec, task.shards).run(stop)
