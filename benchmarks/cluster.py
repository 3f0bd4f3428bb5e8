"""A cluster to be measured: a real Kafka and a real Cassandra on this machine, and the processes of operators.

Services that run already are used if TIDEWHEEL_KAFKA_BOOTSTRAP and TIDEWHEEL_CASSANDRA_HOSTS name them; else they are
started, as by `tidewheel services up`, and kept until the benchmark ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Annotated, Any, Literal, Self
from uuid import uuid4

from msgspec import Meta

from benchmarks.contract import NothingMeasured, Options
from benchmarks.load import wait_until
from benchmarks.machine import processor_s_of, rss_mb
from benchmarks.shared_starts import PLACE, SharedStarts
from benchmarks.stage import PAYLOAD_BYTES, WAIT_S, Noop, blob_for, holding, noop_app
from infra.cassandra import CassandraSettings, CassandraView
from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.kafka.topics import TopicAdmin
from infra.services import BASE_PORT, PORTS_TAKEN
from infra.services import Cluster as Services
from infra.topics import ClusterSizes, cluster_catalog
from scheduler.core.admission import AdmissionSettings
from scheduler.gateway import Gateway
from scheduler.ports import Record, TopicPartition
from scheduler.service import ServiceSettings, TaskService
from schemas.codec import Codec
from schemas.errors import TidewheelIOError
from schemas.topics import TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS
from tidewheel.backend import LocalBackend
from tidewheel.clock import SteadyClock
from tidewheel.cluster_settings import ClusterSettings
from tidewheel.live import NoShards
from tidewheel.tuning import tuned

APP = "benchmarks.cluster_app:app"
START_S = 120.0  # until a process is ready
STOP_S = 30.0
READ_S = 300.0  # for all records of a topic
_ADDRESSES = ("TIDEWHEEL_KAFKA_BOOTSTRAP", "TIDEWHEEL_CASSANDRA_HOSTS", "TIDEWHEEL_CASSANDRA_PORT")
EVENTS_OF_A_TASK = 3  # submitted, started, succeeded


class ClusterOptions(Options, frozen=True, kw_only=True):
    """What the cluster is made of."""

    schedulers: Annotated[int, Meta(ge=1, le=16, description="scheduler processes")] = 1
    workers: Annotated[int, Meta(ge=0, le=16, description="worker processes")] = 1
    projectors: Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")] = 1
    # Two would be no more available than one.
    brokers: Annotated[Literal[1, 3], Meta(description="brokers of Kafka")] = 1


class Process:
    """A process of the cluster."""

    def __init__(self, arguments: list[str], environ: Mapping[str, str], errors: Path) -> None:
        """Start it, and wait until it says that it is ready."""
        self.name = arguments[0]
        command = [sys.executable, "-m", "tidewheel", *arguments, "--json", "--log-level", "warning"]
        with open(errors, "ab") as stderr:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, env=os.environ | dict(environ), start_new_session=True
            )
        with ExitStack() as undo:
            undo.callback(self.kill)
            self.facts: dict[str, Any] = self._said(errors)
            undo.pop_all()

    def _said(self, errors: Path) -> dict[str, Any]:
        assert self._process.stdout is not None
        is_there = select.select([self._process.stdout], [], [], START_S)[0]
        line = self._process.stdout.readline() if is_there else b""
        if not line:
            raise NothingMeasured(f"tidewheel {self.name} did not start: {errors.read_text()[-2_000:]}")
        return dict(json.loads(line))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.stop()

    def pause(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> float:
        """SIGTERM, and wait for the end; how long that took, in seconds."""
        begun_s = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        self.resume()  # if it is paused it would not hear of it
        try:
            self._wait()
        except subprocess.TimeoutExpired:
            self.kill()
        return time.monotonic() - begun_s

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._wait()

    def _wait(self) -> None:
        self._process.wait(STOP_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class ClusterStage:
    """A running cluster, its task type, and the starts of its tasks."""

    kafka: KafkaSettings
    environ: dict[str, str]
    shards: int
    folder: Path
    noop: Noop
    hold: Noop
    starts: SharedStarts
    view: CassandraView
    backend: LocalBackend
    own: Services | None = None  # those that the benchmark may end and pause
    processes: list[Process] = field(default_factory=list)
    blob: str = blob_for(PAYLOAD_BYTES)

    def start(self, *arguments: str) -> Process:
        """Start one more process."""
        process = Process(list(arguments), self.environ, self.folder / f"{arguments[0]}-{len(self.processes)}.log")
        self.processes.append(process)
        return process

    def processor_s(self) -> dict[str, float]:
        """Processor time so far, by kind of process; `submit` is this one, which submits."""
        used: dict[str, float] = {"submit": time.process_time()}
        for process in self.processes:
            used[process.name] = used.get(process.name, 0.0) + processor_s_of(process.pid)
        return used

    def cpu_s(self) -> float:
        """Processor time of all of them so far, together."""
        return sum(self.processor_s().values())

    def scheduler_rss_mb(self) -> float:
        """Memory of the schedulers."""
        return round(sum(rss_mb(process.pid) for process in self.processes if process.name == "scheduler"), 1)

    @contextmanager
    def log(self) -> Iterator[KafkaLog]:
        """A connection to the log."""
        with closing(KafkaLog(self.kafka, _catalog(self.shards), client_id="benchmark")) as log:
            yield log

    def end_offsets(self, log: KafkaLog) -> list[int]:
        """Where the events of each shard end."""
        return [log.end_offset(TopicPartition(TASK_EVENTS, shard)) for shard in range(self.shards)]

    def wait_until_settled(self, tasks: int, begun_at: int) -> bool:
        """Wait until the events of so many tasks are there, beyond the `begun_at` that were there before."""
        with self.log() as log:
            wanted = begun_at + EVENTS_OF_A_TASK * tasks
            return wait_until(lambda: sum(self.end_offsets(log)) >= wanted, WAIT_S, every_s=0.01)

    def view_lag(self, log: KafkaLog) -> int:
        """How many events the view lacks."""
        at = self.view.positions()
        ends = self.end_offsets(log)
        return sum(max(0, end - (at[shard].next_offset if shard in at else 0)) for shard, end in enumerate(ends))

    def records(self, topic: str) -> Iterator[Record]:
        """All records of a topic."""
        with self.log() as log, closing(log.reader()) as reader:
            left = {}
            for number in range(log.partitions(topic)):
                partition = TopicPartition(topic, number)
                if end := log.end_offset(partition):
                    left[number] = end
                    reader.seek(partition, 0)
            give_up_at = time.monotonic() + READ_S
            while left and time.monotonic() < give_up_at:
                log.poll(0.05)
                for record in reader.take(10_000):
                    yield record
                    if record.offset + 1 >= left.get(record.partition, 0):
                        left.pop(record.partition, None)
            if left:
                raise NothingMeasured(f"{topic} could not be read to its end")

    def log_bytes(self) -> int:
        """Keys and values of requests, reports and events."""
        topics = (TASK_REQUESTS, TASK_REPORTS, TASK_EVENTS)
        return sum(len(one.key or b"") + len(one.value or b"") for topic in topics for one in self.records(topic))


@contextmanager
def services(options: ClusterOptions) -> Iterator[dict[str, str]]:
    """The variables that name the services, which are there within the block."""
    given = {name: os.environ[name] for name in _ADDRESSES if name in os.environ}
    if len(given) >= 2:
        yield given
        return
    with started_services(Path(options.data) / "services", options, BASE_PORT) as made:
        yield _addresses(made)


@contextmanager
def started_services(folder: Path, options: ClusterOptions, base_port: int) -> Iterator[Services]:
    """Services of the benchmark's own; nothing of them runs after the block, nor if they do not start."""
    made = Services(folder, kafka=options.brokers, cassandra=1, base_port=base_port)
    try:
        made.up()
        yield made
    finally:
        made.down()


