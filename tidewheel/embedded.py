"""The embedded engine: log, shards, view, API and a worker in this process, over files in one folder.

The same parts as on Kafka and Cassandra, wired here to their SQLite adapters. Each part has a thread of its own; if one
of them dies, `wait` returns and `failure` says why: the engine is then to be stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from infra.local import LocalBroker, LocalLog
from infra.remote import SOCKET_NAME, Facts, LogServer
from infra.sqlite import SqliteLogStorage, SqliteStateStore, SqliteView, Unusable, put_aside
from infra.topics import embedded_catalog
from scheduler.api.health import Health, PartHealth
from scheduler.core.shard import ShardSettings
from scheduler.gateway import Gateway
from scheduler.host import Phase, RuntimeSettings
from scheduler.ports import TopicPartition
from scheduler.projector import Projector
from scheduler.runtime import SchedulerRuntime
from scheduler.service import ServiceSettings, TaskService
from schemas import registry as schema_registry
from schemas.errors import Fatal
from schemas.messages import EndedTask, Task
from schemas.topics import TASK_EVENTS
from tidewheel.backend import LocalBackend
from tidewheel.clock import SteadyClock
from tidewheel.codecs import codec_of
from tidewheel.logs import log_as_a_library
from tidewheel.metrics import engine_metrics
from tidewheel.projection import Projection, ProjectorProcess
from tidewheel.tuning import tuned
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    import uvicorn

    from schemas.codec import Codec
    from tidewheel.app import App

MEMORY = ":memory:"
VIEW_NAME = "view.db"
STALLED_S = 5.0  # a part that made no progress for so long is not well
START_S = 300.0  # how long a start may take: reading the checkpoints and the events after them
JOIN_S = 15.0  # how long one part may take to stop

_log = structlog.get_logger(__name__)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is set up. Without `data` everything is in memory; without `port` there is no API."""

    data: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    shards: int = 4
    app: str | None = None  # module:attribute, for handlers that run in processes
    registry: str | None = None  # URL of a Confluent-compatible schema registry; None: the schema ids are built in
    has_worker: bool = True
    slots: int = 100
    grace_s: float = 30.0
    shard: ShardSettings = ShardSettings()


