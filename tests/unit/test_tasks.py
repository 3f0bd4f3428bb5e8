"""The live tasks of a shard: packed or not, they read the same."""

from __future__ import annotations

from random import Random
from typing import Any

from scheduler.core.shard import Shard, ShardSettings
from scheduler.core.tasks import Tasks
from schemas.messages import Outcome, Priority, Status, Task, TaskSpec, UpdateTask
from tests.cases.shard_stage import START, ShardStage


def task(task_id: str, payload: bytes = b"{}", checkpoint: bytes | None = None) -> Task:
    return Task(
        task_id=task_id,
        spec=TaskSpec(task_type="mail.send", payload=payload),
        status=Status.PENDING,
        version=1,
        created_at=1,
        updated_at=1,
        checkpoint=checkpoint,
    )


def test_it_is_a_mapping_whatever_is_packed() -> None:
    """Against a plain dict, over random steps."""
    seed = Random().getrandbits(32)
    print("seed", seed)  # noqa: T201
    rng, tasks, model = Random(seed), Tasks(), dict[str, Task]()
    for _ in range(5_000):
        task_id, step = str(rng.randrange(40)), rng.random()
        if step < 0.4:
            tasks[task_id] = model[task_id] = task(task_id, rng.randbytes(rng.randrange(50)), rng.choice([None, b"c"]))
        elif step < 0.7 and task_id in model:
            tasks.pack(task_id)
        elif step < 0.8:
            assert tasks.pop(task_id, None) == model.pop(task_id, None)
        assert tasks.get(task_id) == model.get(task_id)
        assert (task_id in tasks, len(tasks)) == (task_id in model, len(model))
    assert tasks == model and list(tasks.snapshot()) == list(tasks.values())
    for task_id in list(model):
        del tasks[task_id]
    assert (tasks.packed, tasks.bytes) == (0, 0)


def test_bytes_are_those_of_payloads_and_checkpoints_and_of_what_is_packed() -> None:
    tasks = Tasks()
    tasks["a"] = task("a", b"x" * 1_000, b"y" * 100)
    assert tasks.bytes == 1_100
    tasks.pack("a")
    assert tasks.packed == 1 and 1_100 < tasks.bytes < 1_300
    tasks["a"] = task("a", b"x")
    assert (tasks.packed, tasks.bytes) == (0, 1)


def crowd(count: int, unpacked_max: int = 3) -> ShardStage:
    at = stage(unpacked_max=unpacked_max)
    for number in range(count):
        at.submit(f"t{number:02d}")
    return at


def stage(**settings: Any) -> ShardStage:
    return ShardStage(Shard(0, ShardSettings(**settings), Random(1), START))


def test_a_backlog_is_packed_but_for_the_first_and_goes_out_in_its_order() -> None:
    at = crowd(10)
    assert at.shard.state.tasks.packed == 7
    sent = sent_by(at.shard, at.now)
    assert sent == [f"t{number:02d}" for number in range(10)]
    for task_id in sent:
        at.start(task_id)
    assert at.shard.state.tasks.packed == 0
    for task_id in sent:
        at.succeed(task_id)
    assert at.shard.state.tasks.bytes == 0


def test_a_packed_task_is_cancelled_updated_and_loaded_like_any_other() -> None:
    at = crowd(10)
    at.cancel("t09")
    at.request(UpdateTask(request_id="r", task_id="t08", priority=Priority.HIGH))
    assert at.shard.known("t09").status is Status.CANCELLED  # type: ignore[union-attr]
    assert at.task("t08").spec.priority is Priority.HIGH
    loaded = Shard(0, ShardSettings(unpacked_max=3), Random(1), START)
    for one in at.shard.state.tasks.snapshot():
        loaded.restore(one)
    assert loaded.state.tasks.packed == 6
    loaded.on_loaded(at.now, -1)
    assert loaded.state.tasks == at.shard.state.tasks
    in_order = [f"t{number:02d}" for number in range(8)]
    for shard in (loaded, at.shard):
        sent = sent_by(shard, at.now)
        assert "t08" in sent[:3] and [one for one in sent if one != "t08"] == in_order


def sent_by(shard: Shard, now: int) -> list[str]:
    return [ready.task_id for _, ready in shard.dispatch(now, lambda *_: 1)]


def test_payloads_have_a_bound() -> None:
    at = stage(tasks_bytes_max=100)
    at.submit("big", payload=b"x" * 100)
    (_, refusal), *_ = at.submit("more").replies
    assert (refusal.outcome, refusal.detail) == (Outcome.OVERLOADED, "the tasks of the shard have 100 bytes")
    assert at.shard.is_crowded()
    at.cancel("big")
    (_, taken), *_ = at.submit("more").replies
    assert taken.outcome is Outcome.ACCEPTED and not at.shard.is_crowded()
