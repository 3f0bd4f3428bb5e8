"""C44: whatever a handler raises, its worker lives, and what is recorded is text of bounded size.

Chosen: an exception never travels, only its type's name, its message (4 KiB) and its traceback (16 KiB). SystemExit and
KeyboardInterrupt are failures like others, retried by policy.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import raising_app
from tests.harness import Api, history, running
from tests.raising_app import app
from tidewheel import Engine
from workers.execution import MESSAGE_MAX, TRACEBACK_MAX

EXECUTORS = ["async", "thread", "process"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(app, port=0, app="tests.raising_app:app") as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with Api(engine.address) as api:
        yield api


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", raising_app.ERRORS)
def test_it_is_recorded_and_retried_and_the_worker_lives(engine: Engine, api: Api, kind: str, executor: str) -> None:
    type_name, in_message = raising_app.ERRORS[kind]
    task_id = api.submit(f"raise-{executor}", {"kind": kind}, max_retries=1, retry_delay_seconds=0)
    shown = api.until(task_id)
    assert (shown["status"], shown["attempts"], shown["crash_count"]) == ("DEAD", 2, 0)
    for attempt in shown["attempt_history"]:
        error = attempt["error"]
        assert (attempt["outcome"], error["kind"], error["type"]) == ("failed", "raised", type_name)
        assert in_message in error["message"]
        assert 0 < len(error["traceback"].encode()) <= TRACEBACK_MAX
        assert len(error["message"].encode()) <= MESSAGE_MAX
    assert engine.failure is None
    assert api.until(api.submit(f"fine-{executor}"))["result"] == "fine"
    assert history(engine).starts(task_id) == [1, 2]


def test_the_same_worker_did_it_all(engine: Engine) -> None:
    assert engine.worker is not None and engine.worker.stats.is_healthy
    assert engine.health().parts and all(part.is_ok for part in engine.health().parts)
