"""Which partition a request belongs to: as Kafka's own clients say."""

from __future__ import annotations

import pytest

from scheduler.core.routing import entity_id_of, home_of, identified
from schemas.ids import is_name, keyed_task_id, murmur2, record_task_id, shard_of
from schemas.messages import CancelTask, SubmitTask, TaskSpec

# Of the Java client's own tests of its hash.
VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", VECTORS)
def test_the_hash_is_that_of_kafkas_default_partitioner(key: bytes) -> None:
    assert murmur2(key) == VECTORS[key] & 0xFFFF_FFFF


def submission(task_id: str | None, key: str | None = None) -> SubmitTask:
    spec = TaskSpec(task_type="t", idempotency_key=key)
    return SubmitTask(request_id="r", spec=spec, submitted_at=0, task_id=task_id)


def test_a_submission_without_an_id_gets_that_of_its_key_or_else_of_its_place() -> None:
    place = ("task-requests", 1, 2)
    assert entity_id_of(identified(submission(None), *place)) == record_task_id(*place)
    assert entity_id_of(identified(submission(None, "k"), *place)) == keyed_task_id("default", "k")
    assert entity_id_of(identified(submission("mine", "k"), *place)) == "mine"
    ids = {record_task_id("task-requests", partition, offset) for partition in range(20) for offset in range(20)}
    assert len(ids) == 400 and all(map(is_name, ids))


def test_what_is_no_name_is_refused_where_it_stands() -> None:
    assert {home_of(f"task-{n}", 0, 4) for n in range(50)} == {0, 1, 2, 3}
    assert home_of("a.b", 0, 4) == shard_of("a", 4)
    for text in ("", "no name", "ü", "x" * 129):
        assert home_of(entity_id_of(CancelTask(request_id="r", task_id=text)), 3, 4) == 3
