"""What one shard keeps right at the edges of time and memory: each a fault that was there once."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from scheduler.core.desk import Effects
from scheduler.core.shard import Shard, ShardSettings
from scheduler.core.tasks import Tasks
from schemas.messages import (
    AttemptCheckpointed,
    AttemptStarted,
    DiscardTask,
    EndedTask,
    Jitter,
    Outcome,
    RedriveTask,
    RetryPolicy,
    SignalKind,
    Status,
    SubmitTask,
    Task,
    TaskAttemptLost,
    TaskSpec,
)
from tests.cases.shard_stage import START, ShardStage

SECOND = 1_000
HOUR = 3_600 * SECOND
SETTINGS = ShardSettings()
KEY_WINDOW_MS = SETTINGS.idempotency_window_us // 1_000
KEPT_MS = SETTINGS.ended_kept_us // 1_000


def stage(settings: ShardSettings = SETTINGS) -> ShardStage:
    return ShardStage(Shard(0, settings, Random(1), START))


def submission(task_id: str, now: int, **spec: object) -> SubmitTask:
    wanted = TaskSpec(task_type="t", idempotency_key="k", **spec)  # type: ignore[arg-type]
    return SubmitTask(request_id="r", task_id=task_id, spec=wanted, submitted_at=now, fingerprint="f", reply_to=0)


def outcome(effects: Effects) -> Outcome:
    (_, reply), *_ = effects.replies
    return reply.outcome


def end(at: ShardStage, task_id: str) -> EndedTask:
    at.start(task_id)
    at.succeed(task_id)
    known = at.shard.known(task_id)
    assert isinstance(known, EndedTask)
    return known


def test_a_key_used_anew_survives_a_checkpoint_that_still_has_the_old_task() -> None:
    at = stage()
    at.request(submission("key-a", at.now))
    old = end(at, "key-a")
    at.advance(KEY_WINDOW_MS + 1)
    at.let_time_work()
    second = at.request(submission("key-a", at.now))
    assert outcome(second) is Outcome.ACCEPTED
    reloaded = Shard(0, SETTINGS, Random(1), START)
    reloaded.restore(old)  # the checkpoint from before it was forgotten
    for event in second.events:
        reloaded.evolve(event)
    assert reloaded.state.tasks == at.shard.state.tasks
    assert "key-a" in reloaded.state.tasks and not reloaded.state.ended


def test_a_key_is_free_again_at_its_time_whoever_else_is_remembered() -> None:
    at = stage()
    at.request(submission("key-early", at.now, scheduled_at=at.now + 20 * HOUR * 1_000))
    at.advance(19 * HOUR)
    at.request(submission("key-late", at.now))
    end(at, "key-late")
    at.advance(1 * HOUR)
    at.let_time_work()
    end(at, "key-early")
    at.advance(4 * HOUR + 1)
    at.let_time_work()
    assert at.shard.known("key-early") is None
    assert isinstance(at.shard.known("key-late"), EndedTask)
    assert outcome(at.request(submission("key-late", at.now))) is Outcome.DUPLICATE
    assert outcome(at.request(submission("key-early", at.now))) is Outcome.ACCEPTED


def test_a_discard_at_the_last_moment_is_remembered_long_enough() -> None:
    at = stage()
    at.submit("a", retry=replace(TaskSpec(task_type="t").retry, max_attempts=1))
    at.start("a")
    shown = at.task("a")
    at.fail("a")
    dead = at.shard.known("a")
    assert isinstance(dead, EndedTask) and dead.status is Status.DEAD
    shown = replace(shown, status=Status.DEAD, version=dead.version)
    before_discard = len(at.events)
    at.advance(KEPT_MS - 1)
    at.request(DiscardTask(request_id="r", task=shown, view_offset=before_discard, reply_to=0))
    at.advance(2)
    at.let_time_work()
    stale = RedriveTask(request_id="r", task=shown, view_offset=before_discard, reply_to=0)
    assert outcome(at.request(stale)) is Outcome.VIEW_BEHIND
    at.advance(KEPT_MS)
    at.let_time_work()
    assert at.shard.known("a") is None
    assert outcome(at.request(stale)) is Outcome.VIEW_BEHIND


def test_a_process_that_stood_still_does_not_blame_its_workers() -> None:
    at = stage()
    at.submit("a")
    at.start("a")
    at.advance(60 * SECOND)  # suspended: nothing was read and nothing could be
    at.shard.excuse_silence(at.now)
    at.let_time_work()
    assert at.task("a").status is Status.RUNNING
    at.advance(SETTINGS.worker_timeout_us // 1_000 + 1)
    at.let_time_work()
    assert isinstance(at.events[-1].body, TaskAttemptLost)


def test_workers_are_told_of_a_ready_record_whose_task_expired() -> None:
    at = stage()
    at.submit("a", start_deadline_at=at.now + 5_000_000)
    assert [ready.task_id for _, ready in at.shard.dispatch(at.now, lambda *_: 1)] == ["a"]
    at.advance(6 * SECOND)
    effects = at.shard.fire_timers(at.now)
    assert [signal.kind for signal in effects.signals] == [SignalKind.REVOKE]
    assert at.shard.known("a").status is Status.FAILED  # type: ignore[union-attr]


def test_the_attempt_s_time_runs_from_when_its_start_was_accepted() -> None:
    at = stage()
    at.submit("a", timeout_ms=1_000)
    at.start("a", started_at=at.now - 3_600_000_000)  # by the clock of a worker that is an hour late
    at.advance(1 * SECOND)
    at.let_time_work()
    assert at.task("a").status is Status.RUNNING


def test_a_doubled_event_does_not_move_the_inputs_back() -> None:
    at = stage()
    first, second = at.submit("a"), at.submit("b")
    at.shard.evolve(first.events[0])
    assert at.shard.state.positions["task-requests"] == second.events[0].source_offset + 1  # type: ignore[operator]


def test_a_full_shard_says_so() -> None:
    at = stage(ShardSettings(tasks_max=2, ended_max=1))
    assert outcome(at.request(submission("key-1", at.now))) is Outcome.ACCEPTED
    assert outcome(at.submit("b")) is Outcome.ACCEPTED
    assert outcome(at.submit("c")) is Outcome.OVERLOADED
    end(at, "key-1")
    assert outcome(at.request(submission("key-2", at.now))) is Outcome.OVERLOADED
    assert outcome(at.submit("c")) is Outcome.ACCEPTED


def test_a_task_is_always_known_as_one_or_the_other() -> None:
    at = stage()
    at.submit("a")
    at.start("a")
    seen: list[Task | EndedTask | None] = []
    tasks = at.shard.state.tasks

    class Watching(Tasks):
        def pop(self, task_id: str, *default: object) -> object:  # type: ignore[override]
            seen.append(at.shard.state.ended.get(task_id))
            return super().pop(task_id, *default)

    at.shard.state.tasks = Watching()
    at.shard.state.tasks.update(tasks)
    at.succeed("a")
    assert [known.status for known in seen if known] == [Status.SUCCEEDED]


def test_all_that_workers_are_told_bears_the_owner_s_epoch() -> None:
    """By it they know the words of an owner that another one has followed."""
    at = stage()
    at.shard.state.epoch = 7
    for task_id in ("void", "running", "late"):
        at.submit(task_id)
    ready = [ready for _, ready in at.shard.dispatch(at.now, lambda *_: 1)]
    at.start("running")
    late = replace(started(at, "late"), task_version=0)
    told = [
        *at.cancel("void").signals,
        *at.cancel("running").signals,
        *at.tell(late).signals,
        *at.heartbeat("w", "running").signals,
        *at.heartbeat("other", "running").signals,
    ]
    assert [signal.task_id for signal in told] == ["void", "running", "late", "running", "running"]
    assert {one.epoch for one in ready} | {one.epoch for one in told} == {7}


def started(at: ShardStage, task_id: str) -> AttemptStarted:
    task = at.task(task_id)
    return AttemptStarted(task_id=task_id, task_version=task.version, attempt=1, worker_id="w", started_at=at.now)


def test_what_stays_in_memory_until_a_far_retry_does_not_keep_the_wheel_from_being_read() -> None:
    at = stage(ShardSettings(near_max=2))
    for task_id in ("a", "b"):
        at.submit(task_id, retry=RetryPolicy(jitter=Jitter.NONE, delay_ms=24 * HOUR, cap_ms=24 * HOUR))
        at.start(task_id)
        assert at.shard.is_crowded() == (task_id == "b")
        at.tell(
            AttemptCheckpointed(task_id=task_id, attempt=1, worker_id="w", checkpointed_at=at.now, checkpoint=b"half")
        )
    for task_id in ("a", "b"):
        at.fail(task_id)
    assert not at.shard.is_crowded()
    at.submit("c")
    at.submit("d")
    assert at.shard.is_crowded()


def test_what_ended_while_the_wheel_cannot_be_read_has_a_bound() -> None:
    at = stage(ShardSettings(near_max=1, ended_max=3))
    assert outcome(at.submit("waits")) is Outcome.ACCEPTED
    at.advance(HOUR)
    for number in range(3):
        at.submit(f"t{number}")
        end(at, f"t{number}")
    at.let_time_work()
    at.advance(2 * KEPT_MS)
    at.let_time_work()
    refused = at.submit("t4")
    assert outcome(refused) is Outcome.OVERLOADED
    assert "delay wheel" in (refused.replies[0][1].detail or "")


def test_a_view_that_lags_cannot_redrive_again_what_waits_in_the_wheel_since() -> None:
    at = stage()
    at.submit("a", retry=RetryPolicy(max_attempts=1))
    at.start("a")
    running = at.task("a")
    at.fail("a")
    dead = at.shard.known("a")
    assert dead is not None
    policy = RetryPolicy(jitter=Jitter.NONE, delay_ms=24 * HOUR, cap_ms=24 * HOUR)
    shown = replace(running, status=Status.DEAD, version=dead.version, spec=replace(running.spec, retry=policy))
    redrive = RedriveTask(request_id="r", task=shown, view_offset=len(at.events), reply_to=0)
    at.advance(SECOND)
    assert outcome(at.request(redrive)) is Outcome.ACCEPTED
    at.start("a")
    at.fail("a")
    (record,) = at.shard.to_park(10)
    at.shard.parked(record, at.now)
    at.advance(KEPT_MS)
    at.let_time_work()
    assert at.shard.known("a") is None
    assert outcome(at.request(redrive)) is Outcome.VIEW_BEHIND
