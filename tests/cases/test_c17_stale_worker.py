"""C17: a worker that wakes up after its attempt was given to another one changes nothing.

Chosen: what is stale is ignored by the shard and counted (`stale_reports`), and the worker is told to stop (a revoke),
instead of an answer to each report. The fencing token is the attempt's number, not the worker's name; names are
unique to each start of a process all the same, since a heartbeat speaks for all that a worker runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from scheduler.core.shard import Shard, ShardSettings
from scheduler.ports import TopicPartition
from schemas.codec import Codec
from schemas.messages import (
    AttemptCancelled,
    AttemptCheckpointed,
    AttemptCrashed,
    AttemptFailed,
    AttemptReturned,
    AttemptSnoozed,
    AttemptStarted,
    AttemptSucceeded,
    ErrorKind,
    Report,
    RunningAttempt,
    SignalKind,
    Status,
    Task,
    TaskError,
    WorkerHeartbeat,
    WorkerSignal,
)
from schemas.topics import WORKER_SIGNALS
from tests.cases.shard_stage import START, ShardStage
from tests.harness import Api, eventually, history, live_in, report, running
from tidewheel import Engine
from tidewheel.parts import process_name

QUICK = ShardSettings(worker_timeout_us=200_000)
ERROR = TaskError(kind=ErrorKind.RAISED, type="ValueError", message="too late")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(None, port=0, shard=QUICK) as engine:
        yield engine


@pytest.fixture(scope="module")
def api(engine: Engine) -> Iterator[Api]:
    with Api(engine.address) as api:
        yield api


def pending(engine: Engine, task_id: str, attempt: int) -> Task:
    def stands() -> Task | None:
        task = live_in(engine).get(task_id)
        return task if task and (task.status, task.attempt) == (Status.PENDING, attempt - 1) else None

    found = eventually(stands, f"attempt {attempt} pending")
    assert found is not None
    return found


def start(engine: Engine, task_id: str, attempt: int, worker_id: str) -> None:
    task, now = pending(engine, task_id, attempt), engine.clock.now_us()
    started = AttemptStarted(
        task_id=task_id, task_version=task.version, attempt=attempt, worker_id=worker_id, started_at=now
    )
    report(engine, task_id, started)
    eventually(lambda: live_in(engine)[task_id].status is Status.RUNNING, "the start")


def late(task_id: str, worker_id: str) -> list[Report]:
    """All that A can say of its attempt after its lease was given away; its heartbeat is apart."""
    about: dict[str, Any] = {"task_id": task_id, "attempt": 1, "worker_id": worker_id}
    return [
        AttemptSucceeded(**about, finished_at=1, result=b'"old"'),
        AttemptFailed(**about, finished_at=1, error=ERROR),
        AttemptReturned(**about, returned_at=1, is_started=True, reason="shutdown"),
        AttemptCheckpointed(**about, checkpointed_at=1, checkpoint=b"1"),
        AttemptSnoozed(**about, finished_at=1, delay_ms=1),
        AttemptCancelled(**about, finished_at=1),
        AttemptCrashed(**about, finished_at=1, detail="exit 1"),
        AttemptStarted(**about, task_version=1, started_at=1),
    ]


def stale_reports(engine: Engine) -> int:
    return sum(host.shard.stale_reports for host in engine.runtime.hosts.values())


def revokes(engine: Engine, task_id: str, worker_id: str) -> list[WorkerSignal]:
    log = engine.broker.connect()
    reader = log.reader()
    reader.seek(TopicPartition(WORKER_SIGNALS, 0), 0)
    signals = [Codec.builtin().decode(record.value or b"") for record in reader.take(10_000)]
    log.close()
    return [
        one
        for one in signals
        if isinstance(one, WorkerSignal)
        and (one.task_id, one.worker_id, one.kind) == (task_id, worker_id, SignalKind.REVOKE)
    ]


@pytest.mark.parametrize("name_of_b", ["B", "A"])
def test_what_a_stale_worker_says_changes_nothing(engine: Engine, api: Api, name_of_b: str) -> None:
    task_id = api.submit("t")
    start(engine, task_id, 1, "A")  # and it freezes
    start(engine, task_id, 2, name_of_b)
    before, events, stale = live_in(engine)[task_id], len(history(engine).of[task_id]), stale_reports(engine)
    said = late(task_id, "A")  # of which the last, a start, is answered and not counted
    if name_of_b != "A":
        running = (RunningAttempt(task_id=task_id, attempt=1),)
        report(engine, task_id, WorkerHeartbeat(worker_id="A", sent_at=1, free_slots=0, running=running))
    report(engine, task_id, *said)
    eventually(lambda: stale_reports(engine) == stale + len(said) - 1, "that they were read")
    assert live_in(engine)[task_id] == before
    assert len(history(engine).of[task_id]) == events

    new = AttemptSucceeded(task_id=task_id, attempt=2, worker_id=name_of_b, finished_at=before.updated_at, result=b"7")
    report(engine, task_id, new, *said)
    shown = api.until(task_id)
    assert (shown["status"], shown["attempts"], shown["result"]) == ("SUCCEEDED", 2, 7)
    eventually(lambda: stale_reports(engine) == stale + 2 * (len(said) - 1), "that they were read")
    raw = history(engine)
    assert raw.bodies(task_id) == ["TaskSubmitted", "TaskStarted", "TaskAttemptLost", "TaskStarted", "TaskSucceeded"]
    assert raw.tasks[task_id].crash_count == 1
    eventually(lambda: revokes(engine, task_id, "A"), "that A is told")


def test_names_are_unique_to_each_start_of_a_process() -> None:
    names = {process_name() for _ in range(1_000)}
    assert len(names) == 1_000


def test_a_lease_that_is_kept_by_heartbeats_is_not_given_away() -> None:
    """Five seconds of lease, twenty of silence; and the same with heartbeats: in virtual time."""
    for is_frozen in (True, False):
        stage = ShardStage(Shard(0, ShardSettings(), Random(17), START))
        stage.submit("t", lease_ms=5_000)
        stage.start("t", "A")
        for _ in range(10):
            stage.advance(2_000)
            if not is_frozen:
                stage.heartbeat("A", "t")
            stage.let_time_work()
        task = stage.shard.state.tasks["t"]
        assert (task.status is Status.RUNNING) == (not is_frozen)
        assert task.crash_count == (1 if is_frozen else 0)