def _addresses(made: Services) -> dict[str, str]:
    address = made.addresses()
    values = (address["kafka"], address["cassandra"], address["cassandra_port"])
    return dict(zip(_ADDRESSES, map(str, values), strict=True))


@contextmanager
def running(
    options: ClusterOptions,
    folder: Path,
    capacity: int,
    *,
    has_own_services: bool = False,
    is_open: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Iterator[ClusterStage]:
    """A cluster with topics and tables of its own, and a gateway to it in this process.

    With `has_own_services` they are the benchmark's to end, whatever the environment names. With `is_open` one tenant
    may submit as fast as it can; else what a tenant may is as the settings have it by default. `environ` is added for
    all processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        own = None
        if has_own_services:
            own = files.enter_context(started_services(folder / "services", options, BASE_PORT - PORTS_TAKEN))
        addresses = files.enter_context(services(options)) if own is None else _addresses(own)
        environ = _environ(options, folder, addresses, is_open=is_open) | dict(environ or {})
        kafka = KafkaSettings(bootstrap=environ["TIDEWHEEL_KAFKA_BOOTSTRAP"], prefix=environ["TIDEWHEEL_KAFKA_PREFIX"])
        if own is None:  # else what follows would pay for it: partitions take memory of the broker
            files.callback(_remove_topics, kafka)
        for command in ("topics", "schema"):
            _apply(command, environ)
        starts = SharedStarts(folder / "starts", capacity)
        view = files.enter_context(closing(_view(environ)))
        app, noop = noop_app(lambda index: None)
        hold = holding(app, lambda index: None)
        admission = AdmissionSettings() if is_open else ClusterSettings().of_admission()
        backend = LocalBackend(files.enter_context(_submitting(kafka, options.shards, view, admission)))
        stage = ClusterStage(kafka, environ, options.shards, folder, noop, hold, starts, view, backend, own)
        files.callback(lambda: _stop(stage))
        for role, count in (("scheduler", options.schedulers), ("projector", options.projectors)):
            for _ in range(count):
                stage.start(role)
        for _ in range(options.workers):
            stage.start("worker", APP)
        files.enter_context(tuned())
        app.use(backend)
        yield stage


def _environ(options: ClusterOptions, folder: Path, addresses: Mapping[str, str], *, is_open: bool) -> dict[str, str]:
    run = uuid4().hex[:8]
    bounds = {"TIDEWHEEL_ADMISSION_TENANT_SUBMITS_PER_S": "1000000"} if is_open else {}
    return {
        **addresses,
        **bounds,
        "TIDEWHEEL_KAFKA_PREFIX": f"benchmark-{run}.",
        "TIDEWHEEL_KAFKA_REPLICATION": str(options.brokers),
        "TIDEWHEEL_CASSANDRA_KEYSPACE": f"benchmark_{run}",
        "TIDEWHEEL_SHARDS": str(options.shards),
        "TIDEWHEEL_HEALTH_PORT": "0",
        PLACE: str((folder / "starts").resolve()),
    }


def _view(environ: Mapping[str, str]) -> CassandraView:
    settings = CassandraSettings(
        hosts=tuple(environ["TIDEWHEEL_CASSANDRA_HOSTS"].split(",")),
        port=int(environ.get("TIDEWHEEL_CASSANDRA_PORT", "9042")),
        keyspace=environ["TIDEWHEEL_CASSANDRA_KEYSPACE"],
    )
    return CassandraView(settings)


def _remove_topics(kafka: KafkaSettings) -> None:
    """What was measured counts even if they stay."""
    try:
        TopicAdmin(kafka).remove_all()
    except TidewheelIOError as error:
        print(f"the topics {kafka.prefix}* are left on the brokers: {error}", file=sys.stderr)


def _stop(stage: ClusterStage) -> None:
    with ExitStack() as running_ones:  # all of them, whatever one of them does
        for process in stage.processes:
            running_ones.push(process)


@contextmanager
def _submitting(
    kafka: KafkaSettings, shards: int, view: CassandraView, admission: AdmissionSettings
) -> Iterator[TaskService]:
    """The way in, as an API process has it."""
    log = KafkaLog(kafka, _catalog(shards), client_id="benchmark-api")
    gateway = Gateway(log, Codec.builtin(), shards=shards, partition=0)
    service = TaskService(
        gateway,
        view,
        NoShards(),
        clock=SteadyClock(),
        random_bits=Random().getrandbits,
        settings=ServiceSettings(idempotency_window_s=86_400, admission=admission),
    )
    gateway.start()
    try:
        yield service
    finally:
        service.close()
        gateway.close()


def _apply(command: str, environ: Mapping[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tidewheel", command, "apply", "--json"],
        env=os.environ | dict(environ),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    if done.returncode:
        raise NothingMeasured(f"tidewheel {command} apply: {done.stdout}{done.stderr}")


def _catalog(shards: int) -> Any:
    return cluster_catalog(ClusterSizes(shards=shards))
