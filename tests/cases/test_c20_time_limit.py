"""C20: a time limit ends what runs, whatever it does, and its slot is free again.

Chosen: what must be ended whatever it does runs with `executor="process"`: at its limit the process group is sent
SIGTERM, half a second later SIGKILL. The attempt fails with an error of kind `timeout`, and is repeated by policy. A
thread cannot be killed: its attempt is over, its slot is filled anew, and it runs on as `abandoned` (tests/unit).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.harness import eventually, history, notes, running
from tests.pooled_app import app, blocked, busy, just_in_time, swallowing, with_child, write
from tidewheel import Engine, Retry

LIMIT_S = 0.3
BODIES = {"busy": busy, "blocked": blocked, "swallowing": swallowing, "with-child": with_child}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(app, app="tests.pooled_app:app", slots=1) as engine:
        yield engine


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status


@pytest.mark.parametrize("body", BODIES)
def test_it_is_over_and_gone_and_the_next_one_starts(engine: Engine, tmp_path: Path, body: str) -> None:
    journal = tmp_path / "journal.txt"
    task_id = BODIES[body].options(timeout=LIMIT_S, retry=Retry(2, delay=0.0)).submit(str(journal)).task_id
    eventually(lambda: notes(journal), "its start")
    behind = write.submit(str(journal), "behind")
    assert behind.result(30) == "behind"
    shown = app.backend.wait(task_id, 30).run()
    assert (shown.status, shown.attempts, shown.crash_count) == ("DEAD", 2, 0)
    for attempt in shown.attempt_history:
        assert attempt.error is not None and attempt.error.kind == "timeout"
        assert attempt.started_at is not None and attempt.finished_at is not None
        took = datetime.fromisoformat(attempt.finished_at) - datetime.fromisoformat(attempt.started_at)
        assert took.total_seconds() >= LIMIT_S  # how much more is said in virtual time, in test_worker_runtime.py
    pids = [int(line.split()[1]) for line in notes(journal) if line.startswith("pid")]
    assert len(pids) == 2
    eventually(lambda: not any(map(is_alive, pids)), "the end of its processes")
    raw = history(engine)
    assert raw.bodies(task_id)[-1] == "TaskAttemptFailed"
    assert os.getpid() not in pids


def test_what_ends_at_the_limit_has_one_outcome(engine: Engine) -> None:
    limit = 0.1
    seconds = [limit - 0.004 + 0.002 * n for n in range(5)]
    handles = [just_in_time.options(timeout=limit, retry=Retry(1)).submit(one) for one in seconds]
    for handle in handles:
        shown = app.backend.wait(handle.task_id, 30).run()
        assert shown.status in ("SUCCEEDED", "DEAD")
        assert shown.has_result == (shown.error is None) == (shown.status == "SUCCEEDED")
        assert len(history(engine).bodies(handle.task_id)) == 3
