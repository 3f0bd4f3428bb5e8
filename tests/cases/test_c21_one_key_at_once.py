"""C21: many equal submissions with one key, at once and on several API nodes, are one task.

Chosen: all of them are answered with that task (202 to the first, 200 to the others), none with "in progress". A key is
its task's id, hashed with the tenant, so there is no state in which the key is known and the task is not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from scheduler.gateway import Gateway
from scheduler.refusals import Refused
from scheduler.service import TaskService
from scheduler.submission import Submission, validated
from schemas.codec import Codec
from schemas.ids import keyed_task_id
from tests.harness import SHARDS, TASKS, Api, Served, eventually, history, notes, running
from tidewheel import Engine

AT_ONCE, ROUNDS = 50, 20


class Node:
    """One more API node: a gateway of its own on the same log."""

    def __init__(self, engine: Engine, partition: int) -> None:
        self.gateway = Gateway(engine.broker.connect(), Codec.builtin(), shards=SHARDS, partition=partition)
        self.service = TaskService(
            self.gateway, engine.view, engine.service._live, clock=engine.clock, random_bits=engine.service._random_bits
        )
        self.gateway.start()

    def submit(self, key: str, tenant_id: str = "default") -> str:
        fields = {"task_type": "t", "idempotency_key": key, "metadata": {"tenant_id": tenant_id}}
        submission = validated(Submission, fields)
        return str(self.service.submit(submission).run().view.task_id)

    def close(self) -> None:
        self.service.close()
        self.gateway.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(None, port=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield pool


def test_fifty_at_once_on_three_nodes_are_one_task(engine: Engine, pool: ThreadPoolExecutor) -> None:
    nodes = [Node(engine, partition) for partition in (1, 2)]
    with Api(engine.address) as api:

        def submit(number: int, key: str) -> str:
            if number % 3:
                return nodes[number % 3 - 1].submit(key)
            body = {"task_type": "t", "idempotency_key": key, "metadata": {"tenant_id": "default"}}
            answer = api("POST", TASKS, json=body)
            assert answer.status_code in (200, 202), answer.text
            return str(answer.json()["task_id"])

        for number in range(ROUNDS):
            key = f"round-{number}"
            ids = set(pool.map(submit, range(AT_ONCE), [key] * AT_ONCE))
            assert ids == {keyed_task_id("default", key)}
            assert nodes[0].submit(key) in ids  # a later repeat
            assert nodes[0].submit(key, tenant_id="other") not in ids
    for node in nodes:
        node.close()
    raw = history(engine)
    counts = Counter(raw.bodies(keyed_task_id("default", f"round-{n}")).count("TaskSubmitted") for n in range(ROUNDS))
    assert counts == {1: ROUNDS}


def submit_at(begun: threading.Barrier, node: Node, key: str, may_be_refused: bool) -> str | None:
    begun.wait(20)
    try:
        return node.submit(key)
    except Refused:
        assert may_be_refused
        return None


def test_a_node_that_goes_away_takes_no_key_with_it(engine: Engine, pool: ThreadPoolExecutor) -> None:
    """Those that asked it are told that it is not decided; the key is free, or a task."""
    for number in range(5):
        dying, staying = Node(engine, 1), Node(engine, 2)
        key, begun = f"dying-{number}", threading.Barrier(11)

        asked = [pool.submit(submit_at, begun, node, key, node is dying) for node in [dying, staying] * 5]
        begun.wait(20)
        dying.close()
        ids = {one.result(30) for one in asked} - {None}
        assert ids == {staying.submit(key)} == {keyed_task_id("default", key)}
        staying.close()
    raw = history(engine)
    assert all(raw.bodies(keyed_task_id("default", f"dying-{n}")).count("TaskSubmitted") == 1 for n in range(5))


def test_a_kill_in_the_middle_leaves_each_key_free_or_with_its_task(tmp_path: Path) -> None:
    journal = tmp_path / "journal.txt"
    keys = [f"k{n}" for n in range(100)]
    answered: dict[str, str] = {}

    def submit(api: Api, key: str) -> None:
        body = {"task_type": "note", "payload": {"journal": str(journal), "text": key}, "idempotency_key": key}
        try:
            answer = api("POST", TASKS, json=body)
        except httpx.TransportError:
            return
        assert answer.status_code in (200, 202), answer.text
        assert answered.setdefault(key, answer.json()["task_id"]) == answer.json()["task_id"]

    with Served(tmp_path / "data", "tests.process_app:app") as served, ThreadPoolExecutor(10) as pool:
        api = served.api
        asked = [pool.submit(submit, api, key) for key in keys for _ in range(2)]
        eventually(lambda: len(answered) >= 20, "the first answers")
        served.process.kill()
        for one in asked:
            one.result()
        before = dict(answered)
        assert served.ended() == -9
        served.start()
        for key in keys:
            submit(served.api, key)
        assert before.items() <= answered.items() and answered.keys() == set(keys)
        for task_id in answered.values():
            assert served.api.until(task_id)["status"] == "SUCCEEDED"
        served.kill()
    raw = history(tmp_path / "data")
    assert all(raw.bodies(task_id).count("TaskSubmitted") == 1 for task_id in answered.values())
    assert len(raw.tasks) == len(keys)
    assert {line.split()[0] for line in notes(journal)} == set(keys)
