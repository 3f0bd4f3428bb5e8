"""Schedules over REST: the contract of /api/v1/cron-tasks, over a running engine."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.messages import Schedule, Status
from tests.cases.test_surface import fields_of, problem
from tests.unit.surface import Caller, Surface, fresh_name

CRON, TASKS = "/api/v1/cron-tasks", "/api/v1/tasks"
NOON = {"task_type": "a", "cron_expression": "0 12 * * *"}
PAST = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-03T23:59:59Z"}
PAST_RUNS = [f"2026-01-0{day}T12:00:00Z" for day in (1, 2, 3)]


def create(call: Caller, **fields: Any) -> dict[str, Any]:
    response = call("POST", CRON, json={"name": fresh_name("s"), **NOON, **fields})
    assert response.status_code == 201, response.text
    return dict(response.json())


def shown(call: Caller, cron_id: str) -> dict[str, Any]:
    response = call("GET", f"{CRON}/{cron_id}")
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_schedule_is_there_the_moment_it_was_made(call: Caller) -> None:
    made = create(call, timezone="Europe/Paris", payload={"n": 1}, queue="mail", priority="high", max_retries=7)
    assert {"cron_id", "name", "next_fire_time", "status"} <= made.keys()
    assert made["status"] == "active"
    found = shown(call, made["cron_id"])
    assert (found["payload"], found["queue"], found["priority"], found["max_retries"]) == ({"n": 1}, "mail", "high", 7)
    assert (found["overlap_policy"], found["misfire_policy"]) == ("skip", "latest")
    assert found["next_fire_time"] == made["next_fire_time"] > found["created_at"]
    assert found["counts"] == {"fired": 0, "skipped": 0, "missed": 0}


def test_a_repeat_gives_the_first_one_and_other_content_is_a_conflict(call: Caller) -> None:
    name = fresh_name("s")
    made = create(call, name=name)
    again = call("POST", CRON, json={"timezone": "utc", **NOON, "name": name, "priority": "medium"})
    assert (again.status_code, again.json()) == (200, made)
    problem(call("POST", CRON, json={**NOON, "name": name, "payload": 1}), 409)
    of_another_tenant = create(call, name=name, metadata={"tenant_id": "other"})
    assert of_another_tenant["cron_id"] != made["cron_id"]


def test_a_schedule_may_have_an_id_of_its_own(call: Caller) -> None:
    cron_id = fresh_name("own")
    assert create(call, cron_id=cron_id)["cron_id"] == cron_id
    assert shown(call, cron_id)["cron_id"] == cron_id


def test_a_change_leaves_what_it_does_not_name(call: Caller) -> None:
    cron_id = create(
        call,
        payload=[1],
        retry_backoff="fixed",
        retry_delay_seconds=1.5,
        lease_seconds=33.3,
        metadata={"tenant_id": "t", "k": "v"},
        jitter_seconds=2.5,
        end_at="2040-01-01T00:00:00Z",
    )["cron_id"]
    before = shown(call, cron_id)
    response = call("PATCH", f"{CRON}/{cron_id}", json={"every_seconds": 90, "overlap_policy": "queue"})
    assert response.status_code == 200, response.text
    after = shown(call, cron_id)
    assert response.json() == after
    changed = {name for name in after if after[name] != before[name]}
    assert changed <= {
        "cron_expression",
        "every_seconds",
        "anchor",
        "overlap_policy",
        "next_fire_time",
        "version",
        "updated_at",
    }
    assert (after["every_seconds"], after["cron_expression"], after["overlap_policy"]) == (90, None, "queue")
    call("PATCH", f"{CRON}/{cron_id}", json={"end_at": None, "metadata": {"k": "w"}, "payload": None})
    after = shown(call, cron_id)
    assert (after["end_at"], after["metadata"], after["payload"]) == (None, {"tenant_id": "t", "k": "w"}, None)


def test_an_interval_that_changes_stays_on_its_grid(call: Caller) -> None:
    cron_id = create(call, cron_expression=None, every_seconds=60, anchor="2026-01-01T00:00:07Z")["cron_id"]
    call("PATCH", f"{CRON}/{cron_id}", json={"every_seconds": 90})
    assert (shown(call, cron_id)["every_seconds"], shown(call, cron_id)["anchor"]) == (90, "2026-01-01T00:00:07Z")
    call("PATCH", f"{CRON}/{cron_id}", json={"cron_expression": "0 9 * * *"})
    assert (shown(call, cron_id)["every_seconds"], shown(call, cron_id)["anchor"]) == (None, None)


def test_a_change_keeps_all_of_the_task(call: Caller, surface: Surface) -> None:
    """Also what no answer shows: the policy of retries and the lease."""
    cron_id = create(call, retry_backoff="fixed", retry_delay_seconds=1.5, lease_seconds=33.3, give_up_on=["E"])[
        "cron_id"
    ]
    before = surface.runtime.live_schedule(cron_id)
    call("PATCH", f"{CRON}/{cron_id}", json={"timezone": "Asia/Tokyo"})
    after = surface.runtime.live_schedule(cron_id)
    assert isinstance(before, Schedule)
    assert isinstance(after, Schedule)
    assert after.spec.timezone == "Asia/Tokyo"
    assert after.spec.task == before.spec.task


def test_a_change_may_name_the_version_that_it_is_made_of(call: Caller) -> None:
    cron_id = create(call)["cron_id"]
    version = shown(call, cron_id)["version"]
    change = {"expected_version": version, "payload": 2}
    assert call("PATCH", f"{CRON}/{cron_id}", json=change).status_code == 200
    problem(call("PATCH", f"{CRON}/{cron_id}", json={**change, "payload": 3}), 409)
    problem(call("PATCH", f"{CRON}/{cron_id}", json={"expected_version": version, "enabled": False}), 409)
    assert shown(call, cron_id)["payload"] == 2


def test_a_change_that_changes_nothing_is_no_event(call: Caller) -> None:
    cron_id = create(call, payload=1)["cron_id"]
    version = shown(call, cron_id)["version"]
    assert call("PATCH", f"{CRON}/{cron_id}", json={"payload": 1}).json()["version"] == version


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({}, "body"),
        ({"cron_id": "x"}, "cron_id"),
        ({"name": "x"}, "name"),
        ({"metadata": {"tenant_id": "u"}}, "metadata.tenant_id"),
        ({"nope": 1}, "nope"),
    ],
)
def test_what_cannot_change_is_refused(call: Caller, change: dict[str, Any], field: str) -> None:
    cron_id = create(call)["cron_id"]
    assert fields_of(problem(call("PATCH", f"{CRON}/{cron_id}", json=change), 422)) == {field}
    assert shown(call, cron_id)["version"] == 1


def test_pause_and_resume(call: Caller) -> None:
    cron_id = create(call)["cron_id"]
    for _ in range(2):
        paused = call("POST", f"{CRON}/{cron_id}/pause", json={"reason": "holidays"})
        assert (paused.status_code, paused.json()["status"], paused.json()["enabled"]) == (200, "paused", False)
    assert (paused.json()["next_fire_time"], paused.json()["pause_reason"]) == (None, "holidays")
    for _ in range(2):
        resumed = call("POST", f"{CRON}/{cron_id}/resume")
        assert (resumed.status_code, resumed.json()["status"]) == (200, "active")
    assert resumed.json()["next_fire_time"]
    assert call("PATCH", f"{CRON}/{cron_id}", json={"enabled": False, "payload": 5}).json()["status"] == "paused"
    assert shown(call, cron_id)["payload"] == 5
    assert create(call, enabled=False)["status"] == "paused"


@pytest.mark.parametrize("reason", ["x" * 1025, "bell \a"])
def test_a_reason_is_a_short_text_as_it_is_of_tasks(call: Caller, reason: str) -> None:
    cron_id = create(call)["cron_id"]
    refused = problem(call("POST", f"{CRON}/{cron_id}/pause", json={"reason": reason}), 422)
    assert refused["errors"] == [
        {"field": "reason", "message": "is not accepted", "allowed": "at most 1,024 printable characters"}
    ]
    assert shown(call, cron_id)["status"] == "active"


def test_a_deleted_one_is_gone_at_once(call: Caller) -> None:
    cron_id = create(call)["cron_id"]
    assert call("DELETE", f"{CRON}/{cron_id}").status_code == 204
    gone = [call("GET", f"{CRON}/{cron_id}"), call("DELETE", f"{CRON}/{cron_id}")]
    gone += [call("POST", f"{CRON}/{cron_id}/{action}") for action in ("pause", "resume", "trigger")]
    gone += [call("PATCH", f"{CRON}/{cron_id}", json={"payload": 1})]
    for answer in gone:
        assert problem(answer, 404)["detail"] == f"there is no schedule '{cron_id}'"


def test_a_trigger_is_a_run_of_its_own(call: Caller) -> None:
    cron_id = create(call, payload=[7], metadata={"tenant_id": "t"})["cron_id"]
    task_id = call("POST", f"{CRON}/{cron_id}/trigger").json()["task_id"]
    assert task_id.startswith(f"{cron_id}.")
    task = call("GET", f"{TASKS}/{task_id}").json()
    assert (task["task_type"], task["payload"], task["tenant_id"]) == ("a", [7], "t")
    problem(call("POST", f"{CRON}/{cron_id}/trigger"), 409)  # it is not over, and overlap is skip


def test_a_backfill_runs_what_has_no_run_and_nothing_twice(call: Caller, surface: Surface) -> None:
    cron_id = create(call, overlap_policy="allow")["cron_id"]
    first = call("POST", f"{CRON}/{cron_id}/backfill", json={**PAST, "to": "2026-01-01T23:00:00Z"})
    assert first.json() == {"runs": [f"{cron_id}.{PAST_RUNS[0]}"]}, first.text
    surface.forgotten.add(f"{cron_id}.{PAST_RUNS[0]}")  # only a view that may lag tells the service of it
    rest = call("POST", f"{CRON}/{cron_id}/backfill", json={**PAST, "from": PAST_RUNS[1]})
    assert rest.json() == {"runs": [f"{cron_id}.{time}" for time in PAST_RUNS[1:]]}, rest.text
    for time in PAST_RUNS:
        surface.succeed(f"{cron_id}.{time}")
    surface.until(lambda: call("POST", f"{CRON}/{cron_id}/backfill", json=PAST).json() == {"runs": []})


def test_a_run_that_the_view_does_not_show_yet_is_not_run_again(call: Caller, surface: Surface) -> None:
    cron_id = create(call, overlap_policy="allow")["cron_id"]
    runs = [f"{cron_id}.{time}" for time in PAST_RUNS]
    surface.forgotten.update(runs)  # as it is where shards are elsewhere
    surface.view.unseen = frozenset(runs)
    for _ in range(2):
        assert call("POST", f"{CRON}/{cron_id}/backfill", json=PAST).status_code == 200
    surface.view.unseen = frozenset()
    for task_id in runs:
        surface.succeed(task_id)
        surface.until_shown(task_id, Status.SUCCEEDED)
    assert call("POST", f"{CRON}/{cron_id}/backfill", json=PAST).json() == {"runs": []}


def test_a_backfill_has_bounds(call: Caller) -> None:
    cron_id = create(call)["cron_id"]
    path = f"{CRON}/{cron_id}/backfill"
    problem(call("POST", path, json={**PAST, "max": 2}), 422)
    problem(call("POST", path, json={"from": PAST["to"], "to": PAST["from"]}), 422)
    problem(call("POST", path, json={"from": "1970-01-01T00:00:00Z", "to": PAST["to"]}), 422)
    problem(call("POST", path, json={}), 422)
    assert call("POST", path, json={"from": "2090-01-01T00:00:00Z", "to": "2090-02-01T00:00:00Z"}).json() == {
        "runs": []
    }


def test_lists_go_page_by_page(call: Caller, surface: Surface) -> None:
    tenant = fresh_name("tenant")
    made = {create(call, metadata={"tenant_id": tenant}, enabled=n != 1)["cron_id"] for n in range(3)}
    path = f"{CRON}?tenant_id={tenant}"
    surface.until(lambda: len(call("GET", path).json()["schedules"]) == 3)
    page = call("GET", f"{path}&limit=2").json()
    rest = call("GET", f"{path}&limit=2&cursor={page['cursor']}").json()
    assert {one["cron_id"] for one in (*page["schedules"], *rest["schedules"])} == made
    assert (len(rest["schedules"]), rest["cursor"]) == (1, None)
    assert len(call("GET", f"{path}&paused=true").json()["schedules"]) == 1
    problem(call("GET", f"{path}&cursor=nonsense"), 422)
    problem(call("GET", f"{path}&colour=red"), 422)


def test_a_preview_needs_no_schedule(call: Caller) -> None:
    asked = {"every_seconds": 90, "start": "2026-01-01T00:00:01Z", "count": 2}
    answer = call("POST", f"{CRON}/preview", json=asked).json()
    assert answer["next"] == ["2026-01-01T00:01:30Z", "2026-01-01T00:03:00Z"]
    assert (
        len(call("POST", f"{CRON}/preview", json={"cron_expression": "* * * * * *", "count": 1000}).json()["next"])
        == 1000
    )
    problem(call("POST", f"{CRON}/preview", json={"cron_expression": "* * * * *", "count": 1001}), 422)
    once = {"calendar": ["2036-01-01T00:00:00Z"], "count": 5}
    assert call("POST", f"{CRON}/preview", json=once).json()["next"] == ["2036-01-01T00:00:00Z"]


@pytest.mark.parametrize(("cron_id", "said"), [("nobody", "nobody"), ("a%20b", "a b"), ("%2e%2e", "..")])
def test_who_is_not_there_is_not_found(call: Caller, cron_id: str, said: str) -> None:
    found = problem(call("GET", f"{CRON}/{cron_id}"), 404)
    assert (found["title"], found["detail"]) == ("There is no such task or schedule", f"there is no schedule '{said}'")
