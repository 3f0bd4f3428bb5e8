"""C40: deep nesting and huge numbers, as payloads, as results and in options.

Chosen: at most 64 levels and 1,000 digits, checked by the service itself and not by the interpreter; integers within
that are kept exactly; a result beyond it fails the task (FAILED, "result not serialisable").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from schemas.limits import JSON_DEPTH_MAX, JSON_INTEGER_DIGITS_MAX
from tests.harness import TASKS, Api, eventually, running
from tidewheel import App
from workers.errors import ArgumentError

app = App()
EXACT = [2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**JSON_INTEGER_DIGITS_MAX - 1]


def nested(levels: int) -> Any:
    value: Any = []
    for level in range(levels - 1):
        value = [value] if level % 2 else {"a": value}
    return value


@app.task(name="echo")
async def echo(value: Any) -> Any:
    return value


@app.task(name="nesting")
async def nesting(levels: int) -> Any:
    return nested(levels)


@app.task(name="digits")
async def digits(count: int) -> int:
    return int(10**count - 1)


@app.task(name="itself")
async def itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running(app, port=0) as engine, Api(engine.address) as api:
        yield api


@pytest.mark.parametrize("number", EXACT, ids=lambda number: f"{len(str(number))} digits")
def test_an_integer_is_kept_exactly_on_its_way_through(api: Api, number: int) -> None:
    handle = echo.submit(number)
    assert handle.result(20) == number
    text = api("GET", f"{TASKS}/{handle.task_id}").text
    assert f'"payload":{{"value":{number}}}' in text
    assert f'"result":{number},' in text
    assert api.until(api.submit("echo", number))["result"] == number


def test_nesting_is_kept_up_to_the_limit(api: Api) -> None:
    value = [nested(JSON_DEPTH_MAX - 1)]
    shown = api.until(api.submit("echo", value))
    assert shown["payload"] == shown["result"] == value
    assert echo.submit(nested(JSON_DEPTH_MAX - 1)).result(20) == nested(JSON_DEPTH_MAX - 1)


@pytest.mark.parametrize(
    "payload",
    [
        "[" * (JSON_DEPTH_MAX + 1) + "]" * (JSON_DEPTH_MAX + 1),
        "[" * 900 + "]" * 900,
        "[" * 20_000 + "]" * 20_000,
        '{"a":' * 20_000 + "1" + "}" * 20_000,
        "9" * (JSON_INTEGER_DIGITS_MAX + 1),
        "9" * 4_300,
        "9" * 4_301,
    ],
    ids=lambda payload: f"{payload[:5]}-{len(payload)}",
)
def test_beyond_it_is_refused_and_the_process_lives(api: Api, payload: str) -> None:
    body = f'{{"task_type":"echo","payload":{payload}}}'
    answer = api("POST", TASKS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"] in ("payload", "body")
    assert api("GET", "/healthz").status_code == 200


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 10**400])
def test_a_number_in_an_option_is_bounded(api: Api, number: int) -> None:
    for field in ("max_retries", "max_attempts", "delay_seconds", "timeout_seconds", "retry_factor", "lease_seconds"):
        answer = api("POST", TASKS, json={"task_type": "echo", field: number})
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize(
    ("task_type", "payload"),
    [
        ("nesting", JSON_DEPTH_MAX + 1),
        ("nesting", 900),
        ("nesting", 20_000),
        ("digits", JSON_INTEGER_DIGITS_MAX + 1),
        ("digits", 4_301),
        ("itself", {}),
    ],
)
def test_a_result_beyond_it_fails_the_task_in_words(api: Api, task_type: str, payload: Any) -> None:
    shown = api.until(api.submit(task_type, payload))
    assert (shown["status"], shown["attempts"], shown["error"]["kind"]) == ("FAILED", 1, "result")
    assert "result not serialisable" in shown["error"]["message"]


def test_an_argument_beyond_it_is_not_even_sent(api: Api) -> None:
    for argument in (nested(JSON_DEPTH_MAX), 10**JSON_INTEGER_DIGITS_MAX, nested(20_000)):
        with pytest.raises(ArgumentError, match="can't be stored"):
            echo.submit(argument)


def test_what_was_accepted_is_listed(api: Api) -> None:
    ids = {api.submit("echo", value) for value in (*EXACT, nested(JSON_DEPTH_MAX))}

    def listed() -> bool:
        return ids <= {one["task_id"] for one in api("GET", f"{TASKS}?limit=500").json()["tasks"]}

    assert eventually(listed, "the list")
