"""Queues and tenants over REST, over a running engine: what is said holds at once, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.messages import CancelTask, Outcome, Priority, Reply, RetryPolicy, Status, Task, TaskSpec
from tests.cases.test_surface import fields_of, problem
from tests.harness import eventually
from tests.unit.surface import SHARDS, Caller, Surface, fresh_name, is_out, ok
from tidewheel import App, TidewheelError

QUEUES, TENANTS, TASKS = "/api/v1/queues", "/api/v1/tenants", "/api/v1/tasks"


def submit(call: Caller, queue: str, tenant_id: str = "t", **fields: Any) -> str:
    body = {"task_type": "a", "queue": queue, "metadata": {"tenant_id": tenant_id}, **fields}
    response = call("POST", TASKS, json=body)
    assert response.status_code == 202, response.text
    return str(response.json()["task_id"])


def is_pending(surface: Surface, task_id: str) -> bool:
    task = surface.runtime.live(task_id)
    return isinstance(task, Task) and task.status is Status.PENDING


def test_tasks_of_a_paused_queue_wait_and_others_go_on(surface: Surface, call: Caller) -> None:
    queue, other = fresh_name("q"), fresh_name("q")
    paused = ok(call, "POST", f"{QUEUES}/{queue}/pause", json={"reason": "the mail server is down"})
    assert (paused["is_paused"], paused["pause_reason"]) == (True, "the mail server is down")
    surface.until(lambda: surface.runtime.policies.is_paused(queue))
    held, free = submit(call, queue), submit(call, other)
    surface.until(lambda: is_out(surface, free))
    surface.until(lambda: is_pending(surface, held))
    assert not is_out(surface, held)
    resumed = ok(call, "POST", f"{QUEUES}/{queue}/resume")
    assert (resumed["is_paused"], resumed["pause_reason"]) == (False, None)
    surface.until(lambda: is_out(surface, held))


def test_the_same_word_twice_changes_nothing(call: Caller) -> None:
    queue = fresh_name("q")
    first = ok(call, "POST", f"{QUEUES}/{queue}/pause")
    again = ok(call, "POST", f"{QUEUES}/{queue}/pause", json={"reason": None})
    assert again["set_at"] == first["set_at"]
    never = ok(call, "POST", f"{QUEUES}/{fresh_name('q')}/resume")
    assert never["set_at"] is None


def test_a_queue_shows_what_waits_and_runs_by_priority(surface: Surface, call: Caller) -> None:
    queue = fresh_name("q")
    submit(call, queue, priority="high")
    low = submit(call, queue, priority="low")
    surface.begin(low)

    def seen() -> tuple[int, int]:
        view = ok(call, "GET", f"{QUEUES}/{queue}")
        return view["pending"], view["running"]

    surface.until(lambda: seen() == (1, 1))
    view = ok(call, "GET", f"{QUEUES}/{queue}")
    assert view["backlog"] == 2
    assert {one["priority"]: one["pending"] for one in view["priorities"]} == {"high": 1, "medium": 0, "low": 0}
    assert view["oldest_at"] is not None
    surface.until(lambda: ok(call, "GET", QUEUES)["shards_heard"] == SHARDS)  # who has nothing to tell does so seldom
    listed = ok(call, "GET", QUEUES)
    assert queue in [one["queue"] for one in listed["queues"]]
    assert (listed["shards_heard"], listed["shards"]) == (SHARDS, SHARDS)


def test_a_tenant_gets_the_weight_that_is_set(surface: Surface, call: Caller) -> None:
    tenant = fresh_name("tenant")
    assert ok(call, "GET", f"{TENANTS}/{tenant}")["weight"] == 1
    assert ok(call, "PATCH", f"{TENANTS}/{tenant}", json={"weight": 7})["weight"] == 7
    surface.until(lambda: surface.runtime.policies.weight_of(tenant) == 7)
    assert tenant in [one["tenant_id"] for one in ok(call, "GET", TENANTS)["tenants"]]


@pytest.mark.parametrize("weight", [0, -1, 1_001, 10**30, 1.5, "5", True])
def test_a_weight_that_is_none_is_refused_with_what_is_allowed(call: Caller, weight: object) -> None:
    told = problem(call("PATCH", f"{TENANTS}/t", json={"weight": weight}), 422)
    assert fields_of(told) == {"weight"}


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", f"{QUEUES}/a%20b/pause", None, "queue"),
        ("POST", f"{QUEUES}/{'q' * 129}/resume", None, "queue"),
        ("POST", f"{QUEUES}/q/pause", {"reason": 5}, "reason"),
        ("POST", f"{QUEUES}/q/pause", {"reason": "x" * 2_000}, "reason"),
        ("POST", f"{QUEUES}/q/pause", {"why": "x"}, "why"),
        ("POST", f"{QUEUES}/q/resume", {"reason": "x"}, "reason"),
        ("PATCH", f"{TENANTS}/a%20b", {"weight": 1}, "tenant_id"),
        ("PATCH", f"{TENANTS}/t", {"weight": 1, "rate": 1}, "rate"),
        ("GET", f"{QUEUES}?limit=5", None, "limit"),
    ],
)
def test_what_is_wrong_is_named(call: Caller, method: str, path: str, body: object, field: str) -> None:
    arguments = {} if body is None else {"json": body}
    assert fields_of(problem(call(method, path, **arguments), 422)) == {field}


def test_a_tenant_that_submits_too_fast_is_told_to_wait_and_others_are_not(surface: Surface, call: Caller) -> None:
    tenant, queue = fresh_name("tenant"), fresh_name("q")
    view = ok(call, "PATCH", f"{TENANTS}/{tenant}", json={"submits_per_s": 40})
    assert (view["submits_per_s"], view["pending_max"], view["weight"]) == (40, None, 1)
    surface.until(lambda: surface.runtime.policies.tenant(tenant).submits_per_s == 40)
    tasks = [{"task_type": "a", "queue": queue, "metadata": {"tenant_id": tenant}}] * 600
    results = call("POST", f"{TASKS}/bulk", json={"tasks": tasks}).json()["results"]
    refused = [one for one in results if "task" not in one]
    assert 150 <= len(refused) <= 200, "of ten seconds' worth hardly any, and nothing beyond what came meanwhile"
    answer = next(one for one in (call("POST", TASKS, json=tasks[0]) for _ in range(100)) if one.status_code != 202)
    told = problem(answer, 429)
    assert answer.headers["retry-after"] == "1"
    assert told["type"] == "urn:tidewheel:problem:too-many"
    assert f"tenant {tenant} submits more than 40 tasks/s" in told["detail"]
    submit(call, queue, tenant_id=fresh_name("tenant"))


def test_a_queue_that_is_full_refuses_and_shows_its_bound(surface: Surface, call: Caller) -> None:
    queue = fresh_name("q")
    ok(call, "POST", f"{QUEUES}/{queue}/pause")
    assert ok(call, "PATCH", f"{QUEUES}/{queue}", json={"pending_max": SHARDS})["pending_max"] == SHARDS
    surface.until(lambda: surface.runtime.policies.queue(queue).pending_max == SHARDS)
    answers = [call("POST", TASKS, json={"task_type": "a", "queue": queue}) for _ in range(40 * SHARDS)]
    accepted = [answer for answer in answers if answer.status_code == 202]
    assert len(accepted) == 7 * SHARDS, "one in each shard, and what chance may give it"
    refused = next(answer for answer in answers if answer.status_code != 202)
    assert f"queue {queue} has its bound of {SHARDS} waiting tasks" in problem(refused, 503)["detail"]
    assert refused.headers["retry-after"] == "1"
    back = ok(call, "PATCH", f"{QUEUES}/{queue}", json={"pending_max": None})
    assert (back["pending_max"], back["is_paused"]) == (None, True), "what is absent stays"


def test_a_queue_that_is_drained_takes_nothing_new_and_lets_go_what_it_has(surface: Surface, call: Caller) -> None:
    queue = fresh_name("q")
    held = submit(call, queue)
    assert ok(call, "PATCH", f"{QUEUES}/{queue}", json={"is_drained": True})["is_drained"]
    surface.until(lambda: surface.runtime.policies.queue(queue).is_drained)
    refused = problem(call("POST", TASKS, json={"task_type": "a", "queue": queue}), 503)
    assert "takes no new tasks: it is drained" in refused["detail"]
    surface.succeed(held)
    assert not ok(call, "PATCH", f"{QUEUES}/{queue}", json={"is_drained": None})["is_drained"]
    surface.until(lambda: not surface.runtime.policies.queue(queue).is_drained)
    submit(call, queue)


def test_a_purge_cancels_what_waits_and_leaves_what_runs(surface: Surface, call: Caller) -> None:
    queue = fresh_name("q")
    running_one = submit(call, queue)
    surface.begin(running_one)
    waiting = [submit(call, queue) for _ in range(3)]
    far = submit(call, queue, delay_seconds=40 * 86_400)
    other = submit(call, fresh_name("q"))
    for task_id in waiting:
        surface.until_shown(task_id, Status.PENDING)
    surface.until_shown(running_one, Status.RUNNING)
    surface.until_shown(far, Status.SCHEDULED)
    done = ok(call, "POST", f"{QUEUES}/{queue}/purge", json={"confirm": queue, "reason": "sent in error"})
    assert done == {"cancelled": 4, "skipped": 0, "is_complete": True}
    for task_id in (*waiting, far):
        assert call("GET", f"{TASKS}/{task_id}").json()["status"] == "CANCELLED"
    for task_id, stands in ((running_one, "RUNNING"), (other, "PENDING")):
        assert call("GET", f"{TASKS}/{task_id}").json()["status"] == stands


@pytest.mark.parametrize("body", [{}, {"confirm": "other"}, {"confirm": None}, {"confirm": 5}])
def test_a_purge_wants_the_name_once_more(call: Caller, body: dict[str, Any]) -> None:
    assert fields_of(problem(call("POST", f"{QUEUES}/q/purge", json=body), 422)) == {"confirm"}


def test_a_purge_does_not_stop_what_began_meanwhile(surface: Surface, call: Caller) -> None:
    """The view may show a task that runs as one that waits: its shard knows."""
    queue = fresh_name("q")
    task_id = submit(call, queue)
    surface.begin(task_id)
    request = CancelTask(request_id="r", task_id=task_id, is_waiting_only=True, reply_to=0)
    (answer,) = surface.gateway.ask_many([request])
    assert isinstance(answer, Reply)
    assert (answer.outcome, answer.status) == (Outcome.WRONG_STATUS, Status.RUNNING)


# --- defaults of queues -----------------------------------------------------------------------------------------------

DEFAULTS = {"priority": "high", "timeout_seconds": 1.5, "total_timeout_seconds": 60, "max_attempts": 7}


def spec_of(surface: Surface, task_id: str) -> TaskSpec:
    task = surface.runtime.live(task_id)
    assert isinstance(task, Task)
    return task.spec


def test_what_a_submission_does_not_say_is_as_its_queue_has_it(surface: Surface, call: Caller) -> None:
    queue = fresh_name("q")
    view = ok(call, "PATCH", f"{QUEUES}/{queue}", json={"defaults": DEFAULTS})
    assert view["defaults"] == DEFAULTS
    spec = spec_of(surface, submit(call, queue))
    assert (spec.priority, spec.timeout_ms, spec.total_timeout_ms) == (Priority.HIGH, 1_500, 60_000)
    assert spec.retry == RetryPolicy(max_attempts=7)
    told = spec_of(surface, submit(call, queue, priority="low", timeout_seconds=9, max_retries=1))
    assert (told.priority, told.timeout_ms, told.total_timeout_ms) == (Priority.LOW, 9_000, 60_000)
    assert told.retry.max_attempts == 2


def test_defaults_are_changed_one_by_one_and_taken_back_together(surface: Surface, call: Caller) -> None:
    queue = fresh_name("q")
    ok(call, "PATCH", f"{QUEUES}/{queue}", json={"defaults": DEFAULTS})
    view = ok(call, "PATCH", f"{QUEUES}/{queue}", json={"defaults": {"priority": None, "max_attempts": 3}})
    assert view["defaults"] == DEFAULTS | {"priority": None, "max_attempts": 3}
    view = ok(call, "PATCH", f"{QUEUES}/{queue}", json={"pending_max": 5})
    assert view["defaults"]["max_attempts"] == 3
    view = ok(call, "PATCH", f"{QUEUES}/{queue}", json={"defaults": None})
    assert set(view["defaults"].values()) == {None}
    spec = spec_of(surface, submit(call, queue))
    assert (spec.priority, spec.timeout_ms, spec.retry) == (Priority.MEDIUM, None, RetryPolicy())


def test_a_repeat_is_one_whatever_became_the_default_meanwhile(call: Caller) -> None:
    queue, key = fresh_name("q"), fresh_name("key")
    first = submit(call, queue, idempotency_key=key)
    ok(call, "PATCH", f"{QUEUES}/{queue}", json={"defaults": DEFAULTS})
    body = {"task_type": "a", "queue": queue, "metadata": {"tenant_id": "t"}, "idempotency_key": key}
    again = call("POST", TASKS, json=body)
    assert (again.status_code, again.json()["task_id"]) == (200, first)


@pytest.mark.parametrize(
    ("field", "value"), [("priority", "urgent"), ("timeout_seconds", 0), ("max_attempts", 0), ("lease_seconds", 5)]
)
def test_a_default_that_is_wrong_is_named(call: Caller, field: str, value: object) -> None:
    told = problem(call("PATCH", f"{QUEUES}/{fresh_name('q')}", json={"defaults": {field: value}}), 422)
    assert fields_of(told) == {f"defaults.{field}"}


def test_queues_and_tenants_in_code() -> None:
    app = App()

    @app.task(name="send", queue="mail")
    def send(to: str) -> None:
        """Never run: its queue is paused."""

    with app.embedded(has_worker=False):
        assert app.queues.pause("mail", reason="moving").is_paused
        assert app.queues.set("mail", pending_max=5, defaults={"priority": "low"}).defaults.priority is Priority.LOW
        handle = send.submit("a")
        assert handle.info().priority is Priority.LOW
        eventually(lambda: app.queues.get("mail").pending == 1, "one that waits")
        assert [one.queue for one in app.queues.all()] == ["mail"]
        assert app.tenants.set("acme", weight=3).weight == 3
        assert {one.tenant_id: one.weight for one in app.tenants.all()} == {"acme": 3, "default": 1}
        assert app.tenants.get("acme").pending == 0
        eventually(lambda: app.queues.purge("mail").cancelled == 1, "the view of it")
        assert not app.queues.resume("mail").is_paused
        with pytest.raises(TidewheelError, match="pending_max"):
            app.queues.set("mail", pending_max=0)
