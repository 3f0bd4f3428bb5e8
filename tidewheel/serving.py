"""What `tidewheel dev` and `tidewheel worker` run, from start to ordered end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from random import SystemRandom
from types import FrameType
from typing import Any

import structlog

from tidewheel.app import App
from tidewheel.clock import SteadyClock
from tidewheel.codecs import codec_of
from tidewheel.embedded import Engine, EngineSettings
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

LEFTOVER_S = 1.0  # how long threads that are left at the end may take before the process ends without them
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


def serve(app: App | None, settings: EngineSettings, on_ready: Callable[[Engine], None]) -> None:
    """Run an engine until SIGTERM or SIGINT, then stop it in order; a second signal shortens the grace to nothing.

    Raises Fatal if it can't be started, PartDied if one of its parts dies. From the main thread only.
    """
    engine, stops = Engine(app, settings), _Stops()
    with _signals(stops):
        try:
            engine.start()
            stops.is_starting = False
        except _Interrupted:
            engine.stop(0)
            _log.info("stopped before all was up")
            return
        on_ready(engine)
        _watch(engine.wait, "failure", stops.events)
        is_failed = stops.events.get() == "failure"
        if not is_failed:
            _log.info("stopping: what runs may end within the grace", grace_s=settings.grace_s)
        _watch(lambda: engine.stop(0 if is_failed else None), "stopped", stops.events)
        _await_end(stops.events, engine.hurry)
    if engine.failure is not None:
        reason = str(engine.failure) or type(engine.failure).__name__
        raise PartDied(f"a part of the engine died: {reason}") from engine.failure
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
        worker_id=_process_name(),
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


def _process_name() -> str:
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:64]
    return f"{host or 'host'}-{os.getpid()}-{SystemRandom().getrandbits(32):08x}"


@contextmanager
def _signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def leave(code: int) -> None:
    """End the process with `code` if threads are left that would keep it alive; otherwise return."""
    give_up_at = time.monotonic() + LEFTOVER_S
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in others:
        thread.join(max(0.0, give_up_at - time.monotonic()))
    left = [thread.name for thread in others if thread.is_alive()]
    if left:
        _log.warning("handlers did not end and are left behind", threads=left)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
