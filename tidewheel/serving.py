"""What `tidewheel dev` and `tidewheel worker` run, from start to ordered end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Protocol

import structlog

from tidewheel.app import App
from tidewheel.clock import SteadyClock
from tidewheel.codecs import codec_of
from tidewheel.embedded import Engine, EngineSettings
from tidewheel.parts import process_name
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = structlog.get_logger(__name__)


class PartDied(Exception):
    """A part of the process died; the message says why."""


class EngineGone(Exception):
    """No engine is there to work for, or it went away."""


class _Interrupted(BaseException):
    """A signal came before all was up."""


class _Stops:
    """The handler of the signals: before all is up they end the start, after it they are events."""

    def __init__(self) -> None:
        self.events: SimpleQueue[str] = SimpleQueue()  # of all queues the one that a signal handler may fill
        self.is_starting = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_starting:
            self.is_starting = False
            raise _Interrupted
        self.events.put("signal")


class Process(Protocol):
    """What can be served: it starts, works in threads of its own, and is stopped."""

    @property
    def failure(self) -> BaseException | None:
        """What ended it, if something did."""

    def start(self) -> None:
        """Return once it works. Raises what keeps it from that; then nothing is left."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it fails; whether it did."""

    def stop(self, grace_s: float | None = None) -> None:
        """End in order. `grace_s` shortens the time that what runs may take."""

    def hurry(self) -> None:
        """Shorten the grace of a `stop` that is under way to nothing."""


def serve(app: App | None, settings: EngineSettings, on_ready: Callable[[Engine], None]) -> None:
    """Run an engine until SIGTERM or SIGINT, as `serve_process` does."""
    engine = Engine(app, settings)
    serve_process("engine", engine, lambda: on_ready(engine), settings.grace_s)


def serve_process(what: str, process: Process, on_ready: Callable[[], None], grace_s: float) -> None:
    """Run it until SIGTERM or SIGINT, then stop it in order; a second signal shortens the grace to nothing.

    Raises what keeps it from starting, PartDied if one of its parts dies. From the main thread only.
    """
    stops = _Stops()
    with _signals(stops):
        try:
            process.start()
            stops.is_starting = False
        except _Interrupted:
            process.stop(0)
            _log.info("stopped before all was up")
            return
        on_ready()
        _watch(process.wait, "failure", stops.events)
        is_failed = stops.events.get() == "failure"
        if not is_failed:
            _log.info("stopping: what runs may end within the grace", grace_s=grace_s)
        _watch(lambda: process.stop(0 if is_failed else None), "stopped", stops.events)
        _await_end(stops.events, process.hurry)
    if process.failure is not None:
        reason = str(process.failure) or type(process.failure).__name__
        raise PartDied(f"a part of the {what} died: {reason}") from process.failure
    _log.info("stopped")


def _watch(wait: Callable[[], object], event: str, events: SimpleQueue[str]) -> None:
    def run() -> None:
        try:
            wait()
        finally:
            events.put(event)

    threading.Thread(target=run, name=f"tidewheel-{event}", daemon=True).start()


def _await_end(events: SimpleQueue[str], hurry: Callable[[], None]) -> None:
    """Every part of the end has a deadline of its own, so this ends too."""
    while (event := events.get()) != "stopped":
        if event == "signal":
            _log.warning("hurrying: what runs is given back at once")
            hurry()


def work(
    app: App,
    name: str,
    data: Path,
    *,
    slots: int,
    grace_s: float,
    on_ready: Callable[[WorkerSettings], None],
    registry: str | None = None,
) -> None:
    """Run a further worker of the engine that has the folder `data`, until SIGTERM or SIGINT.

    Raises EngineGone if no engine is there or it goes away, PartDied if processes can't be started, Fatal else.
    """
    from infra.remote import SOCKET_NAME, RemoteLog, SchedulerGone

    settings = WorkerSettings(
        worker_id=process_name(),
        queues=tuple(sorted({handler.queue for handler in app.registry})),
        slots=slots,
        app=name,
        grace_ms=round(grace_s * 1000),
        linger_ms=0,  # what was sent outlives this process, what lingers does not
    )
    try:
        with ExitStack() as files:
            codec = codec_of(registry, files)
            log = RemoteLog(data / SOCKET_NAME)
            worker = WorkerRuntime(log, codec, app.registry, SteadyClock(), settings, log.facts.shards)
            with _signals(lambda *_: worker.stop()):
                on_ready(settings)
                worker.run()
    except SchedulerGone as error:
        raise EngineGone(str(error)) from error
    except RuntimeError as error:
        raise PartDied(str(error)) from error
    _log.info("stopped")


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
