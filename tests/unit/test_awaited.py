"""A view that is connected in the background: what is raised until then, and what is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.sqlite import SqliteView
from scheduler.ports import View
from schemas.errors import Fatal, Retriable
from tests.harness import WAIT_S, eventually
from tidewheel import awaited
from tidewheel.awaited import AwaitedView


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "RETRY_S", 0.001)


def opened(folder: Path) -> SqliteView:
    """A real view."""
    return SqliteView(folder / "view.db")


def failing(*errors: Exception, then: Callable[[], View]) -> Callable[[], View]:
    """A connect that fails in these ways, one after the other."""
    left = list(errors)

    def connect() -> View:
        if left:
            raise left.pop(0)
        return then()

    return connect


def test_one_that_answers_is_there_at_once(tmp_path: Path) -> None:
    view = AwaitedView(lambda: opened(tmp_path))
    assert view.trouble is None
    assert view.positions() == {}
    view.close()


def test_what_nobody_can_wait_for_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="tables"):
        AwaitedView(failing(Fatal("no tables"), then=lambda: opened(tmp_path)))


def test_until_it_is_there_every_call_may_be_repeated_and_says_why(tmp_path: Path) -> None:
    """Even what is wrong in a way that does not pass by itself: later it ends no process."""
    may_open, has_waited = threading.Event(), threading.Event()

    def connect() -> View:
        has_waited.set()
        assert may_open.wait(WAIT_S)
        return opened(tmp_path)

    view = AwaitedView(failing(Retriable("away"), Fatal("no tables"), RuntimeError("odd"), then=connect))
    assert has_waited.wait(WAIT_S)
    assert "odd" in str(view.trouble)
    for call in (view.positions, lambda: view.rows(["a"]), lambda: view.task("a")):
        with pytest.raises(Retriable, match="odd"):
            call()
    may_open.set()
    eventually(lambda: view.trouble is None)
    assert view.task("a") is None
    view.close()


def test_one_that_is_closed_keeps_nothing_that_comes_later(tmp_path: Path) -> None:
    is_connecting, may_open = threading.Event(), threading.Event()
    closed: list[SqliteView] = []

    class Noted(SqliteView):
        def close(self) -> None:
            super().close()
            closed.append(self)

    def connect() -> View:
        is_connecting.set()
        assert may_open.wait(WAIT_S)
        return Noted(tmp_path / "view.db")

    view = AwaitedView(failing(Retriable("away"), then=connect))
    assert is_connecting.wait(WAIT_S)
    view.close()
    may_open.set()
    eventually(lambda: closed, "it was closed")
    with pytest.raises(Retriable, match="away"):
        view.positions()
