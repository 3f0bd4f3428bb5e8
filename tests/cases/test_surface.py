"""Field cases at the REST surface, over a running engine: C12-C14, C21, C22, C34, C39-C43 and the contract itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from scheduler.api.health import Health, PartHealth
from schemas.limits import BODY_MAX, JSON_INTEGER_DIGITS_MAX, PAYLOAD_MAX
from schemas.messages import Status, Verdict
from tests.unit.surface import Caller, Surface, fresh_name

TASKS = "/api/v1/tasks"


def submit(call: Caller, **fields: Any) -> dict[str, Any]:
    response = call("POST", TASKS, json={"task_type": "a", **fields})
    assert response.status_code == 202, response.text
    return dict(response.json())


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
    assert {"type", "title", "status", "detail"} <= body.keys()
    assert body["status"] == status
    assert (status in (429, 503)) == ("retry-after" in response.headers)
    return dict(body)


def fields_of(body: dict[str, Any]) -> set[str]:
    return {error["field"] for error in body["errors"]}


def task(call: Caller, task_id: str) -> dict[str, Any]:
    response = call("GET", f"{TASKS}/{task_id}")
    assert response.status_code == 200, response.text
    return dict(response.json())


# --- the contract -----------------------------------------------------------------------------------------------------


def test_a_task_is_there_the_moment_it_was_accepted(call: Caller) -> None:
    accepted = submit(call, payload={"n": 1}, queue="mail", priority="high", metadata={"tenant_id": "t", "x": "y"})
    assert accepted.keys() == {"task_id", "status", "scheduled_at", "created_at"}
    shown = task(call, accepted["task_id"])
    assert shown["status"] == accepted["status"] == "PENDING"
    assert (shown["payload"], shown["queue"], shown["priority"]) == ({"n": 1}, "mail", "high")
    assert (shown["tenant_id"], shown["metadata"]) == ("t", {"tenant_id": "t", "x": "y"})
    assert shown["created_at"] == accepted["created_at"]


def test_attempts_are_counted_from_one_without_holes(call: Caller, surface: Surface) -> None:
    task_id = submit(call, max_retries=2, retry_delay_seconds=0, retry_jitter="none")["task_id"]
    for _ in range(3):
        surface.fail(task_id)
    shown = task(call, task_id)
    assert (shown["status"], shown["attempts"], shown["retry_count"], shown["max_attempts"]) == ("DEAD", 3, 2, 3)
    assert [one["attempt"] for one in shown["attempt_history"]] == [1, 2, 3]
    assert {one["outcome"] for one in shown["attempt_history"]} == {"failed"}
    assert shown["last_execution"] == shown["attempt_history"][-1]
    assert shown["error"]["type"] == "ValueError"
    assert shown["is_dead_letter"]
    assert shown["completed_at"] >= shown["started_at"] >= shown["created_at"]


def test_a_success_at_the_last_attempt_is_no_dead_letter(call: Caller, surface: Surface) -> None:
    task_id = submit(call, max_attempts=2, retry_delay_seconds=0)["task_id"]
    surface.fail(task_id)
    surface.begin(task_id)
    assert task(call, task_id)["attempt_history"][0]["outcome"] == "failed"
    running_one = task(call, task_id)
    assert [one["outcome"] for one in running_one["attempt_history"]] == ["failed", None]
    assert (running_one["status"], running_one["worker_id"]) == ("RUNNING", "w1")


def test_a_waiting_task_is_changed_and_keeps_its_id(call: Caller) -> None:
    task_id = submit(call, delay_seconds=3600, metadata={"tenant_id": "t"})["task_id"]
    version = task(call, task_id)["version"]
    change = {"priority": "high", "payload": [1], "metadata": {"tenant_id": "t", "k": "v"}, "expected_version": version}
    response = call("PATCH", f"{TASKS}/{task_id}", json=change)
    assert response.status_code == 200, response.text
    shown = task(call, task_id)
    assert (shown["status"], shown["priority"], shown["payload"]) == ("SCHEDULED", "high", [1])
    assert shown["metadata"] == {"tenant_id": "t", "k": "v"}
    problem(call("PATCH", f"{TASKS}/{task_id}", json=change), 409)
    stale, fresh = {"If-Match": f'"{version}"'}, {"If-Match": response.headers["etag"]}
    problem(call("PATCH", f"{TASKS}/{task_id}", json={"priority": "low"}, headers=stale), 412)
    problem(call("PATCH", f"{TASKS}/{task_id}", json={"priority": "low"}, headers={"If-Match": "W/x"}), 422)
    other = call("PATCH", f"{TASKS}/{task_id}", json={"metadata": {"tenant_id": "u"}}, headers=fresh)
    assert fields_of(problem(other, 422)) == {"metadata.tenant_id"}
    now = call("PATCH", f"{TASKS}/{task_id}", json={"scheduled_at": None}, headers=fresh)
    assert (now.status_code, now.json()["status"]) == (200, "PENDING")
    problem(call("PATCH", f"{TASKS}/nobody", json={"priority": "low"}), 404)
    problem(call("PATCH", f"{TASKS}/{task_id}", json={"enabled": False}), 422)


def test_cancelling_answers_by_what_the_task_does(call: Caller, surface: Surface) -> None:
    waiting = submit(call, delay_seconds=3600)["task_id"]
    first = call.post_json(f"{TASKS}/{waiting}/cancel", b'{"reason":"not needed"}')
    assert (first.status_code, first.json()["status"]) == (200, "CANCELLED")
    assert first.json()["cancelled_at"] is not None
    second = call("POST", f"{TASKS}/{waiting}/cancel")
    assert (second.status_code, second.json()) == (200, first.json())
    assert task(call, waiting)["cancel_reason"] == "not needed"

    running_one = submit(call)["task_id"]
    surface.begin(running_one)
    told = call("POST", f"{TASKS}/{running_one}/cancel")
    assert (told.status_code, told.json()["status"], told.json()["cancelled_at"]) == (200, "RUNNING", None)
    assert told.json()["cancel_requested_at"] == task(call, running_one)["cancel_requested_at"]

    ended = submit(call)["task_id"]
    surface.succeed(ended)
    refused = problem(call("POST", f"{TASKS}/{ended}/cancel"), 409)
    assert refused["task_status"] == "SUCCEEDED"
    problem(call("PATCH", f"{TASKS}/{ended}", json={"priority": "low"}), 409)
    problem(call("POST", f"{TASKS}/nobody/cancel"), 404)


def test_lists_are_filtered_and_paged(call: Caller, surface: Surface) -> None:
    queue = fresh_name("listed")
    ids = [submit(call, queue=queue, task_type=f"type-{i % 2}")["task_id"] for i in range(5)]
    for task_id in ids:
        surface.until_shown(task_id, Status.PENDING)
    found: list[str] = []
    cursor = ""
    while True:
        page = call("GET", f"{TASKS}?queue={queue}&limit=2{cursor}").json()
        found += [one["task_id"] for one in page["tasks"]]
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert sorted(found) == sorted(ids)
    assert len(call("GET", TASKS, params={"queue": queue, "task_type": "type-1"}).json()["tasks"]) == 2
    late = {"queue": queue, "created_from": "2100-01-01T00:00:00Z"}
    assert call("GET", TASKS, params=late).json() == {"tasks": [], "cursor": None}
    for wrong in ("limit=0", "limit=x", "limit=9999", "status=NO", "priority=1", "created_to=1", "cursor=x", "typo=1"):
        assert fields_of(problem(call("GET", f"{TASKS}?{wrong}"), 422)) == {wrong.partition("=")[0]}


def test_dead_letters_are_listed_sent_back_and_discarded(call: Caller, surface: Surface) -> None:
    queue = fresh_name("dead")
    ids = [submit(call, queue=queue, max_retries=0)["task_id"] for _ in range(4)]
    for task_id in ids:
        surface.fail(task_id)
        surface.until_shown(task_id, Status.DEAD)

    def dead() -> set[str]:
        return {one["task_id"] for one in call("GET", f"/api/v1/dlq?queue={queue}").json()["tasks"]}

    assert dead() == set(ids)
    assert call("DELETE", f"/api/v1/dlq/{ids[0]}").status_code == 204
    surface.until(lambda: dead() == set(ids[1:]))
    assert task(call, ids[0])["status"] == "DEAD"
    problem(call("DELETE", f"/api/v1/dlq/{ids[0]}"), 404)

    assert call("POST", f"/api/v1/dlq/{ids[1]}/retry").json()["status"] == "PENDING"
    problem(call("POST", f"/api/v1/dlq/{ids[1]}/retry"), 409)
    surface.succeed(ids[1])
    assert (task(call, ids[1])["status"], task(call, ids[1])["attempts"]) == ("SUCCEEDED", 2)
    problem(call("DELETE", f"/api/v1/dlq/{ids[1]}"), 409)

    everything = call("POST", f"/api/v1/dlq/retry-all?queue={queue}")
    assert everything.json() == {"redriven": 2, "skipped": 0, "is_complete": True}
    surface.until(lambda: dead() == set())
    assert {task(call, task_id)["status"] for task_id in ids[2:]} == {"PENDING"}
    assert call("POST", f"/api/v1/dlq/retry-all?queue={queue}").json()["redriven"] == 0
    problem(call("POST", "/api/v1/dlq/retry-all"), 422)
    problem(call("POST", "/api/v1/dlq/nobody/retry"), 404)


def test_a_permanent_failure_is_sent_back_too(call: Caller, surface: Surface) -> None:
    task_id = submit(call)["task_id"]
    surface.fail(task_id, Verdict.PERMANENT)
    assert task(call, task_id)["status"] == "FAILED"
    assert call("POST", f"/api/v1/dlq/{task_id}/retry").status_code == 200


def test_a_bulk_call_decides_each_item_by_itself(call: Caller) -> None:
    named = fresh_name("bulk")
    items: list[Any] = [
        {"task_type": "a", "payload": 1},
        {"task_type": "a b"},
        {"task_type": "a", "task_id": named},
        {"task_type": "a", "task_id": named},
        {"task_type": "b", "task_id": named},
        {"task_type": "a", "payload": "x" * (PAYLOAD_MAX + 1)},
    ]
    response = call("POST", f"{TASKS}/bulk", json={"tasks": items})
    assert response.status_code == 202
    body = response.json()
    assert (body["accepted"], body["refused"]) == (3, 3)
    kinds = [one["error"]["status"] if "error" in one else one.get("is_repeat", False) for one in body["results"]]
    assert kinds == [False, 422, False, True, 409, 413]
    assert task(call, body["results"][0]["task"]["task_id"])["payload"] == 1
    many = call("POST", f"{TASKS}/bulk", json={"tasks": [{"task_type": "a"}] * 1000}).json()
    assert len({one["task"]["task_id"] for one in many["results"]}) == 1000


# --- idempotency (C21, C22) -------------------------------------------------------------------------------------------


def test_many_equal_submissions_at_once_are_one_task(call: Caller) -> None:
    for _ in range(5):
        body = json.dumps({"task_type": "a", "idempotency_key": fresh_name("k")}).encode()
        responses = call.run(call.gather(*[("POST", TASKS, body)] * 50))
        assert sorted({response.status_code for response in responses}) == [200, 202]
        assert sum(response.status_code == 202 for response in responses) == 1
        assert len({response.text for response in responses}) == 1


@pytest.mark.parametrize("naming", ["idempotency_key", "task_id"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_one_name_with_other_content_is_a_conflict(call: Caller, surface: Surface, naming: str, is_ended: bool) -> None:
    name = {naming: fresh_name("same")}
    first = submit(call, payload={"a": 1, "b": [2]}, **name)
    if is_ended:
        surface.succeed(first["task_id"])
    again = call.post_json(
        TASKS, json.dumps({**name, "payload": {"b": [2], "a": 1}, "task_type": "a"}, indent=3).encode()
    )
    assert again.status_code == 200
    assert again.json()["task_id"] == first["task_id"]
    assert again.json().keys() == first.keys()
    problem(call("POST", TASKS, json={"task_type": "a", "payload": 2, **name}), 409)


def test_a_key_belongs_to_its_tenant_and_is_not_burnt_by_refusals(call: Caller) -> None:
    key = fresh_name("schlüssel ")
    problem(call("POST", TASKS, json={"task_type": "a", "idempotency_key": key, "delay_seconds": -1}), 422)
    one = submit(call, idempotency_key=key, metadata={"tenant_id": "one"})
    two = submit(call, idempotency_key=key, metadata={"tenant_id": "two"}, payload="other")
    assert one["task_id"] != two["task_id"]
    assert task(call, one["task_id"])["idempotency_key"] == key
    for wrong in ("", "x" * 256):
        problem(call("POST", TASKS, json={"task_type": "a", "idempotency_key": wrong}), 422)
    submit(call, idempotency_key=fresh_name("x" * 250)[:255])


# --- sizes (C34) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_the_size_of_a_payload_is_exact(call: Caller, excess: int) -> None:
    payload = b'"' + b"x" * (PAYLOAD_MAX + excess - 2) + b'"'
    response = call.post_json(TASKS, b'{"task_type":"a","payload":' + payload + b"}")
    if excess > 0:
        problem(response, 413)
    else:
        assert len(task(call, response.json()["task_id"])["payload"]) == PAYLOAD_MAX + excess - 2


def test_a_body_beyond_its_bound_is_not_read(call: Caller) -> None:
    told = problem(call.post_json(TASKS, b" " * (BODY_MAX + 1)), 413)
    assert told["type"] == "urn:tidewheel:problem:too-large"

    async def endless() -> Any:
        while True:
            yield b" " * 65536

    told = problem(call("POST", TASKS, content=endless(), headers={"content-type": "application/json"}), 413)
    assert told["type"] == "urn:tidewheel:problem:too-large", "it was answered, although the body has no end"


# --- content (C39-C41) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload", ["NaN", "[Infinity]", "-Infinity", "1e999", "[" * 20_000 + "]" * 20_000, '"\\ud800"']
)
def test_what_cannot_be_read_back_is_refused(surface: Surface, call: Caller, payload: str) -> None:
    queue = fresh_name("q")
    told = problem(call.post_json(TASKS, f'{{"task_type":"a","queue":"{queue}","payload":{payload}}}'.encode()), 422)
    assert told["type"] == "urn:tidewheel:problem:invalid"
    accepted = call("POST", TASKS, json={"task_type": "a", "queue": queue}).json()["task_id"]
    surface.until(lambda: call("GET", TASKS, params={"queue": queue}).json()["tasks"])
    listed = call("GET", TASKS, params={"queue": queue}).json()["tasks"]
    assert [one["task_id"] for one in listed] == [accepted], "nothing came of it"


@pytest.mark.parametrize(
    "payload",
    ["9007199254740993", "9" * JSON_INTEGER_DIGITS_MAX, '"\\u0000\\uffff\\\\u0000🦉\u202e"', '{"\\u0000":-0.0}'],
)
def test_what_is_accepted_is_read_back_unchanged(call: Caller, surface: Surface, payload: str) -> None:
    body = f'{{"task_type":"a","payload":{payload}}}'.encode()
    task_id = call.post_json(TASKS, body).json()["task_id"]
    surface.succeed(task_id, payload.encode())
    surface.until_shown(task_id, Status.SUCCEEDED)
    answer = call("GET", f"{TASKS}/{task_id}").content
    assert f'"payload":{payload},'.encode() in answer
    assert f'"result":{payload},'.encode() in answer


@pytest.mark.parametrize("result", [b"NaN", b'{"a":1e999}', b"\xff", b"", b'"\\ud800"', b"[" * 70 + b"]" * 70])
def test_an_answer_is_valid_json_whatever_a_worker_reports(call: Caller, surface: Surface, result: bytes) -> None:
    task_id = submit(call)["task_id"]
    surface.succeed(task_id, result)
    shown = task(call, task_id)
    assert (shown["status"], shown["has_result"], shown["result"]) == ("SUCCEEDED", True, None)
    assert shown["result_base64"] is not None


def test_the_body_must_be_said_to_be_json(call: Caller) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        problem(call("POST", TASKS, content=b"{}", headers={"content-type": media_type}), 415)
    assert call.post_json(TASKS, b'{"task_type":"a"}').status_code == 202
    vendor = {"content-type": "application/cloudevents+json; charset=utf-8"}
    assert call("POST", TASKS, content=b'{"task_type":"a"}', headers=vendor).status_code == 202


# --- ids in paths (C42) -----------------------------------------------------------------------------------------------


def test_an_encoded_id_never_reaches_another_task(call: Caller) -> None:
    victim = submit(call, delay_seconds=3600, task_id=fresh_name("foo"))["task_id"]
    for path in (
        "%2Fcancel",
        "%2fcancel",
        "%252Fcancel",
        "%3Fx",
        "%00",
        ";x/cancel",
        "%20/cancel",
        "+/cancel",
        "%C3%A9",
    ):
        for method in ("GET", "POST", "DELETE"):
            assert call(method, f"{TASKS}/{victim}{path}").status_code in (404, 405), (method, path)
    assert task(call, victim)["status"] == "SCHEDULED"


@pytest.mark.parametrize("task_id", ["bulk", "cancel", "retry-all", "a.b:c_d-1", "..."])
def test_an_id_that_looks_like_a_route_is_that_task(call: Caller, task_id: str) -> None:
    submit(call, delay_seconds=3600, task_id=task_id)
    assert task(call, task_id)["task_id"] == task_id
    assert call("POST", f"{TASKS}/{task_id}/cancel").json()["task_id"] == task_id
    problem(call("DELETE", f"/api/v1/dlq/{task_id}"), 409)


# --- what became of it (C43) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", ["null", "0", '""', "[]", "{}", "false"])
def test_every_result_is_told_as_it_is(call: Caller, surface: Surface, result: str) -> None:
    task_id = submit(call)["task_id"]
    surface.succeed(task_id, result.encode())
    shown = surface.service.wait(task_id, 5).run()
    assert (shown.status, shown.has_result, bytes(shown.result)) == (Status.SUCCEEDED, True, result.encode())


def test_six_answers_are_told_apart(call: Caller, surface: Surface) -> None:
    queued, started, done, failed = (submit(call, max_retries=0)["task_id"] for _ in range(4))
    surface.begin(started)
    surface.succeed(done)
    surface.fail(failed)

    def told(task_id: str) -> tuple[Any, ...]:
        response = call("GET", f"{TASKS}/{task_id}")
        body = response.json()
        return response.status_code, body["status"], body.get("has_result"), body.get("error") is not None

    assert told("nobody") == (404, 404, None, False)
    assert told(queued) == (200, "PENDING", False, False)
    assert told(started) == (200, "RUNNING", False, False)
    assert told(done) == (200, "SUCCEEDED", True, False)
    assert told(failed) == (200, "DEAD", False, True)


def test_waiting_ends_at_its_time_with_the_task_as_it_stands(call: Caller, surface: Surface) -> None:
    task_id = submit(call, delay_seconds=3600)["task_id"]
    assert surface.service.wait(task_id, 0.01).run().status is Status.SCHEDULED


def test_bytes_are_given_back_as_bytes(call: Caller, surface: Surface) -> None:
    task_id = submit(call, payload_base64="AP8=", content_type="image/png")["task_id"]
    surface.succeed(task_id, b"\x00\x01", "application/octet-stream")
    shown = task(call, task_id)
    assert (shown["payload"], shown["payload_base64"], shown["payload_content_type"]) == (None, "AP8=", "image/png")
    assert (shown["result"], shown["result_base64"]) == (None, "AAE=")
    assert shown["result_content_type"] == "application/octet-stream"


# --- shard and view ---------------------------------------------------------------------------------------------------


def test_a_view_that_lags_is_waited_for(call: Caller, surface: Surface) -> None:
    task_id = submit(call)["task_id"]
    surface.until_shown(task_id, Status.PENDING)
    surface.view.stale_row = surface.view.task(task_id)
    surface.succeed(task_id, b"7")
    surface.until_shown(task_id, Status.SUCCEEDED)
    surface.view.stale_reads = 3
    shown = task(call, task_id)
    assert (shown["status"], shown["result"], surface.view.stale_reads) == ("SUCCEEDED", 7, 0)


def test_dead_letters_go_back_once_the_view_has_caught_up(call: Caller, surface: Surface) -> None:
    task_id = submit(call, max_retries=0)["task_id"]
    surface.fail(task_id)
    surface.until_shown(task_id, Status.DEAD)
    surface.view.stale_row = surface.view.task(task_id)
    assert call("POST", f"/api/v1/dlq/{task_id}/retry").status_code == 200
    surface.fail(task_id)
    surface.until(lambda: (row := surface.view.task(task_id)) is not None and row.attempt == 2)
    surface.forgotten.add(task_id)  # so that only the view, which lags, tells of it: the shard must notice
    surface.view.stale_reads = 2
    assert call("POST", f"/api/v1/dlq/{task_id}/retry").status_code == 200
    assert surface.view.stale_reads == 0


def test_a_view_that_is_down_stops_neither_submissions_nor_live_status(call: Caller, surface: Surface) -> None:
    surface.view.is_down = True
    try:
        named = submit(call, idempotency_key=fresh_name("down"))["task_id"]
        assert task(call, named)["status"] == "PENDING"
        surface.begin(named)
        assert task(call, named)["status"] == "RUNNING"
        problem(call("GET", f"{TASKS}/nobody"), 503)
        problem(call("GET", TASKS), 503)
        problem(call("POST", "/api/v1/dlq/retry-all?queue=q"), 503)
    finally:
        surface.view.is_down = False


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_unknown_routes_and_methods_are_problems(call: Caller) -> None:
    problem(call("GET", "/nope"), 404)
    problem(call("GET", f"{TASKS}/a/b/c"), 404)
    problem(call("POST", f"{TASKS}/"), 404)
    assert "allow" in call("PUT", TASKS).headers
    problem(call("PUT", TASKS), 405)


def test_health_tells_of_progress(call: Caller, surface: Surface) -> None:
    assert call("GET", "/healthz").json()["status"] == "ok"
    before = surface.health
    surface.health = Health(parts=(*before.parts, PartHealth(name="projector", is_ok=False, detail="stuck for 9 s")))
    response = call("GET", "/healthz")
    surface.health = before
    assert (response.status_code, response.json()["reasons"]) == (503, ["projector: stuck for 9 s"])


def test_a_defect_is_a_problem_with_the_id_of_the_request(call: Caller, surface: Surface) -> None:
    before, surface.health = surface.health, None  # type: ignore[assignment]  # the defect
    body = problem(call("GET", "/healthz", headers={"X-Request-Id": "abc"}), 500)
    surface.health = before
    assert body["request_id"] == "abc"
    assert "NoneType" not in json.dumps(body)


def test_schemas_and_metrics_are_served(call: Caller) -> None:
    response = call("GET", "/subjects")
    assert response.headers["content-type"] == "application/vnd.schemaregistry.v1+json"
    subject = response.json()[0]
    latest = call("GET", f"/subjects/{subject}/versions/latest").json()
    assert call("GET", f"/schemas/ids/{latest['id']}").json() == {"schema": latest["schema"]}
    assert call("GET", "/schemas/ids/999999").json()["error_code"] == 40403
    assert call("GET", "/metrics").status_code == 200


def test_a_request_id_goes_through(call: Caller) -> None:
    assert call("GET", "/healthz", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    assert call("GET", "/healthz", headers={"X-Request-Id": "x" * 200}).headers["x-request-id"] != "x" * 200


def test_the_description_names_what_it_refers_to(call: Caller) -> None:
    document = call("GET", "/openapi.json").json()
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}

    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            return own.union(*(references(value) for value in part.values()))
        return set().union(*(references(value) for value in part)) if isinstance(part, list) else set()

    assert references(document) <= known
    submission = document["components"]["schemas"]["Submission"]["properties"]
    assert {
        "task_type",
        "payload",
        "scheduled_at",
        "max_retries",
        "retry_backoff",
        "idempotency_key",
    } <= submission.keys()
    body = document["paths"][TASKS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/Submission"}
