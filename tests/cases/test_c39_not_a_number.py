"""C39: NaN and Infinity neither come in nor go out.

Chosen: a result that holds one fails the task at once ("result not serialisable", FAILED, not retried); as a payload,
an argument or an option they are refused. What REST refuses is in test_surface.py and tests/unit/test_submission.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import TASKS, Api, running
from tidewheel import App, NotSubmitted, Retry, TaskFailed
from tidewheel.http import HttpBackend
from tidewheel.settings import ClientSettings
from workers.errors import ArgumentError

app = App()
NOT_FINITE = [math.nan, math.inf, -math.inf]


@app.task(name="returning")
async def returning(text: str, depth: int = 0) -> Any:
    value: Any = float(text)
    for _ in range(depth):
        value = {"deeper": [None, value]}
    return value


@app.task(name="taking")
async def taking(value: Any) -> Any:
    return value


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with running(app, port=0) as engine, Api(engine.address) as api:
        yield api


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("depth", [0, 5])
def test_a_result_that_is_no_number_fails_the_task(api: Api, text: str, depth: int) -> None:
    task_id = api.submit("returning", {"text": text, "depth": depth})
    shown = api.until(task_id)
    assert (shown["status"], shown["attempts"], shown["has_result"]) == ("FAILED", 1, False)
    assert shown["error"]["kind"] == "result"
    assert "result not serialisable" in shown["error"]["message"] and "NaN" in shown["error"]["message"]
    for path in (f"{TASKS}/{task_id}", TASKS):
        json.loads(api("GET", path).content, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))
    with pytest.raises(TaskFailed, match="not serialisable"):
        app.handle(task_id).result(5)


@pytest.mark.parametrize("surface", ["in process", "over http"])
@pytest.mark.parametrize("number", NOT_FINITE)
def test_no_option_and_no_argument_holds_one(api: Api, surface: str, number: float) -> None:
    caller, backend = App(), None
    task_type = caller.task(name="taking")(taking._function)
    if surface == "over http":
        backend = HttpBackend(ClientSettings(server=str(api.client.base_url).rstrip("/"), timeout_s=15))
        caller.use(backend)
    else:
        caller.use(app.backend)
    before = len(api("GET", f"{TASKS}?limit=500").json()["tasks"])
    for option in ("delay", "timeout", "total_timeout", "lease"):
        given: Any = {option: number}
        with pytest.raises(NotSubmitted, match=option):
            task_type.options(**given).submit(1)
    with pytest.raises(ArgumentError, match="NaN or Infinity"):
        task_type.submit({"a": [number]})
    for field in ("delay", "factor", "cap"):
        with pytest.raises((ValueError, NotSubmitted), match=field):
            task_type.options(retry=Retry(**{field: number})).submit(1)  # type: ignore[arg-type]
    assert len(api("GET", f"{TASKS}?limit=500").json()["tasks"]) == before
    if backend is not None:
        backend.close()
