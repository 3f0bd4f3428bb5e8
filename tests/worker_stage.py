"""A worker between a log and a test: the test is the shard, offers attempts and reads the reports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.ports import Clock, Entry, Log, TopicPartition
from schemas.codec import Codec
from schemas.messages import (
    EVERY_WORKER,
    AttemptStarted,
    Message,
    Priority,
    ReadyTask,
    SignalKind,
    WorkerHeartbeat,
    WorkerSignal,
)
from schemas.topics import TASK_REPORTS, WORKER_SIGNALS, ready_topic
from workers.registry import Function, Handler, Registry
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

WAIT_S = 30.0
SHARDS = 2
_M = TypeVar("_M", bound=Message)


class ManualClock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 1_764_547_200_000_000

    def now_us(self) -> int:
        return self.now


class Stage:
    """The log of one process and whoever works on it; the test reads all reports."""

    def __init__(self) -> None:
        self._storage = SqliteLogStorage(":memory:")
        self.broker = LocalBroker(self._storage, embedded_catalog(SHARDS))
        self.broker.start_committer()
        self.codec = Codec.builtin()
        self.log = self.broker.connect()
        self._reader = self.log.reader()
        for shard in range(SHARDS):
            self._reader.seek(TopicPartition(TASK_REPORTS, shard), 0)
        self.reports: list[Any] = []
        self.workers: list[StagedWorker] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self.workers:
            worker.end()
        self.broker.close()
        self._storage.close()

    def worker(self, *handlers: Handler | Function, clock: ManualClock | None = None, **settings: Any) -> StagedWorker:
        """Start a worker; its first heartbeats have come when this returns."""
        registry = Registry()
        for handler in handlers:
            registry.add(handler if isinstance(handler, Handler) else Handler(handler, name=handler.__name__))
        worker_id = settings.pop("worker_id", f"w{len(self.workers)}")
        log = settings.pop("log", None) or self.broker.connect()
        worker = StagedWorker(
            WorkerRuntime(
                log,
                self.codec,
                registry,
                clock or ManualClock(),
                WorkerSettings(**{"worker_id": worker_id, "linger_ms": 0} | settings),
                SHARDS,
            ),
            log,
            clock,
            worker_id,
        )
        self.workers.append(worker)
        self.expect(lambda: len(self.of(WorkerHeartbeat, worker_id=worker_id)) >= SHARDS)
        return worker

    def offer(self, task_type: str, payload: Any = None, *, partition: int = 0, **fields: Any) -> ReadyTask:
        """Send an attempt out, as a shard does."""
        fields = {
            "task_id": f"t{time.monotonic_ns()}",
            "task_version": 1,
            "attempt": 1,
            "shard": 0,
            "queue": "default",
            "priority": Priority.MEDIUM,
            "tenant_id": "default",
            "payload": msgspec.json.encode(payload),
            "content_type": "application/json",
            "metadata": {},
            "scheduled_at": 0,
            "created_at": 0,
            "lease_ms": 300_000,
            **fields,
        }
        ready = ReadyTask(task_type=task_type, **fields)
        self.put(ready_topic(ready.queue, ready.priority), partition, self.codec.encode(ready))
        return ready

    def signal(
        self,
        worker: StagedWorker | None,
        ready: ReadyTask,
        kind: SignalKind,
        *,
        grace_ms: int = 10_000,
        task_version: int | None = None,
        epoch: int = 0,
    ) -> None:
        """Tell a worker, or every one, something about an attempt."""
        signal = WorkerSignal(
            worker_id=EVERY_WORKER if worker is None else worker.worker_id,
            task_id=ready.task_id,
            attempt=ready.attempt,
            kind=kind,
            reason="the test says so",
            task_version=task_version,
            grace_ms=grace_ms,
            epoch=epoch,
        )
        self.put(WORKER_SIGNALS, 0, self.codec.encode(signal))

    def put(self, topic: str, partition: int, value: bytes) -> None:
        """Append a record."""
        self.log.append([Entry(topic, partition, None, value)])

    def of(self, kind: type[_M], **fields: Any) -> list[_M]:
        """The reports of a kind so far, in the order of the log."""
        return [
            report
            for report in self.reports
            if isinstance(report, kind) and all(getattr(report, name) == value for name, value in fields.items())
        ]

    def about(self, ready: ReadyTask) -> list[Any]:
        """The reports about an attempt so far."""
        return [report for report in self.reports if getattr(report, "task_id", None) == ready.task_id]

    def expect(self, is_so: Callable[[], object]) -> None:
        """Read reports until something is so."""
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            for worker in self.workers:
                if worker.failure is not None:
                    raise worker.failure
            assert time.monotonic() < deadline, f"did not come; reports were: {self.reports}"
            self.log.poll(0.05)
            self.reports += [self.codec.decode(record.value) for record in self._reader.take(1000)]

    def outcome(self, ready: ReadyTask) -> Any:
        """The report that ended an attempt, which was reported as started before."""
        self.expect(lambda: len(self.about(ready)) >= 2)
        began, ended = self.about(ready)
        assert isinstance(began, AttemptStarted)
        return ended

    def members(self, queue: str = "default") -> int:
        """How many workers share a queue."""
        return len(self.broker._groups[f"workers.{queue}"].members)

    def committed(self, queue: str = "default") -> dict[TopicPartition, int]:
        """How far the workers of a queue committed."""
        return dict(self.broker._groups[f"workers.{queue}"].committed)


class StagedWorker:
    """A worker in a thread of its own."""

    def __init__(self, runtime: WorkerRuntime, log: Log, clock: ManualClock | None, worker_id: str) -> None:
        self.runtime = runtime
        self.worker_id = worker_id
        self.failure: BaseException | None = None
        self._clock = clock
        self._log = log
        self._thread = threading.Thread(target=self._run, name=worker_id)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.runtime.run()
        except BaseException as error:
            self.failure = error

    def advance(self, ms: int) -> None:
        """Let the worker's clock go on."""
        assert self._clock is not None
        self._clock.now += ms * 1000
        self._log.wake()

    def ended(self) -> bool:
        """Wait until the worker ended."""
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()

    def end(self) -> None:
        """Stop at once, whatever state it is in."""
        deadline = time.monotonic() + WAIT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self.runtime.stop()
            self.runtime.stop()
            if self._clock is not None:
                self.advance(100)
            self._thread.join(0.02)
        assert not self._thread.is_alive(), f"worker {self.worker_id} did not end"


class SystemClock:
    """The wall clock."""

    def now_us(self) -> int:
        return time.time_ns() // 1000


_: type[Clock] = SystemClock
