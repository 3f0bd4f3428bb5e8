"""A cluster under load while its processes die: afterwards the raw events are read, and contradict nothing."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient

from scheduler.runtime import GROUP as SCHEDULERS
from schemas.messages import Status, TaskAttemptLost
from schemas.topics import worker_group
from tests.cluster import Cluster
from tests.harness import SHARDS, TASKS, Api, History, eventually, notes
from tests.services import own_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service("kafka"),
    pytest.mark.service("cassandra"),
    pytest.mark.timeout(300),
]

APP = "tests.process_app:app"
BULK = 20
LONG_S = 120.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Topics and tables; the test starts the processes."""
    with Cluster(tmp_path) as made:
        yield made


class Load:
    """A client that submits bulks without pause and notes what was acknowledged."""

    def __init__(self, api: Api, journal: Path) -> None:
        self.acknowledged: dict[str, str] = {}  # text by task id
        self._api, self._journal = api, journal
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(1)
        self._running = self._threads.submit(self._run)

    def has(self, count: int) -> bool:
        """Whether so many were acknowledged."""
        if self._running.done():
            self._running.result()
        return len(self.acknowledged) >= count

    def stop(self) -> None:
        """Submit no more. Raises what went wrong."""
        self._stopping.set()
        self._running.result(LONG_S)
        self._threads.shutdown()

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            texts = [f"{number}-{n}" for n in range(BULK)]
            number += 1
            tasks = [{"task_type": "note", "payload": {"journal": str(self._journal), "text": text}} for text in texts]
            try:
                answer = self._api("POST", f"{TASKS}/bulk", json={"tasks": tasks})
            except httpx.TransportError:
                continue
            assert answer.status_code in (202, 207, 503), answer.text
            if answer.status_code == 503:
                continue  # not decided in time: it may still be accepted
            for text, result in zip(texts, answer.json()["results"], strict=True):
                if "task" in result:
                    self.acknowledged[result["task"]["task_id"]] = text


def check_all_ended(cluster: Cluster, acknowledged: dict[str, str], journal: Path) -> None:
    """Whatever was acknowledged succeeded, was started at least once, and no input was decided twice."""

    def ended() -> bool:
        return all(task.status is Status.SUCCEEDED for task in cluster.history().tasks.values())

    eventually(ended, "all tasks succeeded", LONG_S)
    found = cluster.history()
    assert not acknowledged.keys() - found.tasks.keys()
    run = {line.split()[0] for line in notes(journal)}
    assert not set(acknowledged.values()) - run


