"""Processes that are started while Cassandra is away: they take tasks and run them, and show them once it is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.services import Cluster as Services
from tests.cluster import Cluster, Process
from tests.harness import TASKS, Api, eventually, notes
from tests.services import own_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service("kafka"),
    pytest.mark.service("cassandra"),
]

APP = "tests.process_app:app"
LONG_S = 120.0


@pytest.fixture
def services() -> Iterator[Services]:
    """A node of Cassandra that was not started yet: where it will be is known."""
    with own_cluster(cassandra=1, is_up=False) as services:
        yield services


def begun(files: ExitStack, folder: Path, services: Services) -> Cluster:
    """Topics alone; at the end of `files` all processes end."""
    address = services.cassandra.hosts[0], services.cassandra.port
    # A process that would wait for Cassandra at its start would end at once.
    cluster = Cluster(folder, cassandra=address, settings={"STARTUP_TIMEOUT_S": "5"})
    files.push(cluster)
    cluster.run("topics", "apply")
    return cluster


def readiness(process: Process, of: str = "health") -> tuple[int, dict[str, str]]:
    """What it says to its operators: the status, and the details by part."""
    answer = httpx.get(f"{process.facts[of]}/readyz", timeout=10)
    return answer.status_code, {part["name"]: part["detail"] for part in answer.json()["parts"]}


def test_tasks_are_taken_and_run_and_shown_when_it_comes(tmp_path: Path, services: Services) -> None:
    journal = tmp_path / "journal"
    with ExitStack() as files:
        cluster = begun(files, tmp_path, services)
        cluster.start("scheduler")
        surface, projector = cluster.start("api"), cluster.start("projector")
        cluster.start("worker", APP)
        api = cluster.api(surface)
        first = api.submit("note", {"journal": str(journal), "text": "away"})
        eventually(lambda: notes(journal) == ["away 1"], "it ran", LONG_S)

        check_reads_are_put_off(api)
        code, parts = readiness(surface)
        assert (code, "no node of Cassandra answers" in parts["api"]) == (200, True)
        assert "no node of Cassandra answers" in eventually(lambda: readiness(projector)[1]["projector"])
        assert readiness(projector)[0] == 503
        assert [httpx.get(f"{one.facts['health']}/healthz").status_code for one in (surface, projector)] == [200, 200]

        services.up()
        eventually(lambda: "tidewheel schema apply" in readiness(surface)[1]["api"], "the tables are asked for", LONG_S)
        check_reads_are_put_off(api)
        second = api.submit("note", {"journal": str(journal), "text": "empty"})
        cluster.run("schema", "apply")
        for task_id in (first, second):
            shown = eventually(lambda: succeeded(api, task_id), "the view has it", LONG_S)  # noqa: B023
            assert shown["attempts"] == 1
        eventually(lambda: readiness(projector)[0] == 200, "it keeps up", LONG_S)
        assert "view" not in readiness(surface)[1]["api"]


def test_all_of_it_in_one_process_waits_in_the_same_way(tmp_path: Path, services: Services) -> None:
    journal = tmp_path / "journal"
    with ExitStack() as files:
        cluster = begun(files, tmp_path, services)
        process = cluster.start("all", APP)
        api = cluster.api(process)
        task_id = api.submit("note", {"journal": str(journal), "text": "away"})
        eventually(lambda: notes(journal) == ["away 1"], "it ran", LONG_S)
        assert api("GET", TASKS).status_code == 503
        assert readiness(process, "api")[0] == 200  # it takes tasks
        services.up()
        cluster.run("schema", "apply")
        eventually(lambda: succeeded(api, task_id), "the view has it", LONG_S)
        eventually(lambda: readiness(process)[0] == 200, "all parts work", LONG_S)


def check_reads_are_put_off(api: Api) -> None:
    """What only the view knows is not denied: it cannot be told now, and the client is told when to ask again."""
    for path in (f"{TASKS}/nobody", TASKS, "/api/v1/dlq"):
        answer = api("GET", path)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1"), answer.text
        problem = answer.json()
        assert problem["type"] == "urn:tidewheel:problem:unavailable"
        assert "Cassandra" in problem["detail"]


def succeeded(api: Api, task_id: str) -> dict[str, Any] | None:
    """The task, if the API knows that it succeeded."""
    answer = api("GET", f"{TASKS}/{task_id}")
    task: dict[str, Any] = answer.json()
    return task if answer.status_code == 200 and task["status"] == "SUCCEEDED" and not task["is_partial"] else None
