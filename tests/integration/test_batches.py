"""Batches on the embedded engine: tasks that were submitted one by one, done together, each with its own history."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import msgspec
import pytest

from tests.harness import WAIT_S, running
from tidewheel import (
    App,
    Batch,
    Context,
    PermanentError,
    Retry,
    Status,
    TaskCancelled,
    TaskFailed,
    TaskWasCancelled,
)
from workers.errors import ArgumentError

app = App()
sizes: list[int] = []
pair_begun = threading.Event()


class Row(msgspec.Struct):
    n: int


class Stored(msgspec.Struct):
    place: int
    attempt: int


@app.task(name="store", batch=Batch(size=20, wait=0.1), retry=Retry(3, delay=0))
def store(rows: list[Row], contexts: list[Context]) -> list[Stored | Exception]:
    sizes.append(len(rows))
    return [stored(row, context) for row, context in zip(rows, contexts, strict=True)]


def stored(row: Row, context: Context) -> Stored | Exception:
    if row.n < 0:
        return PermanentError(f"{row.n} is no place")
    if row.n % 10 == 7 and context.attempt == 1:
        return ConnectionError("busy")
    return Stored(row.n, context.attempt)


@app.task(name="shout", batch=Batch(size=10, wait=0))
async def shout(words: list[str]) -> list[str]:
    return [word.upper() for word in words]


@app.task(name="pair", batch=Batch(size=2, wait=10))
def pair(names: list[str], contexts: list[Context]) -> list[str | TaskCancelled]:
    pair_begun.set()
    while not any(context.is_cancelled for context in contexts):
        threading.Event().wait(0.005)
    return said(names, contexts)


def said(names: Iterable[str], contexts: Iterable[Context]) -> list[str | TaskCancelled]:
    return [TaskCancelled() if context.is_cancelled else name for name, context in zip(names, contexts, strict=True)]


def test_each_task_of_a_batch_has_its_own_result_retries_and_errors() -> None:
    sizes.clear()
    with running(app):
        handles = store.submit_many([*(Row(n) for n in range(40)), {"n": -1}])
        results = [handle.result(timeout=WAIT_S) for handle in handles[:-1]]
        with pytest.raises(TaskFailed, match="-1 is no place"):
            handles[-1].result(timeout=WAIT_S)
        assert handles[-1].status() is Status.FAILED
        assert [attempt.attempt for attempt in handles[17].info().attempt_history] == [1, 2]
    assert results == [Stored(n, 2 if n % 10 == 7 else 1) for n in range(40)]
    assert sum(sizes) == 41 + 4
    assert 1 < max(sizes) <= 20


def test_a_coroutine_takes_batches_too_and_items_are_checked_when_they_are_submitted() -> None:
    with running(app):
        assert shout.submit("a").result(timeout=WAIT_S) == "A"
        assert [handle.result(timeout=WAIT_S) for handle in shout.submit_many(["b", "c"])] == ["B", "C"]
        with pytest.raises(ArgumentError, match="an item of parameter 'words'"):
            shout.submit_many([["b", "c"]])  # type: ignore[list-item]


def test_one_task_of_a_running_batch_is_cancelled_and_the_other_goes_on() -> None:
    pair_begun.clear()
    with running(app):
        first, second = pair.submit("first"), pair.submit("second")
        assert pair_begun.wait(WAIT_S)
        first.cancel()
        with pytest.raises(TaskWasCancelled):
            first.result(timeout=WAIT_S)
        assert second.result(timeout=WAIT_S) == "second"
