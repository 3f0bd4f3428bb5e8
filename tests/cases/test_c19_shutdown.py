"""C19: what a worker does with its tasks when it is told to stop.

Chosen: a task that was stopped at the end of the grace and given back goes on at once on another worker as its next
attempt; that counts neither as a failure nor as a crash. A second SIGTERM shortens the grace to nothing. A process that
stopped in order exits with 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import History, Served, Working, eventually, history, notes

APP = "tests.process_app:app"
RUNNING, WAITING = 2, 8


class Stage(NamedTuple):
    """A scheduler without a worker, over a folder; tasks run until there is a gate."""

    served: Served
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def worker(self, grace: str, slots: int = RUNNING) -> Working:
        return Working(self.data, APP, slots=slots, grace=grace)

    def submit(self, count: int) -> list[str]:
        payload = {"journal": str(self.folder / "journal.txt"), "gate": str(self.gate)}
        return [self.served.api.submit("hold", payload) for _ in range(count)]

    def noted(self, what: str) -> list[str]:
        return [line for line in notes(self.folder / "journal.txt") if line.startswith(what)]

    def ended(self, ids: list[str]) -> tuple[dict[str, Any], History]:
        """How the tasks ended; never were two attempts of one task under way at once."""
        shown = {task_id: self.served.api.until(task_id) for task_id in ids}
        assert {one["status"] for one in shown.values()} == {"SUCCEEDED"}
        under_way: set[str] = set()
        for line in self.noted(""):
            what, task_id, _ = line.split()
            assert (what == "end") == (task_id in under_way), line
            under_way ^= {task_id}
        assert not under_way
        self.served.kill()
        raw = history(self.data)
        assert all(raw.tasks[task_id].failure_count == raw.tasks[task_id].crash_count == 0 for task_id in ids)
        return shown, raw


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Served(tmp_path / "data", APP, has_worker=False) as served:
        yield Stage(served, tmp_path)


def test_within_the_grace_what_runs_ends_and_the_rest_starts_elsewhere(stage: Stage) -> None:
    with stage.worker("30s") as ending:
        ids = stage.submit(RUNNING + WAITING)
        eventually(lambda: len(stage.noted("begin")) == RUNNING, "what runs")
        ending.send(signal.SIGTERM)
        with stage.worker("30s", slots=WAITING) as other:
            eventually(lambda: len(stage.noted("begin")) == RUNNING + WAITING, "the starts on the other worker")
            stage.gate.touch()
            assert ending.ended() == 0
            shown, raw = stage.ended(ids)
    assert [raw.starts(task_id) for task_id in ids] == [[1]] * len(ids)
    ended_by = [shown[task_id]["worker_id"] for task_id in ids]
    assert (ended_by.count(ending.worker_id), ended_by.count(other.worker_id)) == (RUNNING, WAITING)


@pytest.mark.parametrize("is_second_signal", [False, True])
def test_after_the_grace_what_runs_is_handed_back(stage: Stage, is_second_signal: bool) -> None:
    with stage.worker("30s" if is_second_signal else "0.3s") as ending:
        ids = stage.submit(RUNNING)
        eventually(lambda: len(stage.noted("begin")) == RUNNING, "what runs")
        ending.send(signal.SIGTERM)
        if is_second_signal:
            ending.send(signal.SIGINT)  # means the same; the kernel may merge two of one kind
        assert ending.ended() == 0
        for task_id in ids:
            assert stage.served.api.task(task_id)["attempt_history"][0]["outcome"] == "returned"
    with stage.worker("30s"):
        eventually(lambda: len(stage.noted("begin")) == 2 * RUNNING, "the next attempts")
        stage.gate.touch()
        shown, raw = stage.ended(ids)
    for task_id in ids:
        assert raw.starts(task_id) == [1, 2]
        first, second = shown[task_id]["attempt_history"]
        assert (first["outcome"], second["outcome"]) == ("returned", "succeeded")
        assert "shutdown" in first["error"]["message"]


def test_a_process_1_reacts_to_sigterm(stage: Stage) -> None:
    """The kernel gives process 1 of a container only the signals that it has handlers for."""
    assert stage.served.handles(signal.SIGTERM) and stage.served.handles(signal.SIGINT)
    with stage.worker("30s") as worker:
        assert worker.handles(signal.SIGTERM) and worker.handles(signal.SIGINT)
        worker.send(signal.SIGTERM)
        assert worker.ended() == 0
    stage.served.send(signal.SIGTERM)
    assert stage.served.ended() == 0


def test_scheduler_and_worker_in_one_process_end_in_order(tmp_path: Path) -> None:
    with Served(tmp_path / "data", APP, slots=RUNNING) as served:
        stage = Stage(served, tmp_path)
        ids = stage.submit(RUNNING + WAITING)
        eventually(lambda: len(stage.noted("begin")) == RUNNING, "what runs")
        served.send(signal.SIGTERM)
        stage.gate.touch()
        assert served.ended() == 0
        assert len(stage.noted("end")) == len(stage.noted("begin"))
        served.start()
        _, raw = stage.ended(ids)
    assert [raw.starts(task_id) for task_id in ids] == [[1]] * len(ids)
