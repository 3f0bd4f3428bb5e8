"""The engine as users have it, around a task that does nothing but say when it was started."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import wait_until
from benchmarks.machine import processor_s, rss_mb
from scheduler.core.admission import AdmissionSettings
from scheduler.core.shard import ShardSettings
from scheduler.ports import TopicPartition
from schemas.topics import TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS
from tidewheel import App, Engine, TaskType
from tidewheel.backend import LocalBackend
from tidewheel.settings import ClientSettings

TASK_TYPE = "benchmark.noop"
HOLD_TYPE = "benchmark.hold"
HOLD_LOOK_S = 0.1
KEYED_TYPE = "benchmark.keyed"
WORK_S = 0.02  # of what works under a key
PAYLOAD_BYTES = 200
WAIT_S = 60.0  # for work that was accepted; what is not done by then is reported as missing
DURABLE_TOPICS = (TASK_REQUESTS, TASK_REPORTS, TASK_EVENTS)

Noop = TaskType[[int, str], None]


class Starts:
    """When each task was first started, and how often one was started again. Made beforehand, so that noting is cheap.

    Handlers that are coroutines run in one thread, which alone calls `note`.
    """

    def __init__(self, capacity: int, clock_ns: Callable[[], int]) -> None:
        self.first_ns = array("q", bytes(8 * capacity))
        self.started = 0
        self.duplicates = 0
        self._clock_ns = clock_ns

    def note(self, index: int) -> None:
        """The task is started now."""
        now = self._clock_ns()
        if self.first_ns[index]:
            self.duplicates += 1
        else:
            self.first_ns[index] = now
            self.started += 1

    def wait_for(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Return once so many tasks were started, or after `timeout_s`."""
        wait_until(lambda: self.started >= count, timeout_s)


def noop_app(note: Callable[[int], None], settings: ClientSettings | None = None) -> tuple[App, Noop]:
    """An app with one task type, whose handler notes its start and does nothing."""
    app = App(settings)

    @app.task(name=TASK_TYPE)
    async def noop(index: int, blob: str) -> None:
        note(index)

    return app, noop


def holding(app: App, note: Callable[[int], None]) -> Noop:
    """A second task type of `app`, whose handler notes its start and then runs until there is a file `gate`."""

    @app.task(name=HOLD_TYPE)
    async def hold(index: int, gate: str) -> None:
        note(index)
        while not await asyncio.to_thread(os.path.exists, gate):  # noqa: ASYNC110 (who opens it is another process)
            await asyncio.sleep(HOLD_LOOK_S)

    return hold


def keyed_in(
    app: App, note: Callable[[int], None], enter: Callable[[int, int], int], leave: Callable[[int, int], None]
) -> TaskType[[int, int], None]:
    """A task type of `app` that works for a moment under a key, and notes who else does."""

    @app.task(name=KEYED_TYPE)
    async def keyed(index: int, key: int) -> None:
        note(index)
        mine = enter(key, index)
        await asyncio.sleep(WORK_S)
        leave(key, mine)

    return keyed


def blob_for(payload_bytes: int) -> str:
    """A text with which the arguments of the task, as JSON with an index of 5 digits, have so many bytes."""
    return "x" * max(0, payload_bytes - len('{"index":12345,"blob":""}'))


def live_tasks(engine: Engine) -> int:
    """How many tasks of the engine have not ended."""
    return sum(engine.runtime.statuses().values())


def is_settled(engine: Engine) -> bool:
    """Whether every task that was accepted has ended, and the events of that are on disk."""
    return not live_tasks(engine) and not any(host.has_unacknowledged() for host in engine.runtime.hosts.values())


@dataclass(frozen=True)
class Stage:
    """A running engine, its task type, and the starts of its tasks."""

    engine: Engine
    noop: Noop
    starts: Starts
    blob: str

    @property
    def backend(self) -> LocalBackend:
        """What operators can do."""
        return LocalBackend(self.engine.service)

    def cpu_s(self) -> float:
        """Processor time of the engine's processes so far, the submitter's included."""
        return processor_s()

    def scheduler_rss_mb(self) -> float:
        """Memory of this process."""
        return rss_mb()

    def wait_until_projected(self, timeout_s: float = WAIT_S) -> bool:
        """Wait until the view shows all events; whether it does."""
        return wait_until(lambda: self.engine.view_lag() == 0, timeout_s)


@contextmanager
def running(
    folder: Path,
    capacity: int,
    *,
    shards: int,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    payload_bytes: int = PAYLOAD_BYTES,
    has_worker: bool = True,
    admission: AdmissionSettings | None = None,
) -> Iterator[Stage]:
    """An engine in this process over files in `folder`, as `with app.embedded(folder)` gives it to anyone."""
    starts = Starts(capacity, clock_ns)
    app, noop = noop_app(starts.note)
    settings = ShardSettings() if admission is None else ShardSettings(admission=admission)
    with app.embedded(folder, shards=shards, has_worker=has_worker, shard=settings) as engine:
        stage = Stage(engine, noop, starts, blob_for(payload_bytes))
        stage.wait_until_projected()  # the view's process is up
        yield stage


@contextmanager
def fresh_folder(parent: Path, name: str) -> Iterator[Path]:
    """An empty folder that is removed at the end."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class LogMeter:
    """How many bytes of keys and values an engine appended to its durable topics since the meter was made.

    Inputs are removed from the log soon after they were decided, so it counts records by their offsets and takes the
    mean size of those that are still there.
    """

    def __init__(self, engine: Engine) -> None:
        self._log = engine.broker.connect()
        self._begun = {
            partition: self._log.end_offset(partition)
            for topic in DURABLE_TOPICS
            for partition in (TopicPartition(topic, number) for number in range(self._log.partitions(topic)))
        }

    def close(self) -> None:
        """Give the connection back."""
        self._log.close()

    def records(self, topic: str) -> int:
        """How many records were appended to a topic."""
        return sum(
            self._log.end_offset(partition) - begun
            for partition, begun in self._begun.items()
            if partition.topic == topic
        )

    def appended_bytes(self) -> int:
        """Of all topics together."""
        return round(sum(self.records(topic) * self._mean_bytes(topic) for topic in DURABLE_TOPICS))

    def _mean_bytes(self, topic: str) -> float:
        count = size = 0
        for partition, begun in self._begun.items():
            if partition.topic != topic:
                continue
            reader = self._log.reader()
            reader.seek(partition, begun)
            end = self._log.end_offset(partition)
            while records := reader.take(1_000):
                count += len(records)
                size += sum(len(record.key or b"") + len(record.value or b"") for record in records)
                if records[-1].offset + 1 >= end:
                    break
            reader.close()
        return size / count if count else 0.0
