"""Tasks in the delay wheel of a running engine: shown, cancelled, changed, repeated and started like all others."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness import TASKS, Api, eventually, history, running
from tidewheel import App, Engine

LATER_S = 3_600


@pytest.fixture
def app() -> App:
    app = App()

    @app.task(name="greet")
    async def greet(name: str) -> str:
        return f"hello {name}"

    return app


@pytest.fixture
def engine(app: App, tmp_path: Path) -> Iterator[Engine]:
    with running(app, tmp_path / "data", port=0) as engine:
        yield engine


def parked(engine: Engine) -> int:
    """How many tasks wait in the wheel and not in memory."""
    wheels = [host.shard.parking.wheel for host in engine.runtime.hosts.values()]
    return sum(count for wheel in wheels for _, _, count in wheel.waiting())


def submit(api: Api, **fields: Any) -> str:
    return api.submit("greet", payload={"name": "Ada"}, delay_seconds=LATER_S, **fields)


def test_a_parked_task_is_shown_and_cancelled_for_good(engine: Engine) -> None:
    with Api(engine.address) as api:
        task_id = submit(api)
        eventually(lambda: parked(engine) == 1, "the task is parked")
        shown = api.task(task_id)
        assert (shown["status"], shown["payload"]) == ("SCHEDULED", {"name": "Ada"})
        answer = api("POST", f"{TASKS}/{task_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "CANCELLED")
        assert api("POST", f"{TASKS}/{task_id}/cancel").json()["status"] == "CANCELLED"
        eventually(lambda: api.task(task_id)["status"] == "CANCELLED", "the view shows it")


def test_a_parked_task_that_is_brought_forward_runs_with_what_it_had(engine: Engine) -> None:
    with Api(engine.address) as api:
        task_id = submit(api, metadata={"team": "a"})
        eventually(lambda: parked(engine) == 1, "the task is parked")
        soon = (datetime.now(UTC) + timedelta(seconds=0.1)).isoformat()
        answer = api("PATCH", f"{TASKS}/{task_id}", json={"scheduled_at": soon})
        assert answer.status_code == 200, answer.text
        ended = eventually(lambda: (t := api.task(task_id))["status"] == "SUCCEEDED" and t, "it runs")
        assert (ended["result"], ended["metadata"]["team"], ended["attempts"]) == ("hello Ada", "a", 1)


def test_a_parked_task_is_not_submitted_twice(engine: Engine) -> None:
    with Api(engine.address) as api:
        task_id = submit(api, idempotency_key="k")
        eventually(lambda: parked(engine) == 1, "the task is parked")
        same = {"task_type": "greet", "payload": {"name": "Ada"}, "delay_seconds": LATER_S, "idempotency_key": "k"}
        again = api("POST", TASKS, json=same)
        assert (again.status_code, again.json()["task_id"]) == (200, task_id)
        assert api("POST", TASKS, json=same | {"payload": {"name": "Bob"}}).status_code == 409
        assert parked(engine) == 1


def test_what_is_parked_outlives_the_process(app: App, tmp_path: Path) -> None:
    with running(app, tmp_path / "data", port=0) as engine, Api(engine.address) as api:
        ids = [submit(api) for _ in range(20)]
        eventually(lambda: parked(engine) == 20, "all are parked")
    with running(app, tmp_path / "data", port=0) as engine, Api(engine.address) as api:
        assert all(api.task(task_id)["status"] == "SCHEDULED" for task_id in ids)
        for task_id in ids[:10]:
            assert api("POST", f"{TASKS}/{task_id}/cancel").json()["status"] == "CANCELLED"
        soon = datetime.now(UTC).isoformat()
        for task_id in ids[10:]:
            assert api("PATCH", f"{TASKS}/{task_id}", json={"scheduled_at": soon}).status_code == 200
        eventually(lambda: all(api.task(task_id)["status"] == "SUCCEEDED" for task_id in ids[10:]), "they run")
        bodies = [history(engine).bodies(task_id) for task_id in ids]
    assert bodies[:10] == [["TaskSubmitted", "TaskCancelled"]] * 10
    assert all(body.count("TaskStarted") == 1 for body in bodies[10:]), bodies
