"""The pool of processes: the one executor whose handlers can be killed.

Children are started by exec, never by fork alone, since the worker has threads and connections; so each imports the
application by its name. A child performs one call at a time. One that is made to stop, or that dies, is replaced,
and its whole process group is killed, so that nothing that its handler started is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

from schemas.messages import ReadyTask
from workers.calls import Call, Unit
from workers.execution import Crashed, GivenBack, Outcome
from workers.executors import Deliver
from workers.registry import Registry
from workers.wire import Done, FromChild, Refused, Run, Saved, Stop, ToChild, Up, frame, from_child

log = logging.getLogger(__name__)

OPEN_S = 30.0  # importing an application takes seconds at worst
RESPAWN_S = 2.0  # between tries, if children die before they are up
CLOSE_S = 2.0  # from SIGTERM to SIGKILL when the pool is closed
EXIT_POLL_S = 0.1  # where the system has no pidfd, ends of children are noticed by asking
_BOOT = "import sys; sys.path[:] = {path!r}; from workers.child import main; main({descriptor}, {app!r}, {path!r})"


class _State(Enum):
    STARTING = auto()
    IDLE = auto()
    BUSY = auto()
    STOPPING = auto()  # told to stop: to be killed as soon as its call ends


class _Child:
    """A process, the socket to it, and what it does."""

    def __init__(self, app: str) -> None:
        ours, theirs = socket.socketpair()
        path = [entry or os.getcwd() for entry in sys.path]
        code = _BOOT.format(path=path, descriptor=theirs.fileno(), app=app)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.connection = ours
        self.exit_descriptor = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None
        self.frames = from_child()
        self.unsent = bytearray()
        self.state = _State.STARTING
        self.call: Call | None = None

    def send(self, message: ToChild) -> None:
        """Send without waiting; what doesn't fit is kept for `flush`."""
        self.unsent += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send what is left. A broken connection is noticed as the child's end."""
        try:
            while self.unsent:
                sent = self.connection.send(self.unsent)
                del self.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and all that it started. The process is not reaped yet, so its number is its own."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)

    def reap(self) -> str:
        """Kill what is left of the group, collect the exit status and say what it means."""
        self.signal_group(signal.SIGKILL)
        status = self.process.wait()
        self.connection.close()
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
        if status >= 0:
            return f"exited with status {status} without an outcome"
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"was killed by signal {-status}"