class Engine:
    """A running scheduler: `with app.embedded("data") as engine: …`, or `start` and `stop`."""

    def __init__(self, app: App | None, settings: EngineSettings) -> None:
        self.settings = settings
        self._app = app
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self.failure: BaseException | None = None
        self._failed = threading.Event()
        self._worker: WorkerRuntime | None = None
        self._server: uvicorn.Server | None = None
        self._log_server: LogServer | None = None
        self._files = contextlib.ExitStack()
        self._is_open = False

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the files, load the shards, begin to work. Raises Fatal if that can't be done; then nothing is left."""
        log_as_a_library()
        try:
            self._files.enter_context(tuned())
            self._open()
            self._run("scheduler", self._run_scheduler)
            self._run("projector", lambda: self._projector.run(self._stopping))
            self._run("gateway", self._run_gateway)
            self._wait_until("the gateway reads replies", lambda: self.gateway.failure is None)
            self._wait_until("the shards are loaded", self._is_loaded)
            self._wait_until("the view has caught up", self._has_caught_up)
            if self.settings.port is not None:
                self._start_api(self.settings.port)
            if self._app is not None and self.settings.has_worker and len(self._app.registry):
                self._start_worker(self._app)
        except BaseException:
            self.stop()
            raise
        if self._app is not None:
            self._app.use(LocalBackend(self.service))

    def stop(self, grace_s: float | None = None) -> None:
        """Finish what runs, within the grace; then stop part by part and close the files. Idempotent.

        `grace_s` can only shorten the grace of the settings.
        """
        if self._app is not None:
            self._app.use(None)
        self._stop_intake(grace_s)
        self._stopping.set()
        self._join("projector", JOIN_S)
        if self._log_server is not None:
            self._log_server.stop()
        if self._is_open:
            self.service.close()
            self.gateway.close()
            for log in self._logs:
                log.wake()
        for thread in self._threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                _log.error("a part did not stop", part=thread.name)
        self._threads.clear()
        self._is_open = False
        self._files.close()

    def _stop_intake(self, grace_s: float | None) -> None:
        """Stop what brings work to the scheduler from outside: the API, the worker here, the workers elsewhere."""
        if self._server is not None:
            self._server.should_exit = True
        if self._worker is not None:
            self._worker.stop()
        if grace_s is not None and grace_s < self.settings.grace_s:
            self._join("worker", grace_s)
            self.hurry()
        for part in ("worker", "api"):
            self._join(part, self.settings.grace_s + JOIN_S)

    def _join(self, part: str, timeout_s: float) -> None:
        for thread in self._threads:
            if thread.name == part:
                thread.join(max(0.0, timeout_s))

    def hurry(self) -> None:
        """Shorten the worker's grace to nothing (a second signal)."""
        if self._worker is not None:
            self._worker.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a part fails; whether one did."""
        return self._failed.wait(timeout_s)

    @property
    def address(self) -> str:
        """The URL of the API."""
        return f"http://{self.settings.host}:{self.settings.port}"

    # --- parts ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        settings = self.settings
        codec = codec_of(settings.registry, self._files)
        clock, rng = SteadyClock(), Random()  # seeded by the system; a call of it for each id would cost 50 us
        self.clock = clock
        opened = self._files.callback
        self._storage = SqliteLogStorage(self._place("log.db"))
        opened(self._storage.close)
        self.broker = LocalBroker(self._storage, embedded_catalog(settings.shards))
        opened(self.broker.close)
        self._states = SqliteStateStore(self._place("state.db"))
        opened(self._states.close)
        self.view = self._open_view()
        opened(self.view.close)
        self._logs: list[LocalLog] = [self.broker.connect(commits=True)]
        self._found_events = self._end_offsets()
        self._warn_of_missing_events()
        owner = RuntimeSettings(owner=_process_name(rng), shard=settings.shard)
        self.runtime = SchedulerRuntime(self._logs[0], self._states, codec, clock, rng, owner)
        self._projector = self._open_projector(codec)
        self.gateway = Gateway(self.broker.connect(), codec, shards=settings.shards, partition=0)
        window_s = settings.shard.idempotency_window_us // 1_000_000
        self.service = TaskService(
            self.gateway,
            self.view,
            _Live(self.runtime),
            clock=clock,
            random_bits=rng.getrandbits,
            settings=ServiceSettings(idempotency_window_s=window_s),
        )
        self.metrics = engine_metrics(self)
        self._codec, self._rng = codec, rng
        self._is_open = True

    def _open_view(self) -> SqliteView:
        """The view; in place of a file that is of no use an empty one, which is filled from the events."""
        place = self._place(VIEW_NAME)
        try:
            return SqliteView(place)
        except Unusable as error:
            _log.warning("the view is made again", reason=str(error), kept_as=str(put_aside(Path(place))))
            return SqliteView(place)

    def _open_projector(self, codec: Codec) -> Projection:
        data, shards = self.settings.data, self.settings.shards
        if data is not None and self._start_log_server(data / SOCKET_NAME):
            place = data / SOCKET_NAME, data / VIEW_NAME, shards, self.settings.registry
            return ProjectorProcess(*place, applied=lambda: sum(self._applied()), lag=self.view_lag)
        log = self.broker.connect()
        self._logs.append(log)
        return Projector(log, self.view, codec, shards)

    def _end_offsets(self) -> list[int]:
        """Where the events of each shard end now."""
        shards = range(self.settings.shards)
        return [self.broker.extent(TopicPartition(TASK_EVENTS, shard)).next_offset for shard in shards]

    def _applied(self) -> list[int]:
        """Where the view stands in the events of each shard."""
        positions = self.view.positions()
        return [positions[shard].next_offset if shard in positions else 0 for shard in range(self.settings.shards)]

    def _warn_of_missing_events(self) -> None:
        for shard, begins_at in enumerate(self._applied()):
            extent = self.broker.extent(TopicPartition(TASK_EVENTS, shard))
            if begins_at < extent.oldest:
                _log.warning(
                    "the view stays incomplete: events that it lacks are past their retention; ended tasks and dead "
                    "letters of that time cannot be found any more",
                    shard=shard,
                    lost_events=extent.oldest - begins_at,
                )

    def _place(self, name: str) -> str | Path:
        data = self.settings.data
        if data is None:
            return MEMORY
        try:
            data.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Fatal(f"the data folder {data} cannot be made: {error}") from error
        return data / name

    def _run_scheduler(self) -> None:
        self.runtime.run(self._stopping)

    def _run_gateway(self) -> None:
        self.gateway.run()
        if not self._stopping.is_set():
            raise self.gateway.failure or Fatal("the gateway ended")

    def _start_worker(self, app: App) -> None:
        queues = tuple(sorted({handler.queue for handler in app.registry}))
        settings = WorkerSettings(
            worker_id=_process_name(self._rng),
            queues=queues,
            slots=self.settings.slots,
            app=self.settings.app,
            grace_ms=round(self.settings.grace_s * 1000),
        )
        self._worker = WorkerRuntime(
            self.broker.connect(), self._codec, app.registry, self.clock, settings, self.settings.shards
        )
        self._run("worker", self._worker.run)

    def _start_api(self, port: int) -> None:
        import uvicorn  # with the API's framework half of the time of `import tidewheel`, which workers do not need

        from scheduler.api.rest import create_api
        from tidewheel import __version__

        api = create_api(
            self.service,
            health=self.health,
            schema_answer=schema_registry.answer,
            metrics=self.metrics,
            version=__version__,
        )
        listener = _listen(self.settings.host, port)
        config = uvicorn.Config(api, log_config=None, access_log=False, timeout_graceful_shutdown=5)
        server = self._server = uvicorn.Server(config)
        self.settings = msgspec.structs.replace(self.settings, port=listener.getsockname()[1])
        self._run("api", lambda: server.run(sockets=[listener]))
        self._wait_until("the API answers", lambda: server.started)

    def _start_log_server(self, path: Path) -> bool:
        """Whether other processes can use the log; without that the projector is a thread."""
        from tidewheel import __version__

        server = LogServer(self.broker, path, Facts(shards=self.settings.shards, version=__version__))
        try:
            server.start()
        except Fatal as error:  # not every folder can hold a socket; the engine itself does not need one
            _log.warning("no other processes: workers cannot join, the projector is a thread", reason=str(error))
            return False
        self._log_server = server
        return True

    def _run(self, part: str, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # the edge of the part's loop: whatever it was, the engine must not go on
                self.failure = self.failure or error
                _log.critical("a part of the engine died", part=part, reason=str(error), exc_info=error)
            finally:
                if not self._stopping.is_set() and self.failure is not None:
                    self._failed.set()

        thread = threading.Thread(target=guarded, name=part, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + START_S
        while not is_so():
            if self._failed.wait(0.002):
                raise self.failure or Fatal(f"a part died before {what}")
            if time.monotonic() > give_up_at:
                raise Fatal(f"after {START_S:.0f} s it is still not so that {what}")

    def _is_loaded(self) -> bool:
        hosts = list(self.runtime.hosts.values())
        return len(hosts) == self.settings.shards and all(host.phase is Phase.ACTIVE for host in hosts)

    def _has_caught_up(self) -> bool:
        # What ended long ago only the view knows: without it its id would be unknown, and free for another task.
        return all(applied >= end for applied, end in zip(self._applied(), self._found_events, strict=True))

    # --- health ---------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Whether every part makes progress."""
        idle_s = (self.clock.now_us() - self.runtime.last_step_at) / 1e6
        stalled_s = self._projector.stalled_s()
        worker = self._worker
        projector = f"{self.view_lag()} events behind, last progress {stalled_s:.1f} s ago"
        parts = [
            PartHealth(name="scheduler", is_ok=idle_s < STALLED_S, detail=f"last turn {idle_s:.1f} s ago"),
            PartHealth(name="shards", is_ok=self._is_loaded(), detail=f"{len(self.runtime.hosts)} hosted"),
            PartHealth(name="projector", is_ok=stalled_s < STALLED_S, detail=projector),
            PartHealth(name="gateway", is_ok=self.gateway.stalled_s() < STALLED_S, detail=""),
        ]
        if worker is not None:
            is_ok = worker.stats.is_healthy and self._is_alive("worker")
            detail = f"{worker.stats.running} of {worker.stats.slots} slots busy, {worker.stats.abandoned} abandoned"
            parts.append(PartHealth(name="worker", is_ok=is_ok, detail=detail))
        return Health(parts=tuple(parts))

    def view_lag(self) -> int:
        """How many events are not in the view yet; from any thread."""
        return sum(max(0, end - at) for end, at in zip(self._end_offsets(), self._applied(), strict=True))

    def _is_alive(self, part: str) -> bool:
        return any(thread.name == part and thread.is_alive() for thread in self._threads)

    @property
    def worker(self) -> WorkerRuntime | None:
        """The worker of this process, if it has one."""
        return self._worker


class _Live:
    """What the shards have in memory, as the service asks for it."""

    def __init__(self, runtime: SchedulerRuntime) -> None:
        self._runtime = runtime

    def get(self, task_id: str) -> Task | EndedTask | None:
        """The task, what is remembered of its end, or None."""
        return self._runtime.live(task_id)


def _process_name(rng: Any) -> str:
    """Unique to this start of this process: the fencing of attempts goes by number, the accounting by this name."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:64]
    return f"{host or 'host'}-{os.getpid()}-{rng.getrandbits(32):08x}"


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Fatal(f"port {port} of {host} cannot be listened on ({error}); choose another one with --port") from error
    return listener
