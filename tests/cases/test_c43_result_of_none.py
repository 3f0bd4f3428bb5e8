"""C43: what became of a task has six answers, and a result of None is none of the other five.

Chosen: an unknown id is `TaskNotFound` (404); a task that waits or runs is a status, and `ResultTimeout` to whoever
waits for its result; None is returned, and JSON null with `has_result` true over REST; a result that is not kept any
more is `ResultNotKept` (`has_result` false); a failed one raises `TaskFailed` with its error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.ports import Batch, TaskChange
from schemas.ids import shard_of
from schemas.messages import Status
from tests.harness import SHARDS, WAIT_S, Api, eventually, running
from tidewheel import (
    App,
    Engine,
    ResultNotKept,
    ResultTimeout,
    Retry,
    TaskFailed,
    TaskHandle,
    TaskNotFound,
)
from tidewheel.http import HttpBackend
from tidewheel.settings import ClientSettings

VALUES: list[Any] = [None, 0, "", [], {}, False]
app = App()
begun, gate = threading.Event(), threading.Event()


@app.task(name="echo")
async def echo(value: Any) -> Any:
    return value


@app.task(name="nothing")
def nothing() -> None: ...


@app.task(name="hold")
def hold() -> None:
    begun.set()
    gate.wait(WAIT_S)


@app.task(name="fail", retry=Retry(1))
async def fail() -> None:
    raise ValueError("no")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(app, port=0) as engine:
        yield engine
        gate.set()


@pytest.fixture(scope="module")
def remote(engine: Engine) -> Iterator[App]:
    remote = App()
    backend = HttpBackend(ClientSettings(server=engine.address, timeout_s=15))
    remote.use(backend)
    yield remote
    backend.close()


@pytest.fixture(params=["in process", "over http"])
def caller(request: pytest.FixtureRequest, remote: App) -> App:
    return app if request.param == "in process" else remote


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_waiting_ends_with_just_the_value(engine: Engine, caller: App, value: Any) -> None:
    handle = caller.handle(echo.submit(value).task_id)
    result = handle.result(5)
    assert (result, type(result)) == (value, type(value))
    info = handle.info()
    assert (info.status, info.has_result, info.error) == ("SUCCEEDED", True, None)
    with Api(engine.address) as api:
        shown = api.task(handle.task_id)
        assert (shown["status"], shown["has_result"], shown["result"]) == ("SUCCEEDED", True, value)


def test_a_handler_without_a_return_gives_none() -> None:
    assert nothing.submit().result(5) is None


def test_waiting_works_in_a_coroutine() -> None:
    async def submit_and_wait() -> list[Any]:
        handles = [await echo.asubmit(value) for value in VALUES]
        return [await handle.aresult(5) for handle in handles]

    assert asyncio.run(submit_and_wait()) == VALUES


def told(handle: TaskHandle[Any]) -> tuple[str, Any]:
    """What a caller can tell: the status, and what waiting for the result gives."""
    try:
        status = str(handle.status())
    except TaskNotFound:
        status = "unknown"
    try:
        return status, handle.result(0.01)
    except (TaskNotFound, ResultTimeout, ResultNotKept, TaskFailed) as error:
        return status, type(error)


def forget_result(engine: Engine, task_id: str) -> None:
    """What a retention of results does: the row stays, its result goes. The view may miss the event that comes next."""
    partition = shard_of(task_id, SHARDS)
    eventually(lambda: (row := engine.view.task(task_id)) is not None and row.status is Status.SUCCEEDED)
    position = engine.view.positions()[partition]
    change = TaskChange(task_id=task_id, columns={"result": None}, attempts={})
    engine.view.apply([Batch(partition, [change], position._replace(next_offset=position.next_offset + 1))])


def test_six_answers_are_told_apart(engine: Engine, remote: App) -> None:
    expired = echo.submit("gone")
    assert expired.result(20) == "gone"
    queued, running_one = echo.options(delay=3600).submit(1), hold.submit()
    done, failed = echo.submit(None), fail.submit()
    assert begun.wait(WAIT_S)
    assert done.result(20) is None
    with pytest.raises(TaskFailed):
        failed.result(20)
    eventually(lambda: engine.runtime.live(running_one.task_id).status is Status.RUNNING)  # type: ignore[union-attr]
    forget_result(engine, expired.task_id)
    ids = {
        "nobody": ("unknown", TaskNotFound),
        queued.task_id: ("SCHEDULED", ResultTimeout),
        running_one.task_id: ("RUNNING", ResultTimeout),
        done.task_id: ("SUCCEEDED", None),
        expired.task_id: ("SUCCEEDED", ResultNotKept),
        failed.task_id: ("DEAD", TaskFailed),
    }
    for caller in (app, remote):
        assert {task_id: told(caller.handle(task_id)) for task_id in ids} == ids
    assert len(set(ids.values())) == 6
