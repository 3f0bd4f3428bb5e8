"""The embedded engine: log, shards, view, API and a worker in this process, over files in one folder.

The same parts as on Kafka and Cassandra, wired here to their SQLite adapters. Each part has a thread of its own; if one
of them dies, `wait` returns and `failure` says why: the engine is then to be stopped.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

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
from scheduler.timer_report import timers_of
from schemas.errors import Fatal
from schemas.topics import TASK_EVENTS
from tidewheel.api_server import ApiServer
from tidewheel.backend import LocalBackend
from tidewheel.clock import SteadyClock
from tidewheel.codecs import codec_of
from tidewheel.live import ShardsHere
from tidewheel.logs import log_as_a_library
from tidewheel.metrics import engine_metrics
from tidewheel.parts import Parts, process_name
from tidewheel.projection import Projection, ProjectorProcess
from tidewheel.tuning import tuned
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

if TYPE_CHECKING:
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
        self._parts = Parts("engine")
        self._worker: WorkerRuntime | None = None
        self._api: ApiServer | None = None
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
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            self._files.enter_context(tuned())
            self._open()
            self._parts.run("scheduler", self._run_scheduler)
            self._parts.run("projector", lambda: self._projector.run(self._parts.stopping))
            self._parts.run("gateway", self._run_gateway)
            self._parts.wait_until("the gateway reads replies", lambda: self.gateway.failure is None, START_S)
            self._parts.wait_until("the shards are loaded", self._is_loaded, START_S)
            self._parts.wait_until("the view has caught up", self._has_caught_up, START_S)
            if self.settings.port is not None:
                self._start_api(self.settings.port)
            if self._app is not None:
                self._begin_for(self._app)
            undo.pop_all()

    def _begin_for(self, app: App) -> None:
        """Work for an application, with limits and schedules as it declares them."""
        if self.settings.has_worker and len(app.registry):
            self._start_worker(app)
        app.use(LocalBackend(self.service))
        if len(app.limits):  # first: what schedules submit may be limited
            _log.info("limits are as declared", **msgspec.structs.asdict(app.limits.sync()))
        if len(app.schedules):
            report = app.schedules.sync()
            _log.info("schedules are as declared", **msgspec.structs.asdict(report))
            if report.gone:
                hint = "schedules that the app declares no more go on; tidewheel cron delete ends them"
                _log.warning(hint, names=report.gone)

    def stop(self, grace_s: float | None = None) -> None:
        """Finish what runs, within the grace; then stop part by part and close the files. Idempotent.

        `grace_s` can only shorten the grace of the settings.
        """
        if self._app is not None:
            self._app.use(None)
        self._stop_intake(grace_s)
        self._parts.stopping.set()
        self._parts.join("projector", JOIN_S)
        if self._log_server is not None:
            self._log_server.stop()
        if self._is_open:
            self.service.close()
            self.gateway.close()
            for log in self._logs:
                log.wake()
        self._parts.join_all(JOIN_S)
        self._is_open = False
        self._files.close()

    def _stop_intake(self, grace_s: float | None) -> None:
        """Stop what brings work to the scheduler from outside: the API, the worker here, the workers elsewhere."""
        if self._api is not None:
            self._api.stop()
        if self._worker is not None:
            self._worker.stop()
        if grace_s is not None and grace_s < self.settings.grace_s:
            self._parts.join("worker", grace_s)
            self.hurry()
        for part in ("worker", "api"):
            self._parts.join(part, self.settings.grace_s + JOIN_S)

    def hurry(self) -> None:
        """Shorten the worker's grace to nothing (a second signal)."""
        if self._worker is not None:
            self._worker.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a part fails; whether one did."""
        return self._parts.wait(timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """What the first part that died died of."""
        return self._parts.failure

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
        owner = RuntimeSettings(owner=process_name(), shard=settings.shard)
        self.runtime = SchedulerRuntime(self._logs[0], self._states, codec, clock, rng, owner)
        self._projector = self._open_projector(codec)
        self.gateway = Gateway(self.broker.connect(), codec, shards=settings.shards, partition=0)
        window_s = settings.shard.idempotency_window_us // 1_000_000
        self.service = TaskService(
            self.gateway,
            self.view,
            ShardsHere(self.runtime),
            clock=clock,
            random_bits=rng.getrandbits,
            settings=ServiceSettings(idempotency_window_s=window_s, admission=settings.shard.admission),
        )
        self.metrics = engine_metrics(self)
        self._codec = codec
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
        self.runtime.run(self._parts.stopping)

    def _run_gateway(self) -> None:
        self.gateway.run()
        if not self._parts.stopping.is_set():
            raise self.gateway.failure or Fatal("the gateway ended")

    def _start_worker(self, app: App) -> None:
        queues = tuple(sorted({handler.queue for handler in app.registry}))
        settings = WorkerSettings(
            worker_id=process_name(),
            queues=queues,
            slots=self.settings.slots,
            app=self.settings.app,
            grace_ms=round(self.settings.grace_s * 1000),
            weights=self.settings.shard.weights,
        )
        self._worker = WorkerRuntime(
            self.broker.connect(), self._codec, app.registry, self.clock, settings, self.settings.shards
        )
        self._parts.run("worker", self._worker.run)

    def _start_api(self, port: int) -> None:
        self._api = ApiServer(self.settings.host, port)
        self._api.start(
            self._parts,
            self.service,
            health=self.health,
            metrics=self.metrics,
            timers=lambda: timers_of(self.runtime, self.clock.now_us()),
        )
        self.settings = msgspec.structs.replace(self.settings, port=self._api.port)

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
            is_ok = worker.stats.is_healthy and self._parts.is_alive("worker")
            detail = f"{worker.stats.running} of {worker.stats.slots} slots busy, {worker.stats.abandoned} abandoned"
            parts.append(PartHealth(name="worker", is_ok=is_ok, detail=detail))
        return Health(parts=tuple(parts))

    def view_lag(self) -> int:
        """How many events are not in the view yet; from any thread."""
        return sum(max(0, end - at) for end, at in zip(self._end_offsets(), self._applied(), strict=True))

    @property
    def worker(self) -> WorkerRuntime | None:
        """The worker of this process, if it has one."""
        return self._worker
