"""Producers that know nothing of ours submit tasks through the broker: they go to the right shard at once, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from infra.registry import RegistryIds
from schemas.codec import Codec
from schemas.ids import shard_of
from schemas.messages import RequestForwarded, SubmitTask, TaskSpec, TaskSubmitted, TaskSucceeded
from schemas.registry import answer
from tests.cases.topics_stage import BUILTIN, TopicsStage, staged
from tests.services import kafka_bootstrap, registry_url
from tests.unit.test_registry import served
from tidewheel import App
from tidewheel.clock import SteadyClock
from workers.runtime import WorkerRuntime
from workers.settings import WorkerSettings

PRODUCERS = Path(__file__).parents[2] / "examples" / "producers"
SHARDS = 5
COUNT = 40
RUN_S = 100  # of a producer, with the time in which Java compiles its source
app = App()
ran: list[int] = []

Command = Callable[[str, str], list[str]]  # (registry, topic) → the command that runs a producer


@app.task(name="count")
async def count(number: int) -> int:
    ran.append(number)
    return number


def python_producer(_: Path) -> Command:
    return lambda registry, topic: [
        sys.executable,
        str(PRODUCERS / "python_plain.py"),
        *("--bootstrap", kafka_bootstrap(), "--registry", registry, "--topic", topic),
        *("--type", "count", "--count", str(COUNT)),
    ]


def java_producer(folder: Path) -> Command:
    missing = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    if missing:
        reason = f"not on this machine: {', '.join(missing)}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    fetch = ["mvn", "-q", "-B", "-f", str(PRODUCERS / "java" / "pom.xml"), "dependency:copy-dependencies"]
    subprocess.run([*fetch, f"-DoutputDirectory={folder}"], check=True, timeout=RUN_S, stdout=sys.stderr)
    run = ["java", "-cp", f"{folder}/*", str(PRODUCERS / "java" / "Producer.java"), kafka_bootstrap()]
    return lambda registry, topic: [*run, registry, topic, "count", str(COUNT)]


@contextmanager
def registry_of(kind: str) -> Iterator[tuple[str, Codec]]:
    """A registry's URL, and the scheduler's codec: a real one, or the read endpoints of our own API."""
    if kind == "built-in":
        with served(lambda _, path, __: answer(path)) as url:
            yield url, BUILTIN
        return
    with closing(RegistryIds(registry_url())) as ids:
        yield registry_url(), Codec(ids)


@contextmanager
def worker_of(stage: TopicsStage) -> Iterator[None]:
    """A worker of `app`."""
    settings = WorkerSettings(worker_id="worker")
    worker = WorkerRuntime(stage.topics.connect(), stage.codec, app.registry, SteadyClock(), settings, SHARDS)
    with ThreadPoolExecutor(1, "worker") as threads:
        running = threads.submit(worker.run)
        try:
            yield
        finally:
            worker.stop()
            worker.stop()
            running.result(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.service("kafka")
@pytest.mark.parametrize("registry", ["built-in", pytest.param("registry", marks=pytest.mark.service("registry"))])
@pytest.mark.parametrize("producer", [python_producer, java_producer])
def test_what_a_foreign_producer_submits_runs(
    producer: Callable[[Path], Command], registry: str, tmp_path: Path
) -> None:
    command = producer(tmp_path / "libs")
    ran.clear()
    with registry_of(registry) as (url, codec), staged("kafka", shards=SHARDS, codec=codec) as stage:
        topic = f"{stage.topics.prefix}task-requests"
        with ThreadPoolExecutor(1, "producer") as threads, worker_of(stage):
            produced = threads.submit(
                subprocess.run, command(url, topic), stdout=subprocess.PIPE, timeout=RUN_S, check=True, text=True
            )
            stage.until(produced.done)
            places = [json.loads(line) for line in produced.result().stdout.splitlines()]
            stage.until(lambda: len(ran) >= COUNT)
            stage.until(lambda: not any(host.shard.state.tasks for host in stage.runtime.hosts.values()))
        events = stage.events()

    assert sorted(ran) == list(range(COUNT))
    assert [place["partition"] for place in places] == [shard_of(place["task_id"], SHARDS) for place in places]
    assert len({place["partition"] for place in places}) > 1
    assert not any(isinstance(event.body, RequestForwarded) for event in events)
    for kind in (TaskSubmitted, TaskSucceeded):
        of_kind = {event.entity_id for event in events if isinstance(event.body, kind)}
        assert of_kind == {place["task_id"] for place in places}


@pytest.mark.timeout(120)
@pytest.mark.service("kafka")
def test_with_another_partitioner_and_without_ids_and_with_junk_each_task_runs_once() -> None:
    """The owner drops its memory and loads again in between, so that what it owes is sent again."""
    ran.clear()
    with staged("kafka", shards=SHARDS) as stage:
        topic = f"{stage.topics.prefix}task-requests"
        with worker_of(stage):
            producer = Producer({"bootstrap.servers": kafka_bootstrap(), "partitioner": "consistent_random"})
            for number in range(COUNT):
                task_id = f"task-{number}" if number % 2 else None
                spec = TaskSpec(task_type="count", payload=b'{"number": %d}' % number)
                request = SubmitTask(request_id="r", spec=spec, submitted_at=0, task_id=task_id)
                producer.produce(topic, BUILTIN.encode(request), task_id)
                if number % 8 == 0:
                    producer.produce(topic, b"junk %d" % number, b"key")
            assert producer.flush(30) == 0
            stage.until(lambda: len(ran) > COUNT // 4)
            for host in stage.runtime.hosts.values():
                host.reload("the test asks for it")
            stage.until(lambda: len(ran) >= COUNT)
            found = stage.invalid(COUNT // 8)
            stage.until(lambda: not any(host.shard.state.tasks for host in stage.runtime.hosts.values()))
        events = stage.events()
    assert sorted(ran) == list(range(COUNT))
    assert sorted(one.value or b"" for one in found) == sorted(b"junk %d" % number for number in range(0, COUNT, 8))
    submitted = [event for event in events if isinstance(event.body, TaskSubmitted)]
    assert len(submitted) == COUNT
    forwards = sum(isinstance(event.body, RequestForwarded) for event in events)
    assert forwards == sum(event.origin is not None for event in submitted) > 0
