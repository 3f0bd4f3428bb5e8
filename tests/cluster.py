"""A cluster for end-to-end tests: processes as operators start them, over a real Kafka and a real Cassandra."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from infra.kafka.log import KafkaLog
from infra.kafka.settings import KafkaSettings
from infra.kafka.topics import TopicAdmin
from infra.topics import ClusterSizes, cluster_catalog
from scheduler.ports import TopicPartition
from schemas.messages import ShardOpened
from schemas.topics import TASK_EVENTS
from tests.harness import SHARDS, Api, Child, History, Stored, eventually, stored
from tests.services import cassandra_address, kafka_bootstrap

START_S = 90.0  # until a process of a cluster is ready, on a machine that is busy with others


class Process(Child):
    """One process of a cluster."""

    start_s = START_S

    def __init__(self, arguments: list[str], stderr: Path, environ: dict[str, str]) -> None:
        super().__init__(["tidewheel", *arguments, "--json"], stderr, environ)
        self.facts: dict[str, Any] = {}

    def _on_ready(self, facts: dict[str, Any]) -> None:
        self.facts = facts


class Cluster:
    """Topics and a keyspace of its own, and whatever processes a test starts; all of them end with the block."""

    def __init__(
        self,
        folder: Path,
        *,
        kafka: str | None = None,
        cassandra: tuple[str, int] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Services are those that all tests share, unless given; `settings` are variables without TIDEWHEEL_."""
        host, port = cassandra or cassandra_address()
        name = uuid4().hex[:12]
        self.folder = folder
        self._has_own_brokers = kafka is not None
        self.kafka = KafkaSettings(bootstrap=kafka or kafka_bootstrap(), prefix=f"test-{name}.")
        given = {
            "KAFKA_BOOTSTRAP": self.kafka.bootstrap,
            "KAFKA_PREFIX": self.kafka.prefix,
            "KAFKA_REPLY_PARTITIONS": "4",
            "CASSANDRA_HOSTS": host,
            "CASSANDRA_PORT": str(port),
            "CASSANDRA_KEYSPACE": f"test_{name}",
            "SHARDS": str(SHARDS),
            "HEALTH_PORT": "0",
            "API_PORT": "0",
        }
        self.environ = {f"TIDEWHEEL_{key}": value for key, value in (given | dict(settings or {})).items()}
        self._files = ExitStack()
        self._started = 0

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(2) as threads:  # each waits for another service most of the time
            for applied in [threads.submit(self.run, what, "apply") for what in ("topics", "schema")]:
                applied.result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.close()
        if not self._has_own_brokers:
            TopicAdmin(self.kafka).remove_all()

    def run(self, *arguments: str) -> str:
        """Run a command to its end; what it wrote to stdout."""
        command = [sys.executable, "-m", "tidewheel", *arguments, "--json"]
        environ = os.environ | self.environ
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=START_S, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *arguments: str) -> Process:
        """Start a process: `scheduler`, `worker`, `MODULE:APP`, …"""
        self._started += 1
        stderr = self.folder / f"{self._started}-{arguments[0]}.log"
        process = Process(list(arguments), stderr, self.environ)
        self._files.enter_context(process)
        return process

    def api(self, process: Process) -> Api:
        """Calls of an API process."""
        return self._files.enter_context(Api(process.facts["api"]))

    # --- raw events -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def log(self) -> Iterator[KafkaLog]:
        """A connection to the log."""
        log = KafkaLog(self.kafka, cluster_catalog(ClusterSizes(shards=SHARDS)), client_id="test")
        try:
            yield log
        finally:
            log.close()

    def records(self, topic: str) -> list[Any]:
        """All records of a topic, as they are now."""
        with self.log() as log, contextlib.closing(log.reader()) as reader:
            ends = {number: log.end_offset(TopicPartition(topic, number)) for number in range(log.partitions(topic))}
            for number in ends:
                reader.seek(TopicPartition(topic, number), 0)
            found: list[Any] = []

            def has_all() -> bool:
                log.poll(0.05)
                found.extend(reader.take(10_000))
                last = dict.fromkeys(ends, 0)
                for record in found:
                    last[record.partition] = max(last[record.partition], record.offset + 1)
                return all(last[number] >= end for number, end in ends.items())

            eventually(has_all, f"all of {topic} was read")
            return found

    def history(self) -> History:
        """The fold of the events, as any reader makes it: raises where they contradict each other."""
        events: list[Stored] = [stored(record) for record in self.records(TASK_EVENTS)]
        return History(sorted(events, key=lambda one: (one.shard, one.offset)))

    def openings(self) -> list[Stored]:
        """The events by which owners took over their shards."""
        events = [stored(record) for record in self.records(TASK_EVENTS)]
        return [one for one in events if isinstance(one.event.body, ShardOpened)]
