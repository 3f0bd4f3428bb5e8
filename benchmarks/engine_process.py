"""An engine in a process of its own: what runs there, and the handle by which a benchmark starts, asks and kills it.

They talk in lines of JSON: commands on its standard input, answers on its standard output. It stops when its input
ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import TracebackType
from typing import IO, TypeVar

import msgspec
import structlog

from benchmarks.load import closed_loop, wait_until
from benchmarks.machine import processor_s, rss_mb, rss_mb_max
from benchmarks.stage import WAIT_S, Noop, Starts, blob_for, live_tasks, noop_app
from scheduler.ports import TopicPartition
from schemas.limits import BULK_MAX
from schemas.topics import TASK_EVENTS
from tidewheel import Engine

ROOT = Path(__file__).resolve().parent.parent
START_S = 330.0  # the engine itself gives up after 300
ANSWER_S = 30.0
STOP_S = 60.0
KILL_S = 10.0
BULKS_AT_ONCE = 2
DAY_S = 86_400
PARKED_INDEX = 10_000  # of all parked tasks; none of them is to start

T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is to be run. `starts_file` outlives the process; without it starts are counted in memory."""

    folder: str
    shards: int
    port: int | None = None
    starts_file: str | None = None
    capacity: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The engine works: how long its start took, without that of the interpreter."""

    load_s: float
    port: int | None
    rss_mb: float


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Ask for `Measured`."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """How the process stands."""

    rss_mb: float
    rss_mb_max: float
    cpu_s: float
    live: int
    started: int
    duplicates: int
    events: int


class Park(msgspec.Struct, frozen=True, kw_only=True, tag="park"):
    """Submit tasks in bulk, each bulk due at a random instant from tomorrow to `horizon_days`; answered by `Parked`."""

    count: int
    payload_bytes: int
    horizon_days: int
    seed: int


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """All are accepted."""

    seconds: float
    cpu_s: float


Command = Measure | Park


def quieten() -> None:
    """Only warnings of the engine, and to the standard error: the standard output is for figures."""
    structlog.reset_defaults()  # nothing may be left of what an engine in this process set before
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


# --- in the benchmark's process ---------------------------------------------------------------------------------------


class EngineProcess:
    """A running engine in another process. `restart_s` is from the process being made until it was ready."""

    def __init__(self, setup: Setup) -> None:
        """Start it and wait until it is ready. Raises ChildProcessError."""
        begun_s = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_process", msgspec.json.encode(setup).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(self._answers,), name="engine-answers", daemon=True)
        self._reader.start()
        try:
            self.ready = self._answer(Ready, START_S)
        except BaseException:
            self.kill()
            raise
        self.restart_s = time.perf_counter() - begun_s

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://127.0.0.1:{self.ready.port}"

    def measure(self) -> Measured:
        """How it stands now."""
        return self._ask(Measure(), Measured, ANSWER_S)

    def park(self, park: Park) -> Parked:
        """Have it submit tasks to itself."""
        return self._ask(park, Parked, START_S)

    def stop(self) -> None:
        """Let it finish what runs and close its files. Raises ChildProcessError if it does not."""
        with suppress(OSError):
            self._commands.close()
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise ChildProcessError(f"the engine did not stop within {STOP_S:.0f} s") from error
        finally:
            self.kill()
        if code:
            raise ChildProcessError(f"the engine ended with code {code}")

    def kill(self) -> None:
        """SIGKILL; returns when it is dead. Idempotent."""
        self._process.kill()
        self._process.wait(KILL_S)
        self._reader.join(KILL_S)
        with suppress(OSError):
            self._commands.close()
        self._answers.close()

    def _ask(self, command: Command, answer: type[T], timeout_s: float) -> T:
        self._commands.write(msgspec.json.encode(command) + b"\n")
        self._commands.flush()
        return self._answer(answer, timeout_s)

    def _answer(self, answer: type[T], timeout_s: float) -> T:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as error:
            raise ChildProcessError(f"the engine did not answer within {timeout_s:.0f} s") from error
        if not line:
            raise ChildProcessError("the engine died; its last words are above")
        return msgspec.json.decode(line, type=answer)

    def _read(self, answers: IO[bytes]) -> None:
        for line in answers:
            self._lines.put(line)
        self._lines.put(b"")


# --- in the engine's process ------------------------------------------------------------------------------------------


def main() -> None:
    """Run an engine as the first argument says."""
    quieten()
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    starts = Starts(setup.capacity, time.perf_counter_ns)
    app, noop = noop_app(starts.note if setup.starts_file is None else _filing(Path(setup.starts_file)))
    begun_s = time.perf_counter()
    with app.embedded(setup.folder, shards=setup.shards, port=setup.port, grace_s=5.0) as engine:
        load_s = time.perf_counter() - begun_s
        wait_until(lambda: engine.view_lag() == 0, WAIT_S)  # its child is up
        _say(Ready(load_s=round(load_s, 3), port=engine.settings.port, rss_mb=rss_mb()))
        for line in sys.stdin.buffer:
            match msgspec.json.decode(line, type=Command):
                case Measure():
                    _say(_measured(engine, starts))
                case Park() as park:
                    _say(asyncio.run(_park(noop, park)))


def _say(answer: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def _filing(path: Path) -> Callable[[int], None]:
    """Notes starts as lines `index nanoseconds` in a file: one write each, which a kill does not undo."""
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def note(index: int) -> None:
        os.write(descriptor, b"%d %d\n" % (index, time.time_ns()))

    return note


def _measured(engine: Engine, starts: Starts) -> Measured:
    log = engine.broker.connect()
    events = sum(log.end_offset(TopicPartition(TASK_EVENTS, shard)) for shard in range(engine.settings.shards))
    log.close()
    return Measured(
        rss_mb=rss_mb(),
        rss_mb_max=rss_mb_max(),
        cpu_s=processor_s(),
        live=live_tasks(engine),
        started=starts.started,
        duplicates=starts.duplicates,
        events=events,
    )


async def _park(noop: Noop, park: Park) -> Parked:
    rng = Random(park.seed)
    call = {"index": PARKED_INDEX, "blob": blob_for(park.payload_bytes)}

    async def submit(first: int) -> None:
        delay_s = DAY_S * (1 + rng.random() * (park.horizon_days - 1))
        await noop.options(delay=delay_s).asubmit_many([call] * min(BULK_MAX, park.count - first))

    begun_s, cpu_begun_s = time.perf_counter(), processor_s()
    await closed_loop(range(0, park.count, BULK_MAX), BULKS_AT_ONCE, submit)
    return Parked(seconds=time.perf_counter() - begun_s, cpu_s=processor_s() - cpu_begun_s)


if __name__ == "__main__":
    main()
