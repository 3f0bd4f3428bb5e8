"""The processes of a cluster: one or more roles over Kafka and Cassandra, in one process.

A role is connected, then started; a service that is not there yet is waited for. The end has two waves: first what
brings work (API, worker), within its grace, while everything else goes on to serve it; then the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import TypeVar

import structlog

from infra.kafka.topics import TopicAdmin
from scheduler.api.health import Health, PartHealth
from scheduler.timer_report import TimersView
from schemas.errors import Retriable
from tidewheel.brokers import BrokerWatch, check_topics
from tidewheel.clock import SteadyClock
from tidewheel.cluster_settings import ClusterSettings
from tidewheel.codecs import codec_of
from tidewheel.metrics import exposition, registry_of
from tidewheel.operating import OperatingServer
from tidewheel.parts import Parts, process_name
from tidewheel.roles import Role, Shared
from tidewheel.tuning import tuned

RETRY_S = 1.0  # between tries to reach what is not there at the start
REPEAT_LOG_S = 10.0  # between two lines that say so
JOIN_S = 15.0  # how long one part may take to stop

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Unreachable(Exception):
    """What a process needs could not be reached within its startup timeout."""


class Abandoned(Exception):
    """The start was given up from outside."""


class Node:
    """A process of a cluster with its roles: `start`, then `stop`. See `tidewheel.serving.Process`."""

    def __init__(self, settings: ClusterSettings, roles: Sequence[Role]) -> None:
        """Roles start in this order, and end in the opposite one."""
        self.settings, self.roles = settings, tuple(roles)
        self.name = process_name()
        self._parts = Parts("process")
        self._files = ExitStack()
        self._started: list[Role] = []
        self._brokers: BrokerWatch | None = None
        self._waits_for: str | None = "it is being started"
        self._abandoned = threading.Event()
        self.operating: OperatingServer | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and start each role. Raises Unreachable, Fatal; then nothing is left."""
        try:
            self._files.enter_context(tuned())
            self._listen()
            give_up_at = time.monotonic() + self.settings.startup_timeout_s
            shared = self._reach("start", self._share, give_up_at)
            self._brokers = shared.brokers
            self._parts.run("brokers", partial(shared.brokers.run, self._parts.stopping))
            for role in self.roles:
                self._reach(role.name, partial(role.connect, shared), give_up_at)
                self._started.append(role)
                role.start(self._parts)
            self._waits_for = None
        except BaseException:
            self.stop(0)
            raise

    def stop(self, grace_s: float | None = None) -> None:
        """End what brings work first, within the grace, which `grace_s` can only shorten; then the rest. Idempotent."""
        self._stop_work(grace_s)
        self._parts.stopping.set()
        for role in reversed(self._started):
            role.end()
        self._parts.join_all(JOIN_S)
        while self._started:
            self._started.pop().close()
        self._files.close()

    def _stop_work(self, grace_s: float | None) -> None:
        working = [role for role in reversed(self._started) if role.brings_work]
        for role in working:
            role.stop()
        granted_s = self.settings.worker.grace_s
        if grace_s is not None and grace_s < granted_s:
            for role in working:
                self._join(role, grace_s)
                role.hurry()
        for role in working:
            self._join(role, granted_s + JOIN_S)

    def _join(self, role: Role, timeout_s: float) -> None:
        for part in role.parts:
            self._parts.join(part, timeout_s)

    def abandon(self) -> None:
        """Wait no longer for what a start needs; from any thread."""
        self._abandoned.set()

    def hurry(self) -> None:
        """Shorten the grace to nothing (a second signal)."""
        for role in self._started:
            role.hurry()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a part fails; whether one did."""
        return self._parts.wait(timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """What the first part that died died of."""
        return self._parts.failure

    # --- reaching what it needs -----------------------------------------------------------------------------------

    def _reach(self, part: str, connect: Callable[[], T], give_up_at: float) -> T:
        """Try until it succeeds. Unreachable: not in time. Abandoned: `abandon` was called."""
        told_at = -REPEAT_LOG_S
        while True:
            try:
                return connect()
            except Retriable as error:
                now = time.monotonic()
                left_s = give_up_at - now
                self._waits_for = str(error)
                if left_s <= 0:
                    waited = f"gave up after {self.settings.startup_timeout_s:g} s (startup_timeout_s)"
                    raise Unreachable(f"{waited}: {error}") from error
                if now - told_at >= REPEAT_LOG_S:
                    told_at = now
                    _log.warning("waiting for what it needs", part=part, reason=str(error), gives_up_in_s=round(left_s))
                if self._abandoned.wait(min(RETRY_S, left_s)):
                    raise Abandoned from error

    def _share(self) -> Shared:
        settings = self.settings
        kafka, catalog = settings.of_kafka(), settings.catalog()
        admin = TopicAdmin(kafka)
        check_topics(admin, catalog)
        with ExitStack() as files:
            codec = codec_of(settings.registry, files)
            self._files.push(files.pop_all())
        return Shared(settings, kafka, catalog, BrokerWatch(admin), codec, SteadyClock(), Random(), self.name)

    # --- health ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        health = self.settings.health
        if health.port is None:
            return
        self.operating = OperatingServer(
            health.host,
            health.port,
            liveness=self.liveness,
            readiness=self.readiness,
            metrics=self._metrics,
            timers=self._timers,
        )
        self._files.callback(self.operating.stop)

    def liveness(self) -> Health:
        """Whether all loops go on; one that waits for its services at the start is alive too."""
        return Health(parts=tuple(role.liveness(self.settings.health.stalled_s) for role in tuple(self._started)))

    def readiness(self) -> Health:
        """Whether all roles do their work now."""
        parts = [role.readiness(self.settings.health.stalled_s) for role in tuple(self._started)]
        if self._brokers is not None:
            parts.append(self._brokers.readiness())
        if self._waits_for is not None:
            parts.append(PartHealth(name="start", is_ok=False, detail=self._waits_for))
        if self._parts.stopping.is_set():
            parts.append(PartHealth(name="stop", is_ok=False, detail="it is being stopped"))
        return Health(parts=tuple(parts))

    def _timers(self) -> TimersView | None:
        return next((view for role in tuple(self._started) if (view := role.timers()) is not None), None)

    def _metrics(self) -> bytes:
        return exposition(registry_of(*(one for role in tuple(self._started) for one in role.collectors())))
