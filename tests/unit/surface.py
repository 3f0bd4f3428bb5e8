"""The surface over the embedded engine in memory: real log, shards, projector, view; the tests are the worker."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage, SqliteStateStore, SqliteView
from infra.topics import embedded_catalog
from scheduler.api.health import Health, PartHealth
from scheduler.api.rest import create_api
from scheduler.core.shard import ShardSettings
from scheduler.gateway import Gateway
from scheduler.host import RuntimeSettings
from scheduler.ports import Entry, TaskFilter, TaskPage, TaskRow
from scheduler.projector import Projector
from scheduler.runtime import SchedulerRuntime
from scheduler.service import ServiceSettings, TaskService
from schemas import registry
from schemas.codec import Codec
from schemas.errors import Retriable
from schemas.ids import shard_of
from schemas.messages import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    EndedTask,
    ErrorKind,
    Report,
    Schedule,
    Status,
    Task,
    TaskError,
    Verdict,
)
from schemas.topics import TASK_REPORTS

T = TypeVar("T")
SHARDS = 2
MEMORY = ":memory:"
WAIT_S = 20.0


class WallClock:
    """The clock of this machine."""

    def now_us(self) -> int:
        return time.time_ns() // 1000


class FaultyView(SqliteView):
    """A view that fails, or lags behind for some reads, as it is told to."""

    is_down = False
    stale_reads = 0  # so many reads of a task still show it as it was
    stale_row: TaskRow | None = None
    unseen: frozenset[str] = frozenset()  # tasks that it does not show yet among several

    def task(self, task_id: str) -> TaskRow | None:
        self._check()
        if self.stale_reads > 0:
            self.stale_reads -= 1
            return self.stale_row
        return super().task(task_id)

    def rows(self, task_ids: Iterable[str]) -> dict[str, TaskRow]:
        self._check()
        return super().rows(task_id for task_id in task_ids if task_id not in self.unseen)

    def tasks(self, wanted: TaskFilter, limit: int, cursor: str | None = None) -> TaskPage:
        self._check()
        return super().tasks(wanted, limit, cursor)

    def _check(self) -> None:
        if self.is_down:
            raise Retriable("the view is down")


class Surface:
    """A running engine with its service and API."""

    def __init__(self, settings: ServiceSettings | None, shard: ShardSettings) -> None:
        codec, self.clock, self.seed = Codec.builtin(), WallClock(), 7
        self.broker = LocalBroker(SqliteLogStorage(MEMORY), embedded_catalog(SHARDS))
        self.states, self.view = SqliteStateStore(MEMORY), FaultyView(MEMORY)
        self._shard_log = self.broker.connect(commits=True)
        self._projector_log, self._report_log = self.broker.connect(), self.broker.connect()
        self.runtime = SchedulerRuntime(
            self._shard_log,
            self.states,
            codec,
            self.clock,
            Random(self.seed),
            RuntimeSettings(owner="test", shard=shard),
        )
        self.projector = Projector(self._projector_log, self.view, codec, SHARDS)
        self.gateway = Gateway(self.broker.connect(), codec, shards=SHARDS, partition=0)
        self.service = TaskService(
            self.gateway, self.view, self, clock=self.clock, random_bits=Random(8).getrandbits, settings=settings
        )
        self.registry = CollectorRegistry()
        self.forgotten: set[str] = set()  # tasks that the service is not told of by the shards
        self.health = Health(parts=(PartHealth(name="shards", is_ok=True),))
        self.api = create_api(
            self.service, health=lambda: self.health, schema_answer=registry.answer, metrics=self.registry
        )
        self._codec = codec
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self.runtime.run, args=(self._stop,)),
            threading.Thread(target=self.projector.run, args=(self._stop,)),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()
        self.gateway.start()
        self.until(lambda: len(self.runtime.hosts) == SHARDS and all(h.phase.value == "active" for h in self._hosts()))

    def _hosts(self) -> list[Any]:
        return list(self.runtime.hosts.values())

    def close(self) -> None:
        self.service.close()
        self.gateway.close()
        self._stop.set()
        for log in (self._shard_log, self._projector_log):
            log.wake()
        for thread in self._threads:
            thread.join(WAIT_S)
        self.broker.close()
        self.states.close()
        self.view.close()

    def get(self, task_id: str) -> Task | EndedTask | None:
        return None if task_id in self.forgotten else self.runtime.live(task_id)

    def schedule(self, schedule_id: str) -> Schedule | None:
        return self.runtime.live_schedule(schedule_id)

    def until_shown(self, task_id: str, status: Status) -> None:
        """Wait for the view to show a task so."""
        self.until(lambda: (row := SqliteView.task(self.view, task_id)) is not None and row.status == status)

    def until(self, fact: Callable[[], bool]) -> None:
        """Wait for what another thread brings about; there is no event for it, so look again and again."""
        give_up_at = time.monotonic() + WAIT_S
        while not fact():
            assert time.monotonic() < give_up_at, "it did not come about"
            threading.Event().wait(0.002)

    # --- the tests as the worker --------------------------------------------------------------------------------------

    def begin(self, task_id: str) -> Task:
        """Start the next attempt of a task that is, or will be, PENDING."""
        self.until(lambda: isinstance(t := self.runtime.live(task_id), Task) and t.status == "PENDING")
        task = self.runtime.live(task_id)
        assert isinstance(task, Task)
        self._report(
            task_id,
            AttemptStarted(
                task_id=task_id,
                task_version=task.version,
                attempt=task.attempt + 1,
                worker_id="w1",
                started_at=self.clock.now_us(),
            ),
        )
        self.until(lambda: isinstance(t := self.runtime.live(task_id), Task) and t.status == "RUNNING")
        running = self.runtime.live(task_id)
        assert isinstance(running, Task)
        return running

    def succeed(self, task_id: str, result: bytes = b"null", content_type: str = "application/json") -> None:
        task = self.begin(task_id)
        self._report(
            task_id,
            AttemptSucceeded(
                task_id=task_id,
                attempt=task.attempt,
                worker_id="w1",
                finished_at=self.clock.now_us(),
                result=result,
                content_type=content_type,
            ),
        )
        self._until_changed(task)

    def fail(self, task_id: str, verdict: Verdict = Verdict.RETRYABLE) -> None:
        task = self.begin(task_id)
        error = TaskError(kind=ErrorKind.RAISED, type="ValueError", message="it went wrong", verdict=verdict)
        self._report(
            task_id,
            AttemptFailed(
                task_id=task_id, attempt=task.attempt, worker_id="w1", finished_at=self.clock.now_us(), error=error
            ),
        )
        self._until_changed(task)

    def _until_changed(self, task: Task) -> None:
        self.until(lambda: (known := self.runtime.live(task.task_id)) is None or known.version > task.version)

    def _report(self, task_id: str, report: Report) -> None:
        entry = Entry(TASK_REPORTS, shard_of(task_id, SHARDS), None, self._codec.encode(report))
        self._report_log.append([entry])


@contextmanager
def running(settings: ServiceSettings | None = None, shard: ShardSettings | None = None) -> Iterator[Surface]:
    """A surface that is closed in the end."""
    surface = Surface(settings, shard or ShardSettings())
    try:
        surface.start()
        yield surface
    finally:
        surface.close()


class Caller:
    """Calls an API in its own loop, one call after another."""

    def __init__(self, api: FastAPI) -> None:
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(api, raise_app_exceptions=False), base_url="http://api", timeout=60
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(coroutine)

    def __call__(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.run(self._client.request(method, path, **arguments))

    def post_json(self, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self("POST", path, content=body, headers={"content-type": "application/json", **headers})

    async def gather(self, *requests: tuple[str, str, bytes]) -> list[httpx.Response]:
        headers = {"content-type": "application/json"}
        calls = (self._client.request(method, path, content=body, headers=headers) for method, path, body in requests)
        return await asyncio.gather(*calls)

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


names = itertools.count()


def fresh_name(prefix: str = "t") -> str:
    """A name that no other test uses."""
    return f"{prefix}{next(names)}"


def ok(call: Caller, method: str, path: str, **arguments: Any) -> dict[str, Any]:
    """The answer to a call that is answered with 200."""
    response = call(method, path, **arguments)
    assert response.status_code == 200, response.text
    return dict(response.json())


def is_out(surface: Surface, task_id: str) -> bool:
    """Whether a ready record of a task is out, and nobody has started it."""
    return any(host.shard._dispatch.is_out(task_id) for host in surface.runtime.hosts.values())