class ProcessExecutor:
    """Runs functions, and coroutines of their own loop, in child processes."""

    def __init__(
        self,
        size: int,
        app: str,
        registry: Registry,
        deliver: Deliver,
        save: Callable[[ReadyTask, bytes], None],
        on_ready: Callable[[], None],
    ) -> None:
        """`app` is `module:attribute`; `on_ready` is called when a child can take calls (again)."""
        self._size = size
        self._app = app
        self._needed = {handler.name for handler in registry if handler.executor == "process"}
        self._deliver = deliver
        self._save = save
        self._on_ready = on_ready
        self._lock = threading.RLock()
        self._children: set[_Child] = set()
        self._by_call: dict[Call, _Child] = {}
        self._first_up = threading.Event()
        self._refusal: str | None = None
        self._respawn_at = 0.0
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._supervise, name="tidewheel-pool", daemon=True)

    @property
    def capacity(self) -> int:
        """Children that are up and not told to stop."""
        with self._lock:
            return sum(child.state in (_State.IDLE, _State.BUSY) for child in self._children)

    @property
    def abandoned(self) -> int:
        """Always 0: a process can be killed."""
        return 0

    def open(self) -> None:
        """Start the children and wait until one is up. RuntimeError: the application can't be imported there."""
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        with self._lock:
            for _ in range(self._size):
                self._spawn()
        self._thread.start()
        self._first_up.wait(OPEN_S)
        if self._refusal is not None or not self.capacity:
            reason = self._refusal or f"none was up after {OPEN_S:g} s"
            self.close()
            raise RuntimeError(f"processes for the handlers of {self._app!r} can't be started: {reason}")

    def start(self, units: Sequence[Unit]) -> None:
        """Give each call to an idle child."""
        calls = [call for unit in units for call in unit.calls]  # handlers of batches are not registered for processes
        lost: list[tuple[Call, Outcome]] = []
        with self._lock:
            idle = [child for child in self._children if child.state is _State.IDLE]
            for call in calls:
                if not idle:  # a child died since the caller looked
                    lost.append((call, GivenBack("the process for it died before it began")))
                    continue
                child = idle.pop()
                child.state = _State.BUSY
                child.call = call
                self._by_call[call] = child
                child.send(Run(call.ready, call.ends_at))
        if lost:
            self._deliver(lost)
        self._wake_supervisor()

    def cancel(self, call: Call) -> None:
        """Let the handler see that it is to stop."""
        with self._lock:
            child = self._by_call.get(call)
            if child is not None:
                child.send(Stop())

    def terminate(self, call: Call) -> None:
        """SIGTERM to the whole process group; the handler sees it as TaskCancelled."""
        with self._lock:
            child = self._by_call.get(call)
            if child is not None and child.state is _State.BUSY:
                child.state = _State.STOPPING
                child.signal_group(signal.SIGTERM)

    def kill(self, call: Call) -> bool:
        """SIGKILL to the whole process group."""
        with self._lock:
            child = self._by_call.pop(call, None)
            if child is not None:
                child.call = None
                child.state = _State.STOPPING
                child.signal_group(signal.SIGKILL)
        return False

    def close(self) -> None:
        """SIGTERM, and SIGKILL for what is still there after a moment."""
        if self._is_closing:
            return
        self._is_closing = True
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            for child in self._children:
                child.state = _State.STOPPING
                child.signal_group(signal.SIGTERM)
        self._wake_supervisor()
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
            with self._lock:
                for child in self._children:
                    child.signal_group(signal.SIGKILL)
            self._thread.join(CLOSE_S)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    # --- the supervising thread ---------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        while not (self._is_closing and not self._children):
            try:
                self._watch()
                self._maybe_respawn()
            except Exception:
                log.exception("the supervisor of the process pool failed at a step and goes on")
                time.sleep(EXIT_POLL_S)

    def _watch(self) -> None:
        for key, events in self._selector.select(self._pause_s()):
            if key.fileobj is self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
                continue
            child: _Child = key.data
            if key.fileobj is not child.connection:
                self._bury(child)
            elif child in self._children:
                self._talk(child, events)
        if not hasattr(os, "pidfd_open"):
            for child in [child for child in self._children if child.process.poll() is not None]:
                self._bury(child)
        self._watch_unsent()

    def _pause_s(self) -> float:
        if not hasattr(os, "pidfd_open"):
            return EXIT_POLL_S
        is_short = not self._is_closing and len(self._children) < self._size
        return EXIT_POLL_S if is_short else 1.0

    def _watch_unsent(self) -> None:
        with self._lock:
            for child in self._children:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.unsent else 0)
                if self._selector.get_key(child.connection).events != events:
                    self._selector.modify(child.connection, events, child)

    def _talk(self, child: _Child, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with self._lock:
                child.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            content = child.connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            content = b""
        if not content:
            # Without a connection it is of no use; its end is noticed as any other.
            child.signal_group(signal.SIGKILL)
            return
        for message in child.frames.feed(content):
            self._hear(child, message)

    def _hear(self, child: _Child, message: FromChild) -> None:
        match message:
            case Up(task_types=task_types):
                self._welcome(child, set(task_types))
            case Refused(reason=reason):
                self._refuse(child, reason)
            case Saved(checkpoint=checkpoint):
                call = child.call
                if call is not None:
                    self._save(call.ready, checkpoint)
            case Done(outcome=outcome):
                self._finish(child, outcome)

    def _welcome(self, child: _Child, task_types: set[str]) -> None:
        missing = sorted(self._needed - task_types)
        if missing:
            self._refuse(child, f"{self._app!r} as imported there has no task {', '.join(missing)}")
            return
        with self._lock:
            child.state = _State.IDLE
        self._first_up.set()
        self._on_ready()

    def _refuse(self, child: _Child, reason: str) -> None:
        if not self._first_up.is_set():
            self._refusal = reason
        log.error("a process of the pool could not start: %s", reason)
        with self._lock:
            child.state = _State.STOPPING
            child.signal_group(signal.SIGKILL)
        self._respawn_at = time.monotonic() + RESPAWN_S
        self._first_up.set()

    def _finish(self, child: _Child, outcome: Outcome) -> None:
        with self._lock:
            call, child.call = child.call, None
            if call is not None:
                self._by_call.pop(call, None)
            if child.state is _State.BUSY:
                child.state = _State.IDLE
            else:
                child.signal_group(signal.SIGKILL)  # what the handler started may have ignored SIGTERM
        if call is not None:
            self._deliver([(call, outcome)])

    def _bury(self, child: _Child) -> None:
        self._read_last_words(child)
        with self._lock:
            self._children.discard(child)
            self._selector.unregister(child.connection)
            if child.exit_descriptor is not None:
                self._selector.unregister(child.exit_descriptor)
            end = child.reap()
            call, child.call = child.call, None
            if call is not None:
                self._by_call.pop(call, None)
        if child.state is _State.STARTING:
            log.error("a process of the pool ended before it was up: it %s", end)
            self._respawn_at = time.monotonic() + RESPAWN_S
        if call is not None:
            self._deliver([(call, Crashed(f"process {child.process.pid} {end}"))])

    def _read_last_words(self, child: _Child) -> None:
        """An outcome that was sent before the end counts."""
        with contextlib.suppress(OSError):
            while content := child.connection.recv(1 << 18):
                for message in child.frames.feed(content):
                    self._hear(child, message)

    def _maybe_respawn(self) -> None:
        with self._lock:
            if self._is_closing or time.monotonic() < self._respawn_at:
                return
            while len(self._children) < self._size:
                self._spawn()

    def _spawn(self) -> None:
        child = _Child(self._app)
        self._children.add(child)
        self._selector.register(child.connection, selectors.EVENT_READ, child)
        if child.exit_descriptor is not None:
            self._selector.register(child.exit_descriptor, selectors.EVENT_READ, child)

    def _wake_supervisor(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already
            self._wake_write.send(b"\0")
