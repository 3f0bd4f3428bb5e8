"""C22: one key, another body; and what is the same body.

Chosen: other content under a key, or under an id, is a conflict (409), while the first task runs as well as when it has
ended; the same content in another form (order of keys, white space, defaults that are written out) is the same request.
A key is one thing on all endpoints (single, bulk, SDK). It is remembered for the idempotency window, 24 hours from the
first submission unless set otherwise; after that it makes a new task, under the same id.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from scheduler.core.shard import ShardSettings
from scheduler.refusals import RefusalKind
from tests.harness import TASKS, Api, eventually, history, running
from tidewheel import App, Engine, NotSubmitted

app = App()
ran: list[Any] = []


@app.task(name="echo")
async def echo(value: object = None) -> object:
    ran.append(value)
    return value


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(app, port=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with Api(engine.address) as api:
        yield api


@pytest.mark.parametrize("delay", [0, 3600])
def test_another_body_is_a_conflict_on_every_way_in(api: Api, delay: float) -> None:
    key = f"conflict-{delay}"
    first = echo.options(idempotency_key=key, delay=delay).submit({"a": 1, "b": [2]})
    if not delay:
        assert first.result(20) == {"a": 1, "b": [2]}
    with pytest.raises(NotSubmitted) as refused:
        echo.options(idempotency_key=key, delay=delay).submit({"a": 1, "b": [3]})
    assert refused.value.refusal.kind is RefusalKind.CONFLICT
    other = {"task_type": "echo", "payload": {"value": 5}, "idempotency_key": key, "delay_seconds": delay}
    assert api("POST", TASKS, json=other).status_code == 409
    (result,) = api("POST", f"{TASKS}/bulk", json={"tasks": [other]}).json()["results"]
    assert result["error"]["status"] == 409
    assert 5 not in ran


def test_the_same_body_in_another_form_is_the_same_task_on_every_way_in(engine: Engine, api: Api) -> None:
    first = echo.options(idempotency_key="same").submit({"a": 1, "b": [2]})
    text = (
        '{ "idempotency_key":"same", "priority":"medium", "payload": {"value": {"b":[2],\n "a":1} },"task_type":"echo"}'
    )
    headers = {"content-type": "application/json"}
    again = api("POST", TASKS, content=text, headers=headers)
    assert (again.status_code, again.json()["task_id"]) == (200, first.task_id)
    (result,) = api("POST", f"{TASKS}/bulk", content=f'{{"tasks":[{text}]}}', headers=headers).json()["results"]
    assert (result["task"]["task_id"], result["is_repeat"]) == (first.task_id, True)
    assert echo.options(idempotency_key="same").submit({"b": [2], "a": 1}).task_id == first.task_id
    assert first.result(20) == {"a": 1, "b": [2]}
    assert history(engine).bodies(first.task_id) == ["TaskSubmitted", "TaskStarted", "TaskSucceeded"]


def test_what_was_refused_leaves_the_key_free(api: Api) -> None:
    wrong = {"task_type": "echo", "payload": 1, "idempotency_key": "free", "timeout_seconds": -1}
    assert api("POST", TASKS, json=wrong).status_code == 422
    too_large = {"task_type": "echo", "payload": "x" * 300_000, "idempotency_key": "free"}
    assert api("POST", TASKS, json=too_large).status_code == 413
    assert api("POST", TASKS, json={"task_type": "echo", "payload": 2, "idempotency_key": "free"}).status_code == 202


def is_forgotten(engine: Engine, task_id: str) -> bool:
    return engine.runtime.live(task_id) is None


def test_after_its_window_a_key_makes_a_new_task_that_runs() -> None:
    """The worker still remembers the attempt of the first one, which had the same id and number."""
    forgetful = ShardSettings(idempotency_window_us=0, ended_kept_us=300_000)
    with running(app, port=0, shard=forgetful) as engine:
        results = []
        for body in ("old", "new", "newest"):
            handle = echo.options(idempotency_key="again").submit(body)
            results.append(handle.result(20))
            eventually(partial(is_forgotten, engine, handle.task_id), "that its shard forgets it")
        assert results == ["old", "new", "newest"]
        assert handle.info().attempts == 1
        assert history(engine).bodies(handle.task_id)[:3] == ["TaskSubmitted", "TaskStarted", "TaskSucceeded"]
