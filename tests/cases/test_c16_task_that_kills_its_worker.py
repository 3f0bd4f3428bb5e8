"""C16: a task that kills its process is started three times, then it is DEAD and says which worker was lost.

Chosen: attempts that end without a word of their handler are counted apart from failures (`crash_count`, limit
`max_crashes`, 3 by default) and are repeated at once; a worker that was stopped in order gives its attempts back, which
counts as neither (outcome `returned`). A start counts once it is in the log, a few milliseconds after it was made. A
task that takes scheduler and worker down before that is run once more, uncounted: what was pending when its shard was
loaded is suspect, and starts only when its start is in the log.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import httpx
import pytest

from tests.harness import Served, eventually, history, notes, running
from tests.pooled_app import app as pooled
from tests.pooled_app import kill, write
from tidewheel import TaskFailed

OTHERS = 50


def test_a_process_of_the_pool_dies_with_its_task_and_nobody_else_does(tmp_path: Path) -> None:
    journal = tmp_path / "journal.txt"
    with running(pooled, app="tests.pooled_app:app") as engine:
        deadly = kill.submit(str(journal))
        others = write.submit_many({"journal": str(journal), "text": f"other-{n}"} for n in range(OTHERS))
        with pytest.raises(TaskFailed, match=r"DEAD.*tidewheel\.AttemptLost.*was killed by SIGKILL"):
            deadly.result(30)
        assert [other.result(30) for other in others] == [f"other-{n}" for n in range(OTHERS)]
        info = deadly.info()
        raw = history(engine)
        assert raw.starts(deadly.task_id) == [1, 2, 3]
    assert [line for line in notes(journal) if line.startswith("killing")] == ["killing 1", "killing 2", "killing 3"]
    assert sorted(line for line in notes(journal) if line.startswith("other")) == sorted(
        f"other-{n} 1" for n in range(OTHERS)
    )
    assert (info.status, info.attempts, info.crash_count, info.is_dead_letter) == ("DEAD", 3, 3, True)
    assert [one.outcome for one in info.attempt_history] == ["lost"] * 3
    assert info.error is not None and info.error.kind == "lost"
    assert info.attempt_history[2].worker_id is not None
    assert f"attempt 3 on worker {info.attempt_history[2].worker_id}" in info.error.message


def test_the_count_survives_scheduler_and_worker(tmp_path: Path) -> None:
    """The task takes down the worker together with the scheduler; each start of them goes on counting."""
    journal = tmp_path / "journal.txt"
    served = Served(tmp_path / "data", "tests.process_app:app", shard={"worker_timeout_us": 400_000})
    with served:
        others = [
            served.api.submit("note", {"journal": str(journal), "text": f"other-{n}"}, delay_seconds=0.5)
            for n in range(OTHERS)
        ]
        deadly = served.api.submit("kill", {"journal": str(journal)}, delay_seconds=0.5)
        for attempt in (1, 2, 3):
            assert served.ended() == -9
            assert [line for line in notes(journal) if line.startswith("killing")][-1] == f"killing {attempt}"
            served.start()
        shown = served.api.until(deadly)
        for other in others:
            assert served.api.until(other)["status"] == "SUCCEEDED"
    assert [line for line in notes(journal) if line.startswith("killing")] == ["killing 1", "killing 2", "killing 3"]
    assert (shown["status"], shown["attempts"], shown["crash_count"]) == ("DEAD", 3, 3)
    workers = [one["worker_id"] for one in shown["attempt_history"]]
    assert len(set(workers)) == 3
    assert f"worker {workers[2]}: its worker was silent" in shown["error"]["message"]
    raw = history(tmp_path / "data")
    assert raw.starts(deadly) == [1, 2, 3]
    assert raw.bodies(deadly).count("TaskAttemptLost") == 3
    assert not raw.live()


def test_one_that_dies_before_its_start_can_be_known_has_one_uncounted_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal.txt"
    served = Served(tmp_path / "data", "tests.process_app:app", shard={"worker_timeout_us": 400_000})
    with served:
        deadly = served.api.submit("kill_at_once", {"journal": str(journal)}, delay_seconds=0.5)
        while not _outlives(served, deadly):
            assert served.ended() == -9
            assert len(notes(journal)) <= 4
            with contextlib.suppress(AssertionError):  # it may die before it can say that it is ready
                served.start()
        shown = served.api.until(deadly)
    assert (shown["status"], shown["attempts"], shown["crash_count"]) == ("DEAD", 3, 3)
    assert notes(journal) in (
        ["killing 1", "killing 2", "killing 3"],
        ["killing 1", "killing 1", "killing 2", "killing 3"],
    )


def _outlives(served: Served, task_id: str) -> bool:
    """Wait for the end of the process, or of the task; whether it was the task's."""

    def is_over() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return bool(served.api.task(task_id)["status"] == "DEAD")
        return False

    eventually(lambda: served.process.poll() is not None or is_over())
    return served.process.poll() is None


def test_a_worker_that_was_stopped_in_order_is_told_apart(tmp_path: Path) -> None:
    journal, gate = tmp_path / "journal.txt", tmp_path / "gate"
    with Served(tmp_path / "data", "tests.process_app:app", grace_s=0) as served:
        task_id = served.api.submit("hold", {"journal": str(journal), "gate": str(gate)})
        eventually(lambda: notes(journal), "its start")
        served.send(signal.SIGTERM)
        assert served.ended() == 0
        gate.touch()
        served.start()
        shown = served.api.until(task_id)
    assert (shown["status"], shown["attempts"], shown["crash_count"]) == ("SUCCEEDED", 2, 0)
    assert [one["outcome"] for one in shown["attempt_history"]] == ["returned", "succeeded"]
    assert "shutdown" in shown["attempt_history"][0]["error"]["message"]
