"""A process of the pool: imports the application, then performs one attempt at a time.

Handlers run in the main thread; another thread listens to the worker. If the worker goes away, so does this process,
with all processes that its handlers started.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from schemas.messages import ReadyTask, Verdict
from workers import execution
from workers.calls import Call, perform, perform_async
from workers.errors import TaskCancelled
from workers.execution import Cancelled, Outcome
from workers.registry import Registry
from workers.wire import Done, FromChild, Refused, Run, Saved, Stop, Up, frame, to_child


def load_registry(app: str) -> Registry:
    """The registry that `module:attribute` names: a Registry, or an object whose `registry` is one.

    Raises ValueError for another form or object, and whatever importing the module raises.
    """
    module_name, separator, attribute = app.partition(":")
    if not (module_name and separator and attribute):
        raise ValueError(f"app: {app!r} is not allowed; it must be module:attribute, for instance shop.tasks:app")
    found: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    registry = found if isinstance(found, Registry) else getattr(found, "registry", None)
    if not isinstance(registry, Registry):
        raise ValueError(f"app: {app!r} is a {type(found).__name__}, which has no registry of tasks")
    return registry


def main(descriptor: int, app: str, path: Sequence[str]) -> None:
    """Serve the worker at the other end of the socket `descriptor` until it goes away."""
    sys.path[:] = list(path)
    with socket.socket(fileno=descriptor) as connection:
        try:
            registry = load_registry(app)
        except BaseException as error:
            told = execution.error_of(error, Verdict.UNKNOWN)
            connection.sendall(frame(Refused(f"{told.type}: {told.message}")))
            return
        _Child(connection, registry).serve()


class _Child:
    def __init__(self, connection: socket.socket, registry: Registry) -> None:
        self._connection = connection
        self._registry = registry
        self._runs: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._call: Call | None = None
        self._cancel_coroutine: Callable[[], object] | None = None
        self._sending = threading.Lock()  # handlers may save checkpoints from threads of their own

    def serve(self) -> None:
        """Perform what comes, for ever."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the worker
        threading.Thread(target=self._listen, name="tidewheel-child", daemon=True).start()
        self._send(Up(self._registry.names()))
        while True:
            run = self._runs.get()
            try:
                outcome = self._perform(run)
            except TaskCancelled:  # SIGTERM just before or after the handler's own code
                outcome = Cancelled()
            self._call = None
            self._send(Done(outcome))

    def _perform(self, run: Run) -> Outcome:
        handler = self._registry.get(run.ready.task_type)
        if handler is None:
            return execution.unknown_type(run.ready.task_type, self._registry.names())
        call = Call(run.ready, handler, run.ends_at, self._save)
        self._call = call
        if not handler.is_coroutine:
            return perform(call, _now_us)
        try:
            return asyncio.run(self._drive(call))
        finally:
            self._cancel_coroutine = None
            signal.signal(signal.SIGTERM, self._on_terminate)

    async def _drive(self, call: Call) -> Outcome:
        loop = asyncio.get_running_loop()
        task = loop.create_task(perform_async(call, _now_us))
        await asyncio.sleep(0)  # a task that is cancelled before its first step would end without an outcome
        self._cancel_coroutine = lambda: loop.call_soon_threadsafe(task.cancel)
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        if call.context.is_cancelled:
            task.cancel()
        return await task

    def _stop(self) -> None:
        call, cancel = self._call, self._cancel_coroutine
        if call is not None:
            call.context.mark_cancelled()
        if cancel is not None:
            cancel()

    def _save(self, ready: ReadyTask, checkpoint: bytes) -> None:
        call = self._call
        if call is not None and call.ready is ready:
            self._send(Saved(checkpoint))

    def _send(self, message: FromChild) -> None:
        with self._sending:
            self._connection.sendall(frame(message))

    def _on_terminate(self, signum: int, interrupted: FrameType | None) -> None:
        """SIGTERM becomes TaskCancelled in the handler, so that it can clean up before SIGKILL follows."""
        if self._call is None:
            os._exit(0)  # idle: the worker closes the pool
        self._call.context.mark_cancelled()
        raise TaskCancelled("the worker stops this attempt")

    def _listen(self) -> None:
        frames = to_child()
        try:
            while content := self._connection.recv(65536):
                for message in frames.feed(content):
                    if isinstance(message, Run):
                        self._runs.put(message)
                    elif isinstance(message, Stop):
                        self._stop()
        except OSError:
            pass  # the worker is gone, which means the same as the end of the stream
        finally:
            os.killpg(0, signal.SIGKILL)


def _now_us() -> int:
    return time.time_ns() // 1000
