"""The projector of an engine on disk is a child: it ends with the engine, and the engine does not go on without it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

import tidewheel.embedded
from scheduler.ports import TaskFilter
from tests.harness import SHARDS, WAIT_S, Served, eventually, running
from tidewheel import App, Engine

app = App()


@app.task(name="touch")
def touch() -> None:
    """Nothing to do."""


def children(process: int) -> list[int]:
    """The projectors among the children of a process."""
    found = []
    for tasks in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            with contextlib.suppress(OSError):
                if b"tidewheel.projection" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return found


def is_running(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def the_projector(engine: Engine, process: int = os.getpid()) -> int:
    """The child, once the view has caught up."""
    eventually(lambda: engine.view_lag() == 0, "the view caught up")
    (child,) = children(process)
    return child


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """The process stands still within the block."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_it_shows_what_ended_and_ends_with_the_engine(tmp_path: Path) -> None:
    with running(app, tmp_path) as engine:
        handle = touch.submit()
        assert handle.result(timeout=WAIT_S) is None
        child = the_projector(engine)
        assert engine.health().reasons == ()
    assert not is_running(child)
    with running(app, tmp_path) as engine:
        assert engine.view.count(TaskFilter()) == 1


def test_while_it_stands_still_tasks_run_and_the_engine_is_unwell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tidewheel.embedded, "STALLED_S", 1.0)
    with running(app, tmp_path) as engine:
        child = the_projector(engine)
        with stopped(child):
            handle = touch.submit()
            assert engine.worker is not None
            stats = engine.worker.stats
            eventually(lambda: stats.succeeded, "the task ran")
            eventually(lambda: engine.health().reasons, "the stalled projector was noticed")
            assert [part.name for part in engine.health().parts if not part.is_ok] == ["projector"]
        handle.result(timeout=WAIT_S)
        eventually(lambda: not engine.health().reasons, "it was well again")


def test_its_death_is_the_end_of_the_engine_which_starts_again_without_a_loss(tmp_path: Path) -> None:
    engine = app.embedded(tmp_path, shards=SHARDS)
    with structlog.testing.capture_logs():
        engine.start()
        child = the_projector(engine)
        os.kill(child, signal.SIGSTOP)
        ids = {touch.submit().task_id for _ in range(20)}
        os.kill(child, signal.SIGKILL)
        assert engine.wait(WAIT_S)
        engine.stop(grace_s=0)
    assert "the projector's process ended: it was killed by SIGKILL" in str(engine.failure)
    with running(app, tmp_path) as engine:
        eventually(lambda: all(engine.view.task(task_id) for task_id in ids), "all of them were shown")


def test_signals_for_the_whole_service_are_left_to_the_engine(tmp_path: Path) -> None:
    with running(app, tmp_path) as engine:
        child = the_projector(engine)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child, number)
        touch.submit().result(timeout=WAIT_S)
        assert the_projector(engine) == child


def test_it_does_not_outlive_an_engine_that_was_killed(tmp_path: Path) -> None:
    with Served(tmp_path, "tests.integration.test_projector_process:app") as engine:
        task_id = engine.api.submit("touch")
        engine.api.until(task_id)
        (child,) = children(engine.process.pid)
        engine.kill()
        eventually(lambda: not is_running(child), "it ended")
