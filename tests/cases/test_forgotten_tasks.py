"""Tasks that ended so long ago that only the view knows them: C22 beyond the shard's memory, and changes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scheduler.core.shard import ShardSettings
from scheduler.service import ServiceSettings
from schemas.messages import Status
from tests.cases.test_surface import TASKS, problem, submit, task
from tests.unit.surface import Caller, Surface, fresh_name, running

FORGETFUL = ShardSettings(ended_kept_us=0, idempotency_window_us=0)


@pytest.fixture
def surface(request: pytest.FixtureRequest) -> Iterator[Surface]:
    with running(ServiceSettings(idempotency_window_s=getattr(request, "param", 86_400)), FORGETFUL) as surface:
        yield surface


@pytest.fixture
def call(surface: Surface) -> Iterator[Caller]:
    caller = Caller(surface.api)
    yield caller
    caller.close()


def ended(call: Caller, surface: Surface, end: Callable[[str], Any], **fields: Any) -> dict[str, Any]:
    """A task that ended, is forgotten by its shard and shown by the view."""
    accepted = submit(call, **fields)
    surface.until(lambda: surface.view.task(accepted["task_id"]) is not None)  # one in the wheel is known there alone
    end(accepted["task_id"])
    surface.until(lambda: surface.runtime.live(accepted["task_id"]) is None)
    surface.until(lambda: (row := surface.view.task(accepted["task_id"])) is not None and row.completed_at is not None)
    return accepted


@pytest.mark.parametrize("naming", ["idempotency_key", "task_id"])
def test_a_repeat_is_recognised(call: Caller, surface: Surface, naming: str) -> None:
    name = {naming: fresh_name("old")}
    first = ended(call, surface, surface.succeed, **name)
    again = call("POST", TASKS, json={"task_type": "a", **name})
    assert (again.status_code, again.json()) == (200, {**first, "status": "SUCCEEDED"})
    problem(call("POST", TASKS, json={"task_type": "b", **name}), 409)
    assert task(call, first["task_id"])["version"] == 3


@pytest.mark.parametrize("surface", [0], indirect=True)
def test_a_key_is_free_after_its_window_and_the_new_task_has_nothing_of_the_old(call: Caller, surface: Surface) -> None:
    name = {"idempotency_key": fresh_name("free")}
    first = ended(call, surface, surface.succeed, payload="old", **name)
    second = submit(call, payload="new", **name)
    assert second["task_id"] == first["task_id"]
    shown = task(call, second["task_id"])
    assert (shown["status"], shown["payload"], shown["attempts"], shown["has_result"]) == ("PENDING", "new", 0, False)
    surface.begin(second["task_id"])
    shown = task(call, second["task_id"])
    assert (shown["status"], len(shown["attempt_history"])) == ("RUNNING", 1)
    named = ended(call, surface, surface.succeed, task_id=fresh_name("kept"))
    assert call("POST", TASKS, json={"task_type": "a", "task_id": named["task_id"]}).status_code == 200


def test_a_change_tells_how_the_task_ended(call: Caller, surface: Surface) -> None:
    done = ended(call, surface, surface.succeed)["task_id"]
    assert problem(call("POST", f"{TASKS}/{done}/cancel"), 409)["task_status"] == "SUCCEEDED"
    assert problem(call("PATCH", f"{TASKS}/{done}", json={"priority": "low"}), 409)["task_status"] == "SUCCEEDED"
    assert problem(call("POST", f"/api/v1/dlq/{done}/retry"), 409)["task_status"] == "SUCCEEDED"
    cancelled = ended(call, surface, lambda task_id: call("POST", f"{TASKS}/{task_id}/cancel"), delay_seconds=3600)[
        "task_id"
    ]
    again = call("POST", f"{TASKS}/{cancelled}/cancel")
    assert (again.status_code, again.json()["cancelled_at"]) == (200, task(call, cancelled)["completed_at"])
    problem(call("POST", f"{TASKS}/nobody/cancel"), 404)


def test_dead_letters_go_back_and_out(call: Caller, surface: Surface) -> None:
    one, two = (ended(call, surface, surface.fail, max_retries=0)["task_id"] for _ in range(2))
    assert call("POST", f"/api/v1/dlq/{one}/retry").json()["status"] == "PENDING"
    surface.succeed(one)
    surface.until_shown(one, Status.SUCCEEDED)
    assert [entry["attempt"] for entry in task(call, one)["attempt_history"]] == [1, 2]
    assert call("DELETE", f"/api/v1/dlq/{two}").status_code == 204
    surface.until(lambda: not task(call, two)["is_dead_letter"])
    problem(call("DELETE", f"/api/v1/dlq/{two}"), 404)
