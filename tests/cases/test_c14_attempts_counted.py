"""C14: how often a task that always fails is started, and that every reader counts the same.

Chosen: `max_retries` counts the attempts after the first, `max_attempts` all of them; max_attempts 0 is refused (422).
Attempts that are lost with their worker are counted apart (C16).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from infra.sqlite import SqliteView
from scheduler.ports import TaskFilter
from scheduler.projector import Projector
from schemas.codec import Codec
from schemas.messages import Status, TaskAttemptFailed
from tests.harness import SHARDS, TASKS, Api, eventually, history, running
from tidewheel import App, Engine, NotSubmitted, Retry, TaskFailed, current_context

app = App()
starts: dict[str, list[int]] = {}


@app.task(name="fail", retry=Retry(delay=0.0))
async def fail() -> None:
    context = current_context()
    starts.setdefault(context.task_id, []).append(context.attempt)
    raise ConnectionError("refused")


@app.task(name="succeed-at-last", retry=Retry(delay=0.0))
async def succeed_at_last() -> int:
    context = current_context()
    starts.setdefault(context.task_id, []).append(context.attempt)
    if context.failure_count + 1 < context.max_attempts:
        raise ConnectionError("refused")
    return context.attempt


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(app, port=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with Api(engine.address) as api:
        yield api


def dead_letters(api: Api) -> list[str]:
    return [one["task_id"] for one in api("GET", "/api/v1/dlq?limit=500").json()["tasks"]]


@pytest.mark.parametrize(
    ("fields", "attempts"),
    [
        ({"max_retries": 0}, 1),
        ({"max_retries": 1}, 2),
        ({"max_retries": 3}, 4),
        ({"max_attempts": 1}, 1),
        ({"max_attempts": 3}, 3),
    ],
)
def test_it_is_started_so_often(engine: Engine, api: Api, fields: dict[str, int], attempts: int) -> None:
    numbers = list(range(1, attempts + 1))
    task_id = api.submit("fail", retry_delay_seconds=0, **fields)
    shown = api.until(task_id)
    assert shown["status"] == "DEAD"
    assert (shown["attempts"], shown["retry_count"], shown["max_attempts"]) == (attempts, attempts - 1, attempts)
    assert [one["attempt"] for one in shown["attempt_history"]] == numbers == starts[task_id]
    eventually(lambda: dead_letters(api).count(task_id) == 1, "its dead letter")

    raw = history(engine)
    assert raw.starts(task_id) == numbers
    failures = [event.body.failure_count for event in raw.of[task_id] if isinstance(event.body, TaskAttemptFailed)]
    assert failures == numbers
    assert raw.bodies(task_id).count("TaskAttemptFailed") == attempts
    assert (raw.tasks[task_id].attempt, raw.tasks[task_id].failure_count) == (attempts, attempts)


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_success_at_the_last_attempt_is_no_dead_letter(engine: Engine, api: Api, max_attempts: int) -> None:
    handle = succeed_at_last.options(retry=Retry(max_attempts, delay=0.0)).submit()
    assert handle.result(20) == max_attempts
    shown = api.until(handle.task_id)
    assert (shown["status"], shown["attempts"], shown["is_dead_letter"]) == ("SUCCEEDED", max_attempts, False)
    assert shown["error"] is None
    assert handle.task_id not in dead_letters(api)


def test_the_sdk_says_attempts(engine: Engine) -> None:
    handle = fail.options(retry=Retry(2, delay=0.0)).submit()
    with pytest.raises(TaskFailed, match="DEAD"):
        handle.result(20)
    assert starts[handle.task_id] == [1, 2]
    with pytest.raises((NotSubmitted, ValueError), match="max_attempts"):
        fail.options(retry=Retry(0)).submit()


def test_no_attempts_are_refused(api: Api) -> None:
    for fields in ({"max_attempts": 0}, {"max_retries": -1}, {"max_retries": 1, "max_attempts": 1}):
        answer = api("POST", TASKS, json={"task_type": "fail", **fields})
        assert answer.status_code == 422
        assert "max_" in answer.json()["errors"][0]["field"]


def test_a_view_that_is_built_anew_shows_the_same(engine: Engine, api: Api) -> None:
    ids = [api.submit("fail", retry_delay_seconds=0, max_retries=retries) for retries in (0, 2)]
    live = [api.until(task_id) for task_id in ids]
    fresh, log = SqliteView(":memory:"), engine.broker.connect()
    projector = Projector(log, fresh, Codec.builtin(), SHARDS)
    try:
        while projector.step(0):
            pass
        for task_id, shown in zip(ids, live, strict=True):
            row = fresh.task(task_id)
            assert row == engine.view.task(task_id)
            assert row is not None and (row.status, row.attempt) == (Status.DEAD, shown["attempts"])
        wanted: Any = TaskFilter(is_dead_letter=True)
        assert fresh.count(wanted) == engine.view.count(wanted)
    finally:
        projector.close()
        log.close()
        fresh.close()
