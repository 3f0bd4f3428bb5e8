"""Whatever is sent, the API answers with a right answer or a clear refusal: never a 5xx, never invalid JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.submission import Submission, Update
from tests.unit.surface import Caller, Surface, running

TASKS = "/api/v1/tasks"
BODIES = [("POST", TASKS), ("POST", f"{TASKS}/bulk"), ("PATCH", f"{TASKS}/victim"), ("POST", f"{TASKS}/nobody/cancel")]
many = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


@pytest.fixture(scope="module")
def surface() -> Iterator[Surface]:
    with running() as surface:
        yield surface


@pytest.fixture(scope="module")
def call(surface: Surface) -> Iterator[Caller]:
    caller = Caller(surface.api)
    caller.post_json(TASKS, b'{"task_type":"a","task_id":"victim","delay_seconds":86400}')
    yield caller
    caller.close()


RAW = st.sampled_from(
    [
        *("NaN", "-Infinity", "1e999", "1e-999", "-0", "1E5", "true", "null", '"NaN"', '"inf"', '"high"', '"1"', "[]"),
        *(str(2**63), str(-(2**63) - 1), str(2**64), "9" * 400, "9" * 4400, "[" * 80 + "]" * 80, "[" * 9000),
        *(
            '"\\ud800"',
            '"\\u0000"',
            '"\\uffff"',
            '"x\\u202ey"',
            '"' + "x" * 5000 + '"',
            '{"a":{"b":[]}}',
            '{"tenant_id":""}',
        ),
        *(
            '"2026-06-01T12:00:00Z"',
            '"2026-06-01T12:00:00"',
            '"9999-12-31T23:59:59.9999999Z"',
            '"0000-00-00T00:00:00Z"',
        ),
        *("1780315200000", '"../.."', '"a/b"', '"AP8="', '"image/png"', '"é"', '{"":""}', '["",""]', "0.1", "1", "7"),
    ]
)
VALUES = RAW | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
).map(json.dumps)
NAMES = st.sampled_from([*Submission.model_fields, *Update.model_fields, "tasks", "reason", "", "__class__"])
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
OBJECTS = FIELDS.map(lambda pairs: "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in pairs) + "}")
TASK_LIKE = FIELDS.map(
    lambda pairs: '{"task_type":"a"' + "".join(f",{json.dumps(name)}:{value}" for name, value in pairs) + "}"
)
TEXTS = OBJECTS | TASK_LIKE | st.lists(TASK_LIKE, max_size=3).map(lambda items: '{"tasks":[' + ",".join(items) + "]}")


def checked(response: httpx.Response) -> Any:
    """The answer's JSON, of which every client can read every part."""
    assert response.status_code < 500, response.text
    if not response.content:
        return None
    body = json.loads(response.content.decode(), parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        assert len(response.content) < 32_768
    return body


@many
@given(st.sampled_from(BODIES), TEXTS.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=300))
def test_any_body_is_accepted_or_refused(call: Caller, target: tuple[str, str], body: bytes) -> None:
    method, path = target
    answer = checked(call(method, path, content=body, headers={"content-type": "application/json"}))
    if method == "POST" and path == TASKS and "created_at" in answer:
        shown = checked(call("GET", f"{TASKS}/{answer['task_id']}"))
        assert shown["task_id"] == answer["task_id"]


PARTS = st.sampled_from(["api", "v1", "tasks", "dlq", "retry", "schemas", "subjects", ".."]) | st.text(max_size=8)
METHODS = st.sampled_from(["GET", "POST", "PATCH", "DELETE", "PUT", "OPTIONS", "HEAD"])


@many
@given(METHODS, st.lists(PARTS, max_size=5))
def test_any_path_is_answered(call: Caller, method: str, parts: list[str]) -> None:
    response = call(method, "http://api/" + "/".join(quote(part, safe="", errors="replace") for part in parts))
    assert response.status_code < 500
    if method != "HEAD" and response.status_code >= 400 and "problem" in response.headers["content-type"]:
        checked(response)


FILTERS = st.sampled_from(["tenant_id", "queue", "task_type", "cursor", "created_from", "limit"])


@many
@given(st.dictionaries(FILTERS, st.text(), min_size=1))
def test_any_filter_is_answered(call: Caller, query: dict[str, str]) -> None:
    checked(call("GET", TASKS, params=query))
    checked(call("GET", "/api/v1/dlq", params=query))
