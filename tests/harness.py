"""What end-to-end tests stand on: an engine, one in a process of its own that can be killed, and its raw events."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import httpx

from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.core.task import TERMINAL, evolve
from scheduler.ports import Entry, Record, TopicPartition
from schemas.codec import Codec
from schemas.ids import shard_of
from schemas.messages import (
    Event,
    ParkedTask,
    Report,
    ShardOpened,
    Task,
    TaskRedriven,
    TaskStarted,
)
from schemas.topics import TASK_EVENTS, TASK_REPORTS, delay_topic
from schemas.wheel import WheelShape
from tidewheel import App, Engine
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

WAIT_S = 30.0  # until a test gives up on what must come about
LOOK_EVERY_S = 0.005
SHARDS = 4
TASKS = "/api/v1/tasks"
T = TypeVar("T")

_codec = Codec.builtin()


def eventually(fact: Callable[[], T | None], what: object = "it", within_s: float = WAIT_S) -> T:
    """What `fact` gives once that is true of it; for what another thread or process brings about without a word."""
    give_up_at = time.monotonic() + within_s
    while not (found := fact()):
        assert time.monotonic() < give_up_at, f"within {within_s} s {what} did not come about"
        select.select([], [], [], LOOK_EVERY_S)
    return found


# --- in this process --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(app: App | None, data: Path | None = None, /, **settings: Any) -> Iterator[Engine]:
    """An engine with a worker of `app`, in memory or in a folder; at the end nothing is waited for."""
    engine = (app or App()).embedded(data, shards=SHARDS, **settings)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(grace_s=0)
    assert engine.failure is None


@contextlib.contextmanager
def another_worker(engine: Engine, app: App) -> Iterator[WorkerRuntime]:
    """One more worker of a running engine; at the end nothing is waited for."""
    settings = WorkerSettings(worker_id="another", queues=tuple({handler.queue for handler in app.registry}))
    worker = WorkerRuntime(engine.broker.connect(), _codec, app.registry, engine.clock, settings, SHARDS)
    with ThreadPoolExecutor(1, "another-worker") as threads:
        running = threads.submit(worker.run)
        try:
            yield worker
        finally:
            worker.stop()
            worker.stop()
            running.result(WAIT_S)


def report(engine: Engine, task_id: str, *reports: Report) -> None:
    """Say by hand to the shard of a task what workers say."""
    log = engine.broker.connect()
    log.append([Entry(TASK_REPORTS, shard_of(task_id, SHARDS), None, _codec.encode(one)) for one in reports])
    log.close()


# --- over HTTP --------------------------------------------------------------------------------------------------------


class Api:
    """The REST surface at an address."""

    def __init__(self, address: str) -> None:
        self.client = httpx.Client(base_url=address, timeout=WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.client.close()

    def __call__(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.client.request(method, path, **arguments)

    def submit(self, task_type: str, payload: Any = None, **fields: Any) -> str:
        """The id of a new task."""
        answer = self("POST", TASKS, json={"task_type": task_type, "payload": payload, **fields})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["task_id"])

    def task(self, task_id: str) -> dict[str, Any]:
        """The task as GET shows it."""
        answer = self("GET", f"{TASKS}/{task_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def until(self, task_id: str, *statuses: str) -> dict[str, Any]:
        """The task once it has one of the statuses; by default once it has ended."""
        wanted = statuses or tuple(TERMINAL)

        def shown() -> dict[str, Any] | None:
            if self("GET", f"{TASKS}/{task_id}").status_code == 404:  # another process accepted it a moment ago
                return None
            task = self.task(task_id)
            return task if task["status"] in wanted and not task["is_partial"] else None

        found = eventually(shown, f"{task_id} as {' or '.join(wanted)}")
        assert found is not None
        return found


# --- in a process of its own ------------------------------------------------------------------------------------------


class Child:
    """A process that says in its first line, in JSON, that it is ready; it can be killed, and started again."""

    start_s = WAIT_S  # until it is

    def __init__(self, command: list[str], stderr: Path, environ: Mapping[str, str] | None = None) -> None:
        """`environ` is added to this process's."""
        self._command, self._stderr, self._environ = command, stderr, dict(environ or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, running or ended."""
        assert self._process is not None, "it was not started"
        return self._process

    def start(self) -> None:
        """Start it, wait until it is ready."""
        self._stderr.parent.mkdir(parents=True, exist_ok=True)
        with open(self._stderr, "ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=os.environ | self._environ,
            )
        try:
            self._on_ready(json.loads(self._first_line()))
        except BaseException:
            self.kill()
            raise

    def _first_line(self) -> bytes:
        assert self.process.stdout is not None
        is_there = select.select([self.process.stdout], [], [], self.start_s)[0]
        line = self.process.stdout.readline() if is_there else b""
        assert line, f"it did not start: {self.errors()}"
        return line

    def _on_ready(self, facts: dict[str, Any]) -> None: ...

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and all that it started; no code of it runs any more. Nothing happens if it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.ended()

    def ended(self) -> int:
        """Wait for its end; its exit status."""
        status = self.process.wait(WAIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def errors(self) -> str:
        """What it wrote to stderr."""
        return self._stderr.read_text("utf-8", "replace")

    def handles(self, number: signal.Signals) -> bool:
        """Whether it has a handler of its own for a signal: process 1 of a container is not sent any other."""
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


class Served(Child):
    """A scheduler with its API, and a worker unless it is told otherwise, over a folder."""

    def __init__(self, data: Path, app: str, **settings: Any) -> None:
        """`app` is module:attribute; the settings are those of the engine, as JSON."""
        given = {"data": str(data), "app": app, "shards": SHARDS, "port": 0, **settings}
        super().__init__(["tests.serving", json.dumps(given)], data / "stderr.txt")
        self._api: Api | None = None

    @property
    def api(self) -> Api:
        """The REST surface of the running process."""
        assert self._api is not None, "it is not running"
        return self._api

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self._api = Api(facts["address"])

    def ended(self) -> int:
        """Wait for its end; its exit status."""
        if self._api is not None:
            self._api.client.close()
        return super().ended()


class Working(Child):
    """A worker in a process of its own, as `tidewheel worker` runs it."""

    def __init__(self, data: Path, app: str, *, slots: int = 100, grace: str = "30s") -> None:
        options = ["--data", str(data), "--slots", str(slots), "--grace", grace, "--json"]
        super().__init__(["tidewheel", "worker", app, *options], data / f"stderr-{id(self)}.txt")
        self.worker_id = ""

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self.worker_id = str(facts["worker_id"])


def note(journal: str | Path, text: str) -> None:
    """Add a line to a file, whole whatever happens to this process; for handlers."""
    descriptor = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def notes(journal: Path) -> list[str]:
    """The lines so far."""
    return journal.read_text("utf-8").splitlines() if journal.exists() else []


# --- raw events -------------------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """An event at its place in the log."""

    shard: int
    offset: int
    event: Event


def events_of(engine: Engine) -> list[Stored]:
    """What a running engine has committed so far."""
    return _stored(engine._storage.read)


def events_in(data: Path) -> list[Stored]:
    """What a process left in its folder; nobody may be using it."""
    storage = SqliteLogStorage(data / "log.db")
    try:
        storage.start(embedded_catalog(SHARDS).durable)
        return _stored(storage.read)
    finally:
        storage.close()


def _stored(read: Callable[[TopicPartition, int, int], Iterable[Record]]) -> list[Stored]:
    found = []
    for shard in range(SHARDS):
        offset = 0
        while records := list(read(TopicPartition(TASK_EVENTS, shard), offset, 1_000)):
            found += [stored(record) for record in records]
            offset = records[-1].offset + 1
    return found


def stored(record: Record) -> Stored:
    """The event that a record of `task-events` holds."""
    event = _codec.decode(record.value or b"")
    assert isinstance(event, Event)
    return Stored(record.partition, record.offset, event)


class History:
    """The fold of raw events as any reader would make it. Raises where they contradict each other or the table.

    Events of a stale owner are passed over. Each input has at most one event, each task's versions are without holes.
    """

    def __init__(self, stored: Iterable[Stored]) -> None:
        self.tasks: dict[str, Task] = {}
        self.of: dict[str, list[Event]] = defaultdict(list)
        self.decided: Counter[tuple[str, int, int]] = Counter()
        self.epochs: dict[int, int] = defaultdict(int)
        for one in stored:
            self._take(one.shard, one.event)
        doubled = [source for source, count in self.decided.items() if count > 1]
        assert not doubled, f"inputs that were decided twice: {doubled}"

    def _take(self, shard: int, event: Event) -> None:
        if isinstance(event.body, ShardOpened):
            assert event.epoch > self.epochs[shard]
            self.epochs[shard] = event.epoch
        if event.epoch < self.epochs[shard]:
            return
        if event.source_topic is not None and event.source_offset is not None:
            self.decided[event.source_topic, shard, event.source_offset] += 1
        if event.version == 0:
            return
        before = self.tasks.get(event.entity_id)
        if before is not None and event.version == 1 and before.status in TERMINAL:
            before = None  # a key that was used anew after its window
        assert event.version == (before.version if before else 0) + 1, f"{event} after {before}"
        is_anew = before is not None and before.status in TERMINAL and isinstance(event.body, TaskRedriven)
        self.tasks[event.entity_id] = evolve(None if is_anew else before, event)
        self.of[event.entity_id].append(event)

    def bodies(self, task_id: str) -> list[str]:
        """What happened to a task, as the names of its events."""
        return [type(event.body).__name__ for event in self.of[task_id]]

    def starts(self, task_id: str) -> list[int]:
        """The numbers of the attempts that were started."""
        return [event.body.attempt for event in self.of[task_id] if isinstance(event.body, TaskStarted)]

    def live(self) -> dict[str, Task]:
        """The tasks that have not ended."""
        return {task_id: task for task_id, task in self.tasks.items() if task.status not in TERMINAL}


def history(source: Engine | Path) -> History:
    """The history of an engine, or of what one left in a folder."""
    return History(events_in(source) if isinstance(source, Path) else events_of(source))


def live_in(engine: Engine) -> dict[str, Task]:
    """The tasks that the shards of an engine have in memory."""
    return {task.task_id: task for host in engine.runtime.hosts.values() for task in host.shard.state.tasks.values()}


def kept_in(engine: Engine) -> dict[str, Task]:
    """The tasks that an engine has in memory or in its delay wheel, as they were written there last."""
    live = live_in(engine)  # first: what leaves memory meanwhile is in the wheel by then
    read, wheel = engine._storage.read, WheelShape()
    parked: dict[str, Task] = {}
    for level in wheel.levels:
        for number in range(SHARDS * wheel.slots):
            for record in read(TopicPartition(delay_topic(level), number), 0, 1_000):
                if record.value is not None:
                    message = _codec.decode(record.value)
                    assert isinstance(message, ParkedTask)
                    parked[message.task.task_id] = message.task
    return parked | live
