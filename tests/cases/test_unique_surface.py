"""Submissions that share a task: over REST and in code, over a running engine."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.messages import Status, Task
from tests.cases.test_surface import fields_of, problem
from tests.harness import running as running_engine
from tests.unit.surface import Caller, Surface, fresh_name
from tidewheel import App, Debounce, Unique

TASKS = "/api/v1/tasks"


def submit(call: Caller, status: int, **fields: Any) -> str:
    response = call("POST", TASKS, json={"task_type": "a", **fields})
    assert response.status_code == status, response.text
    return str(response.json()["task_id"])


def test_one_that_lives_stands_for_the_next_and_the_answer_names_it(surface: Surface, call: Caller) -> None:
    unique = {"key": fresh_name("report")}
    first = submit(call, 202, unique=unique, payload=1)
    assert submit(call, 200, unique=unique, payload=2) == first
    surface.succeed(first)
    assert submit(call, 202, unique=unique) != first


def test_while_one_runs_another_one_may_wait(surface: Surface, call: Caller) -> None:
    unique = {"key": fresh_name("report"), "scope": "waiting"}
    first = submit(call, 202, unique=unique)
    surface.begin(first)
    surface.until(lambda: isinstance(t := surface.runtime.live(first), Task) and t.status is Status.RUNNING)
    second = submit(call, 202, unique=unique)
    assert second != first
    assert submit(call, 200, unique=unique) == second


def test_in_a_window_there_is_one(surface: Surface, call: Caller) -> None:
    unique = {"key": fresh_name("report"), "seconds": 3600}
    first = submit(call, 202, unique=unique)
    surface.succeed(first)
    assert submit(call, 200, unique=unique) == first


def test_a_debounced_task_has_the_content_of_the_last_submission(surface: Surface, call: Caller) -> None:
    debounce = {"key": fresh_name("index"), "seconds": 3600}
    first = submit(call, 202, debounce=debounce, payload="old")
    assert submit(call, 200, debounce=debounce, payload="new") == first
    task = surface.runtime.live(first)
    assert isinstance(task, Task)
    assert (task.status, task.spec.payload) == (Status.SCHEDULED, b'"new"')


def test_keys_belong_to_their_tenants(call: Caller) -> None:
    unique = {"key": fresh_name("report")}
    one = submit(call, 202, unique=unique, metadata={"tenant_id": "a"})
    other = submit(call, 202, unique=unique, metadata={"tenant_id": "b"})
    assert one != other


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"unique": {}}, "unique.key"),
        ({"unique": {"key": ""}}, "unique.key"),
        ({"unique": {"key": "k", "scope": "window"}}, "unique.scope"),
        ({"unique": {"key": "k", "scope": "live", "seconds": 5}}, "unique.seconds"),
        ({"unique": {"key": "k", "seconds": 0}}, "unique.seconds"),
        ({"unique": {"key": "k"}, "idempotency_key": "i"}, "unique"),
        ({"unique": {"key": "k"}, "task_id": "i"}, "unique"),
        ({"unique": {"key": "k"}, "debounce": {"key": "k", "seconds": 5}}, "debounce"),
        ({"debounce": {"key": "k"}}, "debounce.seconds"),
        ({"debounce": {"key": "k", "seconds": 5, "max_seconds": 4}}, "debounce.max_seconds"),
        ({"debounce": {"key": "k", "seconds": 5}, "delay_seconds": 4}, "debounce"),
        ({"task_id": "uniq-1.2"}, "task_id"),
    ],
)
def test_what_is_wrong_is_named(call: Caller, fields: dict[str, Any], named: str) -> None:
    told = problem(call("POST", TASKS, json={"task_type": "a", **fields}), 422)
    assert fields_of(told) == {named}


def test_code_says_it_as_well() -> None:
    app = App()

    @app.task(name="index")
    def index(page: str) -> str:
        return page

    with running_engine(app):
        kept = index.options(unique=Unique("nightly", seconds=60))
        assert kept.submit("a").task_id == kept.submit("b").task_id
        late = index.options(debounce=Debounce("page-7", seconds=0.2, max_seconds=5))
        first = late.submit("old")
        assert late.submit("new").task_id == first.task_id
        assert first.result(timeout=30) == "new"
