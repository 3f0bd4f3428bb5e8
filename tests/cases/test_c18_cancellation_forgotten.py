"""C18: what was cancelled never starts, whoever was down meanwhile.

Chosen: a cancel is an event of the task, so it is durable before it is answered and no list of ids is kept anywhere;
cancelling a task in the dead-letter queue is refused (409), as for every task that ended otherwise; there is no cancel
by filter; a task that was cancelled is remembered by its shard for 30 s, like every other that ended.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from scheduler.core.shard import Shard, ShardSettings
from schemas.messages import Outcome, Status
from tests.cases.shard_stage import START, ShardStage
from tests.harness import TASKS, Api, Served, another_worker, eventually, history, notes, running
from tidewheel import App, NotSubmitted, Retry, TaskFailed, TaskWasCancelled


def test_what_was_cancelled_without_workers_does_not_start_when_they_come(tmp_path: Path) -> None:
    """(a), and (b) without a restart in between."""
    app, started = App(), []

    @app.task(name="mark")
    async def mark(name: str) -> None:
        started.append(name)

    data = tmp_path / "data"
    with running(app, data, has_worker=False) as engine:
        queued, later = mark.submit("queued"), mark.options(delay=2).submit("later")
        for handle in (queued, later):
            first, second = handle.cancel("not needed"), handle.cancel()
            assert first.status == second.status == Status.CANCELLED
            assert first == second
        sentinel = mark.options(delay=2.5).submit("sentinel")
    with running(app, data) as engine:
        app.handle(sentinel.task_id).result(20)
        assert started == ["sentinel"]
        for cancelled in (queued, later):
            with pytest.raises(TaskWasCancelled, match="not needed"):
                app.handle(cancelled.task_id).result(5)
            assert history(engine).bodies(cancelled.task_id) == ["TaskSubmitted", "TaskCancelled"]


def test_what_ended_unstarted_does_not_start_when_a_worker_joins_later() -> None:
    """(a): the scheduler runs on, as when workers are deployed anew; ready records of the tasks still wait."""
    app, started = App(), []

    @app.task(name="mark")
    async def mark(name: str) -> None:
        started.append(name)

    with running(app, has_worker=False) as engine:
        cancelled, wanted = mark.submit("cancelled"), mark.submit("wanted")
        expired = mark.options(start_deadline=datetime.now(UTC) + timedelta(seconds=0.3)).submit("expired")
        assert cancelled.cancel("not needed").status == Status.CANCELLED
        eventually(lambda: expired.info().status == Status.FAILED, "the end of what is too late")
        with another_worker(engine, app) as worker:
            wanted.result(20)
            mark.submit("afterwards").result(20)
        assert started == ["wanted", "afterwards"]
        assert worker.stats.returned == 3
        for handle in (cancelled, expired):
            assert history(engine).starts(handle.task_id) == []


def test_what_was_cancelled_stays_so_after_a_kill(tmp_path: Path) -> None:
    """(b) and (c): a delayed task and one that waits for its retry; all is killed as soon as the answer is there."""
    journal = tmp_path / "journal.txt"
    with Served(tmp_path / "data", "tests.process_app:app") as served:
        api = served.api
        delayed = api.submit("note", {"journal": str(journal), "text": "delayed"}, delay_seconds=0.5)
        retrying = api.submit("fail", {"journal": str(journal)}, retry_delay_seconds=0.5, retry_jitter="none")
        sentinel = api.submit("note", {"journal": str(journal), "text": "sentinel"}, delay_seconds=1.5)
        api.until(retrying, "RETRYING")
        for task_id in (delayed, retrying):
            assert api("POST", f"{TASKS}/{task_id}/cancel").json()["status"] == "CANCELLED"
        served.kill()
        served.start()
        api = served.api
        assert api.until(sentinel)["status"] == "SUCCEEDED"
        for task_id in (delayed, retrying):
            assert api.until(task_id)["status"] == "CANCELLED"
            assert api("POST", f"{TASKS}/{task_id}/cancel").json()["status"] == "CANCELLED"
    assert notes(journal) == ["failing 1", "sentinel 1"]
    raw = history(tmp_path / "data")
    assert raw.bodies(retrying) == ["TaskSubmitted", "TaskStarted", "TaskAttemptFailed", "TaskCancelled"]


def test_a_dead_letter_is_not_cancelled_but_discarded() -> None:
    """(d)."""
    app = App()

    @app.task(name="fail", retry=Retry(1))
    async def fail() -> None:
        raise ConnectionError("refused")

    with running(app, port=0) as engine, Api(engine.address) as api:
        handle = fail.submit()
        with pytest.raises(TaskFailed):
            handle.result(20)
        answer = api("POST", f"{TASKS}/{handle.task_id}/cancel")
        assert (answer.status_code, answer.json()["task_status"]) == (409, "DEAD")
        with pytest.raises(NotSubmitted, match="DEAD"):
            handle.cancel()
        assert api.task(handle.task_id)["is_dead_letter"]


def test_cancelled_tasks_are_not_collected_in_memory() -> None:
    """(e): ten thousand of them in every waiting status leave nothing behind."""
    stage = ShardStage(Shard(0, ShardSettings(), Random(18), START))
    for number in range(10_000):
        task_id = f"t{number}"
        stage.submit(task_id, scheduled_at=stage.now + 60_000_000 if number % 3 == 0 else None)
        if number % 3 == 1:
            stage.start(task_id)
            stage.fail(task_id)
    for number in range(10_000):
        effects = stage.cancel(f"t{number}")
        assert effects.replies[0][1].outcome is Outcome.ACCEPTED
    assert stage.cancel("t0").replies[0][1].status is Status.CANCELLED
    stage.advance(60_000)
    stage.let_time_work()
    assert not any(stage.shard.memory().values()), stage.shard.memory()


def test_the_worker_does_not_hold_delayed_tasks() -> None:
    """A delayed task is sent to a worker when it is due, so that no worker can start a cancelled one."""
    stage = ShardStage(Shard(0, ShardSettings(), Random(18), START))
    stage.submit("later", scheduled_at=stage.now + 60_000_000)
    stage.submit("retrying")
    stage.start("retrying")
    stage.fail("retrying")
    assert stage.shard.dispatch(stage.now, lambda _queue, _priority: 1) == []
