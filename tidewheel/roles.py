"""What the processes of a cluster do. Each role has its connections, its threads, its health and its metrics."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from infra.cassandra import CassandraView
from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.kafka.state import KafkaStateStore
from infra.topics import TopicCatalog
from scheduler.api.health import Health, PartHealth
from scheduler.core.shard import ShardSettings
from scheduler.gateway import Gateway
from scheduler.host import Phase, RuntimeSettings
from scheduler.projector import Projector
from scheduler.runtime import SchedulerRuntime
from scheduler.service import LiveTasks, ServiceSettings, TaskService
from scheduler.timer_report import TimersView, timers_of
from schemas.codec import Codec
from schemas.errors import Fatal
from schemas.topics import REPLIES
from tidewheel.api_server import PART as API_PART
from tidewheel.api_server import ApiServer
from tidewheel.app import App
from tidewheel.awaited import AwaitedView
from tidewheel.backend import LocalBackend
from tidewheel.brokers import BrokerWatch
from tidewheel.clock import SteadyClock
from tidewheel.cluster_settings import ClusterSettings
from tidewheel.live import NoShards, ShardsHere
from tidewheel.metrics import (
    GatewayMetrics,
    ProjectorMetrics,
    ReadyTopicMetrics,
    SchedulerMetrics,
    TimerMetrics,
    ViewMetrics,
    WorkerMetrics,
    registry_of,
)
from tidewheel.parts import Parts
from tidewheel.watched import WatchedLog
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

START_S = 60.0  # until a part that is connected works
LAG_EVERY_S = 1.0  # between looks at how far the view is behind
# A scheduler without shards is ready after so long: there may be more of them than shards.
WITHOUT_SHARDS_S = 15.0


class Shared(NamedTuple):
    """What all roles of a process have in common."""

    settings: ClusterSettings
    kafka: KafkaSettings
    catalog: TopicCatalog
    brokers: BrokerWatch
    codec: Codec
    clock: SteadyClock
    rng: Random
    name: str

    def connect(self, role: str) -> KafkaLog:
        """A connection to the log. Raises Retriable, Fatal."""
        return KafkaLog(self.kafka, self.catalog, client_id=f"tidewheel-{role}-{self.name}")

    def view(self) -> AwaitedView:
        """The view, connected now or as soon as it can be. Raises Fatal."""
        cassandra = self.settings.of_cassandra()
        return AwaitedView(lambda: CassandraView(cassandra))


class Role(ABC):
    """One thing that a process does. `connect`, `start`, then once each `stop` (if it brings work), `end`, `close`."""

    name: ClassVar[str]
    brings_work: ClassVar[bool] = False  # it is stopped before the others
    parts: ClassVar[tuple[str, ...]]  # its threads

    def __init__(self) -> None:
        self._files = ExitStack()

    def connect(self, shared: Shared) -> None:
        """Reach what it needs, or leave nothing behind. Raises Retriable, Fatal."""
        with ExitStack() as files:
            self._open(shared, files)
            self._files = files.pop_all()

    @abstractmethod
    def _open(self, shared: Shared, files: ExitStack) -> None:
        """Reach what it needs; `files` closes it."""

    @abstractmethod
    def start(self, parts: Parts) -> None:
        """Begin to work, in threads."""

    def stop(self) -> None:  # noqa: B027 (most roles bring none)
        """Take nothing new; what runs may end. Only of those that bring work."""

    def hurry(self) -> None:  # noqa: B027 (most have no grace)
        """Shorten what is left of the grace to nothing."""

    def end(self) -> None:  # noqa: B027 (some look at `parts.stopping` alone)
        """End, now that `parts.stopping` is set: wake what waits."""

    def close(self) -> None:
        """Release what it holds, once its threads have ended."""
        self._files.close()

    @abstractmethod
    def liveness(self, stalled_s: float) -> PartHealth:
        """Whether its loops go on; one that made no turn for `stalled_s` does not."""

    def readiness(self, stalled_s: float) -> PartHealth:
        """Whether it does its work now."""
        return self.liveness(stalled_s)

    def facts(self) -> Mapping[str, Any]:
        """What those who start it want to know of it."""
        return {}

    def timers(self) -> TimersView | None:
        """What waits for its time in its shards; None: it has nothing to do with shards."""
        return None

    @abstractmethod
    def collectors(self) -> tuple[Collector, ...]:
        """Its metrics."""


class SchedulerRole(Role):
    """Hosts the shards that the group gives to this process."""

    name = "scheduler"
    parts = ("scheduler",)

    def _open(self, shared: Shared, files: ExitStack) -> None:
        settings = shared.settings
        self._clock = shared.clock
        self._log = files.enter_context(closing(shared.connect(self.name)))
        states = files.enter_context(closing(KafkaStateStore(shared.kafka)))
        shard = ShardSettings(
            idempotency_window_us=round(settings.idempotency_window_s * 1_000_000),
            admission=settings.of_admission(),
            weights=settings.weights(),
        )
        owner = RuntimeSettings(owner=shared.name, shard=shard)
        self.runtime = SchedulerRuntime(self._log, states, shared.codec, shared.clock, shared.rng, owner)
        self._began_at = shared.clock.now_us()

    def start(self, parts: Parts) -> None:
        """Turn the loop."""
        parts.run("scheduler", lambda: self.runtime.run(parts.stopping))

    def end(self) -> None:
        """Leave the group; its shards go to others at once."""
        self._log.wake()

    def liveness(self, stalled_s: float) -> PartHealth:
        """By the last turn of the loop."""
        idle_s = (self._clock.now_us() - (self.runtime.last_step_at or self._began_at)) / 1e6
        return PartHealth(name=self.name, is_ok=idle_s < stalled_s, detail=f"last turn {idle_s:.1f} s ago")

    def readiness(self, stalled_s: float) -> PartHealth:
        """When it turns, and all shards that it was given are loaded."""
        alive = self.liveness(stalled_s)
        phases = [host.phase for host in list(self.runtime.hosts.values())]
        active = phases.count(Phase.ACTIVE)
        without_s = (self._clock.now_us() - self._began_at) / 1e6
        is_ok = alive.is_ok and active == len(phases) and (active > 0 or without_s > WITHOUT_SHARDS_S)
        detail = f"{active} of {len(phases)} shards loaded, {alive.detail}"
        for topic, reason in self._log.held_topics().items():  # the other queues go on: no reason to be restarted
            detail += f"; tasks of {topic} wait: {reason}"
        return PartHealth(name=self.name, is_ok=is_ok, detail=detail)

    def timers(self) -> TimersView:
        """Of the shards."""
        return timers_of(self.runtime, self._clock.now_us())

    def collectors(self) -> tuple[Collector, ...]:
        """Of the shards."""
        return (
            SchedulerMetrics(self.runtime),
            TimerMetrics(self.runtime),
            ReadyTopicMetrics(self._log.held_topics),
        )


class ProjectorRole(Role):
    """Folds the events of the partitions that the group gives to this process into the view."""

    name = "projector"
    parts = ("projector",)

    def _open(self, shared: Shared, files: ExitStack) -> None:
        self._view = files.enter_context(closing(shared.view()))
        self._log = WatchedLog(files.enter_context(closing(shared.connect(self.name))))
        projector = Projector(self._log, self._view, shared.codec, partitions=None)
        self._projector = files.enter_context(closing(projector))
        self._lag: int | None = None
        self._lag_at = 0.0  # when that was looked at

    def start(self, parts: Parts) -> None:
        """Follow the events."""
        parts.run("projector", lambda: self._projector.run(parts.stopping, self._look_at_lag))

    def _look_at_lag(self) -> None:
        now = time.monotonic()
        if now >= self._lag_at + LAG_EVERY_S:
            self._lag, self._lag_at = self._projector.lag(), now

    def lag(self) -> int | None:
        """How many events of its partitions are not in the view yet, as of the last look; None before the first."""
        if self._view.trouble is not None:
            return None
        # Whatever is applied is followed by a look: a view that has moved since without one had nothing to apply.
        moved_at = time.monotonic() - self._projector.stalled_s()
        return 0 if moved_at > self._lag_at + LAG_EVERY_S else self._lag

    def end(self) -> None:
        """Leave the group."""
        self._log.wake()

    def liveness(self, stalled_s: float) -> PartHealth:
        """By the last turn of the loop, which goes on while the view cannot be reached."""
        idle_s = self._log.turned_s()
        return PartHealth(name=self.name, is_ok=idle_s < stalled_s, detail=f"last turn {idle_s:.1f} s ago")

    def readiness(self, stalled_s: float) -> PartHealth:
        """When the view moves, or has nothing to catch up with."""
        if self._view.trouble is not None:
            return PartHealth(name=self.name, is_ok=False, detail=self._view.trouble)
        idle_s = self._projector.stalled_s()
        return PartHealth(name=self.name, is_ok=idle_s < stalled_s, detail=f"the view last moved {idle_s:.1f} s ago")

    def collectors(self) -> tuple[Collector, ...]:
        """Of the view."""
        return (ProjectorMetrics(self._projector), ViewMetrics(self.lag))


class ApiRole(Role):
    """The REST surface."""

    name = "api"
    brings_work = True
    parts = (API_PART,)

    def __init__(
        self,
        app: App | None = None,
        shards: Callable[[], LiveTasks] = NoShards,
        timers: Callable[[], TimersView] | None = None,
    ) -> None:
        """The tasks of `app` are submitted here, in this process; `shards` answers for tasks that live in it.

        With shards in the process `timers` tells what waits in them.
        """
        super().__init__()
        self._app, self._shards, self._timers = app, shards, timers

    def _open(self, shared: Shared, files: ExitStack) -> None:
        settings = shared.settings
        self._view = files.enter_context(closing(shared.view()))
        log = files.enter_context(closing(shared.connect(self.name)))
        # Who shares a partition reads the other's replies, and passes them over.
        partition = SystemRandom().randrange(log.partitions(REPLIES))
        self._gateway = Gateway(log, shared.codec, shards=settings.shards, partition=partition)
        self._service = TaskService(
            self._gateway,
            self._view,
            self._shards(),
            clock=shared.clock,
            random_bits=shared.rng.getrandbits,
            settings=ServiceSettings(
                idempotency_window_s=round(settings.idempotency_window_s),
                admission=settings.of_admission(),
                remembers_accepted=True,
            ),
        )
        files.callback(self._service.close)
        self.server = ApiServer(settings.api.host, settings.api.port)
        self._stalled_s = settings.health.stalled_s
        self._brokers = shared.brokers

    def start(self, parts: Parts) -> None:
        """Read replies, then answer requests."""
        parts.run("gateway", lambda: self._run_gateway(parts))
        parts.wait_until("the gateway reads replies", lambda: self._gateway.failure is None, START_S)
        self.server.start(
            parts,
            self._service,
            health=lambda: Health(parts=(self.liveness(self._stalled_s),)),
            metrics=registry_of(*self.collectors()),
            readiness=lambda: Health(parts=(self.readiness(self._stalled_s), self._brokers.readiness())),
            timers=self._timers,
        )
        if self._app is not None:
            self._app.use(LocalBackend(self._service))

    def _run_gateway(self, parts: Parts) -> None:
        self._gateway.run()
        if not parts.stopping.is_set():
            raise self._gateway.failure or Fatal("the gateway ended")

    def stop(self) -> None:
        """Take no more requests."""
        self.server.stop()

    def end(self) -> None:
        """Tell those who still wait that it is undecided."""
        if self._app is not None:
            self._app.use(None)
        self._gateway.close()

    def liveness(self, stalled_s: float) -> PartHealth:
        """By the last turn of the loop that reads replies."""
        idle_s, trouble = self._gateway.stalled_s(), self._view.trouble
        without = "" if trouble is None else f"; tasks are accepted, but without the view most reads fail: {trouble}"
        return PartHealth(name=self.name, is_ok=idle_s < stalled_s, detail=f"last turn {idle_s:.1f} s ago{without}")

    def readiness(self, stalled_s: float) -> PartHealth:
        """When it takes requests; without the view it still does, and answers of tasks that live."""
        failure = self._gateway.failure
        if failure is not None:
            return PartHealth(name=self.name, is_ok=False, detail=str(failure))
        return self.liveness(stalled_s)

    def facts(self) -> Mapping[str, Any]:
        """Where it is."""
        return {"api": self.server.address, "docs": f"{self.server.address}/docs"}

    def collectors(self) -> tuple[Collector, ...]:
        """Of the requests."""
        return (GatewayMetrics(self._gateway),)


class WorkerRole(Role):
    """Runs the tasks of an application."""

    name = "worker"
    brings_work = True
    parts = ("worker",)

    def __init__(self, app: App, app_name: str) -> None:
        """`app_name` is module:attribute, for handlers that run in processes."""
        super().__init__()
        self._app, self._app_name = app, app_name

    def _open(self, shared: Shared, files: ExitStack) -> None:
        given = shared.settings.worker
        self.settings = WorkerSettings(
            worker_id=shared.name,
            queues=tuple(sorted({handler.queue for handler in self._app.registry})),
            slots=given.slots,
            app=self._app_name,
            grace_ms=round(given.grace_s * 1000),
            weights=shared.settings.weights(),
        )
        self._log = WatchedLog(files.enter_context(closing(shared.connect(self.name))))
        self.worker = WorkerRuntime(
            self._log, shared.codec, self._app.registry, shared.clock, self.settings, shared.settings.shards
        )

    def start(self, parts: Parts) -> None:
        """Take tasks."""
        parts.run("worker", self.worker.run)

    def stop(self) -> None:
        """Take no more; what runs may end within the grace. A second call shortens it to nothing."""
        self.worker.stop()

    def hurry(self) -> None:
        """Give back what runs."""
        self.worker.stop()

    def liveness(self, stalled_s: float) -> PartHealth:
        """By the last turn of its loop, and by attempts that could not be ended."""
        idle_s, stats = self._log.turned_s(), self.worker.stats
        detail = (
            f"{stats.running} of {stats.slots} slots busy, {stats.abandoned} abandoned, last turn {idle_s:.1f} s ago"
        )
        return PartHealth(name=self.name, is_ok=idle_s < stalled_s and stats.is_healthy, detail=detail)

    def facts(self) -> Mapping[str, Any]:
        """What it works for."""
        return {"worker_id": self.settings.worker_id, "queues": self.settings.queues, "app": self._app_name}

    def collectors(self) -> tuple[Collector, ...]:
        """Of the attempts."""
        return (WorkerMetrics(lambda: self.worker),)


def live_of(scheduler: SchedulerRole) -> Callable[[], LiveTasks]:
    """What the shards of a role answer, once it is connected."""
    return lambda: ShardsHere(scheduler.runtime)