def test_a_scheduler_that_is_killed_loses_nothing_and_decides_nothing_twice(cluster: Cluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    api = cluster.api(cluster.start("api"))
    cluster.start("projector")
    schedulers = [cluster.start("scheduler"), cluster.start("scheduler")]
    cluster.start("worker", APP)
    load = Load(api, journal)
    for round_ in range(3):
        eventually(lambda: load.has((round_ + 1) * 200), "tasks are accepted", LONG_S)  # noqa: B023
        victim = schedulers[round_ % 2]
        victim.kill()
        victim.start()
    eventually(lambda: load.has(800), "tasks are accepted", LONG_S)
    load.stop()
    check_all_ended(cluster, load.acknowledged, journal)
    some = next(iter(load.acknowledged))
    assert api.until(some)["status"] == "SUCCEEDED"


def test_tasks_of_a_worker_that_is_killed_run_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    journal, gate = tmp_path / "journal", tmp_path / "gate"
    api = cluster.api(cluster.start("api"))
    cluster.start("projector")
    cluster.start("scheduler")
    doomed = cluster.start("worker", APP)
    ids = [api.submit("hold", {"journal": str(journal), "gate": str(gate)}) for _ in range(20)]
    eventually(lambda: len(notes(journal)) >= 20, "all of them run", LONG_S)
    cluster.start("worker", APP)
    doomed.kill()
    eventually(lambda: len(notes(journal)) >= 40, "all of them were started again", LONG_S)
    gate.touch()
    shown = [api.until(task_id) for task_id in ids]
    assert {(task["status"], task["attempts"]) for task in shown} == {("SUCCEEDED", 2)}
    found = cluster.history()
    assert {found.tasks[task_id].crash_count for task_id in ids} == {1}


def test_what_a_scheduler_wrote_after_a_long_pause_is_void(cluster: Cluster, tmp_path: Path) -> None:
    """It stands still for longer than its group waits, so that its shards go to another; then it wakes up."""
    journal = tmp_path / "journal"
    api = cluster.api(cluster.start("api"))
    cluster.start("projector")
    paused, other = cluster.start("scheduler"), cluster.start("scheduler")
    cluster.start("worker", APP)
    load = Load(api, journal)
    eventually(lambda: load.has(200), "tasks are accepted", LONG_S)
    opened = len(cluster.openings())
    paused.send(signal.SIGSTOP)
    eventually(lambda: len(cluster.openings()) >= opened + SHARDS // 2, "the other took its shards", LONG_S)
    before = len(load.acknowledged)
    eventually(lambda: load.has(before + 200), "tasks are accepted", LONG_S)
    paused.send(signal.SIGCONT)
    before = len(load.acknowledged)
    eventually(lambda: load.has(before + 200), "tasks are accepted", LONG_S)
    load.stop()
    check_all_ended(cluster, load.acknowledged, journal)
    for process in (paused, other):
        assert process.process.poll() is None, process.errors()


def test_a_scheduler_that_is_stopped_hands_its_shards_over(cluster: Cluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    api = cluster.api(cluster.start("api"))
    cluster.start("projector")
    first, _ = cluster.start("scheduler"), cluster.start("scheduler")
    cluster.start("worker", APP)
    load = Load(api, journal)
    eventually(lambda: load.has(200), "tasks are accepted", LONG_S)
    first.send(signal.SIGTERM)
    assert first.ended() == 0, first.errors()
    before = len(load.acknowledged)
    eventually(lambda: load.has(before + 400), "tasks are accepted", LONG_S)
    load.stop()
    check_all_ended(cluster, load.acknowledged, journal)


def test_while_the_view_is_down_tasks_are_accepted_run_and_shown_later(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with own_cluster(cassandra=1) as services:
        address = services.cassandra.hosts[0], services.cassandra.port
        with Cluster(tmp_path, cassandra=address) as cluster:
            api = cluster.api(cluster.start("api"))
            cluster.start("projector")
            cluster.start("scheduler")
            cluster.start("worker", APP)
            shown = api.submit("note", {"journal": str(journal), "text": "before"})
            assert api.until(shown)["status"] == "SUCCEEDED"
            (node,) = services.nodes
            node.kill()
            ids = [api.submit("note", {"journal": str(journal), "text": f"during-{n}"}) for n in range(50)]
            eventually(lambda: len(notes(journal)) == 51, "they ran", LONG_S)
            services.up()
            eventually(lambda: all(is_shown(api, task_id) for task_id in ids), "the view caught up", LONG_S)
            texts = {task_id: f"during-{number}" for number, task_id in enumerate(ids)}
            check_all_ended(cluster, texts, journal)


def is_shown(api: Api, task_id: str) -> bool:
    """Whether the API knows that the task succeeded."""
    answer = api("GET", f"{TASKS}/{task_id}")
    return answer.status_code == 200 and answer.json()["status"] == "SUCCEEDED"


# --- brokers ----------------------------------------------------------------------------------------------------------


def coordinator_of(cluster: Cluster, group: str) -> str:
    """The broker, as a node of the services, that a group's members report to."""
    properties: Any = cluster.kafka.client()
    client = AdminClient(properties)  # which must live until it has answered
    (asked,) = client.describe_consumer_groups([f"{cluster.kafka.prefix}{group}"]).values()
    return f"kafka-{asked.result(LONG_S).coordinator.id}"


def check_starts(found: History, lines: list[str]) -> int:
    """No task was started again before the events gave its attempt up; how many handlers ran more than their first.

    A worker starts a handler while its report is on the way: if that is lost, the same attempt starts once more. And a
    broker that is gone may keep a worker from being heard until its attempts are given up. Both are duplicates that
    delivery at least once allows: they are counted.
    """
    begun = Counter(line.rpartition(" ")[0] for line in lines)
    for event in itertools.chain.from_iterable(found.of.values()):
        if isinstance(event.body, TaskAttemptLost):
            print(f"{event.at} {event.entity_id} was given up: {event.body}")  # noqa: T201
    for task_id, task in found.tasks.items():
        given_up = found.bodies(task_id).count("TaskAttemptLost")
        assert found.starts(task_id) == list(range(1, given_up + 2)), found.of[task_id]
        assert task.crash_count <= given_up
    return begun.total() - len(begun)


@pytest.mark.timeout(600)
def test_one_broker_of_three_goes_and_comes_back(tmp_path: Path) -> None:
    """First the one that schedulers report to, then the one of the workers: each group loses its members meanwhile."""
    journal, held_journal, gate = tmp_path / "journal", tmp_path / "held", tmp_path / "gate"
    with (
        own_cluster(kafka=3) as services,
        Cluster(tmp_path, kafka=services.kafka.bootstrap, settings={"KAFKA_REPLICATION": "3"}) as cluster,
    ):
        api = cluster.api(cluster.start("api"))
        cluster.start("projector")
        processes = [cluster.start("scheduler"), cluster.start("worker", APP)]
        held = [api.submit("hold", {"journal": str(held_journal), "gate": str(gate)}) for _ in range(8)]
        eventually(lambda: len(notes(held_journal)) >= len(held), "all of them run", LONG_S)
        load = Load(api, journal)
        eventually(lambda: load.has(200), "tasks are accepted", LONG_S)
        for group in (SCHEDULERS, worker_group("default")):
            services.node(coordinator_of(cluster, group)).kill()
            before = len(load.acknowledged)
            eventually(lambda: load.has(before + 400), "tasks are accepted without it", LONG_S)  # noqa: B023
            services.up()
            before = len(load.acknowledged)
            eventually(lambda: load.has(before + 400), "tasks are accepted again", LONG_S)  # noqa: B023
        load.stop()
        gate.touch()
        check_all_ended(cluster, load.acknowledged, journal)
        found = cluster.history()
        assert not set(held) - found.tasks.keys()
        begun = [line.removeprefix("begin ") for line in notes(held_journal) if line.startswith("begin ")]
        print("started again:", check_starts(found, [*notes(journal), *begun]))  # noqa: T201
        for process in processes:
            assert process.process.poll() is None, process.errors()
