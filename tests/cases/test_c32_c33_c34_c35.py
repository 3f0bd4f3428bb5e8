"""C32 to C35: records that cannot be decoded, null values, records above the size limit, old and new schemas together.

Chosen: what cannot be taken from an input topic is decided like any other input, by an event that holds its bytes, and
then stands on `task-requests-invalid`, at least once; the input's partition goes on. No checkpoint passes the event
before. What a registry does not tell now is not invalid: the topic waits. A key is for routing only, so that a null key
is as good as any. All of it runs on both engines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import Any

import fastavro
import pytest

from infra.registry import RegistryIds
from schemas.catalog import newest
from schemas.codec import Codec
from schemas.ids import record_task_id, shard_of
from schemas.limits import CHECKPOINT_MAX, PAYLOAD_MAX
from schemas.messages import (
    AttemptCheckpointed,
    AttemptStarted,
    CancelTask,
    DiscardTask,
    ForwardedRequest,
    Priority,
    RedriveTask,
    RequestForwarded,
    RetryPolicy,
    Status,
    SubmitTask,
    Task,
    TaskRejected,
    TaskSpec,
    TaskSubmitted,
    UpdateTask,
    WorkerHeartbeat,
)
from schemas.topics import TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS
from tests.cases.topics_stage import ENGINES, TopicsStage, staged
from tests.unit.test_registry import Registry, served

CODEC = Codec.builtin()
FOREIGN, LATE = 77, 78  # ids of a registry

SHARDS = 3

pytestmark = pytest.mark.parametrize("engine", ENGINES)


def submission(task_id: str | None, *, reply_to: int | None = None, **spec: Any) -> bytes:
    """The bytes of a submission."""
    request = SubmitTask(
        request_id="r",
        task_id=task_id,
        submitted_at=0,
        reply_to=reply_to,
        spec=TaskSpec(**{"task_type": "t", **spec}),
    )
    return CODEC.encode(request)


def at_home(shard: int) -> str:
    """A task id of the shard."""
    return next(name for n in range(99) if shard_of(name := f"task-{n}", SHARDS) == shard)


def under(schema_id: int, value: bytes) -> bytes:
    """The same body, framed with another id."""
    return b"\0" + schema_id.to_bytes(4, "big") + value[5:]


class SlowRegistry(Registry):
    """A registry that is down for a while, and to which an id comes later than the records that bear it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = {FOREIGN: newest()["SubmitTask"].text, LATE: newest()["SubmitTask"].text}
        self.late_answers = 2

    def respond(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.status == 200 and path.split("/")[-1] == str(LATE) and self.late_answers:
            self.late_answers -= 1
            return 404, {"error_code": 40403, "message": "Schema not found"}
        return super().respond(method, path, body)


@contextmanager
def read_through(registry: Registry) -> Iterator[Codec]:
    """A codec that looks unknown ids up."""
    with served(registry.respond) as url:
        options = {"retries.wait.ms": 1, "retries.max.wait.ms": 2, "max.retries": 0}
        ids = RegistryIds(url, options, patience_s=0.5)
        try:
            yield Codec(ids)
        finally:
            ids.close()


def test_what_cannot_be_decoded_is_set_aside_as_it_was_and_nothing_else_waits(engine: str) -> None:
    junk = (b"\0\0\0\1\0junk", b"", b'{"task_type": "t"}', submission("cut")[:-9])
    misfit = CODEC.encode(WorkerHeartbeat(worker_id="w", sent_at=0, free_slots=1))
    with read_through(SlowRegistry()) as codec, staged(engine, codec=codec) as stage:
        records = [(b"k", submission("before")), *((b"key", value) for value in (*junk, misfit))]
        records.append((b"k", submission("behind")))
        offsets = stage.write(TASK_REQUESTS, 0, *records)
        stage.until(lambda: stage.runtime.live("before") and stage.runtime.live("behind"))
        found = stage.invalid(5)
        assert [(one.topic, one.partition, one.offset) for one in found] == [
            (TASK_REQUESTS, 0, offset) for offset in offsets[1:-1]
        ]
        assert [(one.key, one.value) for one in found] == records[1:-1]
        for one, reason in zip(found, ("schema 256", "no frame", "no frame", "broken body", "Heartbeat"), strict=True):
            assert reason in one.reason and one.at > 0
        assert stage.decided(TASK_REQUESTS, 0, offsets[-1])
        assert stage.runtime.hosts[0].shard.invalid_records == 5  # the metric


def test_a_registry_that_is_down_makes_nothing_invalid_and_a_late_id_is_waited_for(engine: str) -> None:
    registry = SlowRegistry()
    with read_through(registry) as codec, staged(engine, codec=codec) as stage:
        registry.status = 503
        stage.write(TASK_REQUESTS, 0, (None, under(FOREIGN, submission("held"))), (None, submission("behind")))
        stage.write(TASK_REPORTS, 0, (None, b"junk"))  # another topic goes on
        (found,) = stage.invalid(1)
        assert found.topic == TASK_REPORTS
        assert stage.runtime.live("held") is None and stage.runtime.live("behind") is None
        registry.status = 200
        stage.until(lambda: stage.runtime.live("held") and stage.runtime.live("behind"))
        stage.write(TASK_REQUESTS, 0, (None, under(LATE, submission("late"))))
        stage.until(lambda: stage.runtime.live("late"))
        assert registry.late_answers == 0
        assert len(stage.invalid(1)) == 1


@pytest.mark.parametrize("topic", [TASK_REQUESTS, TASK_REPORTS])
def test_one_null_among_a_hundred(engine: str, topic: str) -> None:
    with staged(engine) as stage:
        heartbeat = CODEC.encode(WorkerHeartbeat(worker_id="w", sent_at=0, free_slots=1))
        good = [submission(f"task-{n}") if topic == TASK_REQUESTS else heartbeat for n in range(99)]
        records: list[tuple[bytes | None, bytes | None]] = [(None, value) for value in good]
        records.insert(50, (b"deleted", None))
        offsets = stage.write(topic, 0, *records)
        if topic == TASK_REQUESTS:
            stage.until(lambda: len(stage.runtime.hosts[0].shard.state.tasks) == 99)
        (found,) = stage.invalid(1)
        assert (found.topic, found.offset, found.key, found.value) == (topic, offsets[50], b"deleted", None)


def test_a_null_among_the_events_is_passed_over(engine: str) -> None:
    with staged(engine) as stage:
        stage.write(TASK_REQUESTS, 0, (None, submission("first")))
        stage.write(TASK_EVENTS, 0, (b"first", None))
        stage.write(TASK_REQUESTS, 0, (None, submission("second")))
        stage.until(lambda: stage.runtime.live("second"))
        stage.runtime.hosts[0].reload("the test asks for it")
        stage.until(lambda: stage.runtime.live("first") and stage.runtime.live("second"))
        assert set(stage.runtime.hosts[0].shard.state.tasks) == {"first", "second"}


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_payload_at_the_limit(engine: str, excess: int) -> None:
    with staged(engine) as stage:
        value = submission("large", payload=b"x" * (PAYLOAD_MAX + excess))
        stage.write(TASK_REQUESTS, 0, (b"large", value))
        if excess <= 0:
            stage.until(lambda: stage.runtime.live("large"))
            return
        (found,) = stage.invalid(1)
        assert (found.key, found.value) == (b"large", value)
        assert f"payload has {PAYLOAD_MAX + 1} bytes" in found.reason
        assert stage.runtime.live("large") is None


def test_a_record_as_large_as_clients_write_by_default_is_set_aside_as_it_was(engine: str) -> None:
    with staged(engine) as stage:
        junk = b"x" * 1_000_000
        stage.write(TASK_REQUESTS, 0, (b"key", junk), (None, submission("behind")))
        (found,) = stage.invalid(1)
        assert (found.key, found.value) == (b"key", junk)
        stage.until(lambda: stage.runtime.live("behind"))


def test_a_record_that_no_event_can_hold_is_named_by_its_place(engine: str) -> None:
    if engine == "kafka":
        pytest.skip("the topic takes no record above 1 MiB")
    with staged(engine) as stage:
        (offset,) = stage.write(TASK_REQUESTS, 0, (None, b"x" * 1_753_132))
        stage.write(TASK_REQUESTS, 0, (None, submission("behind")))
        (found,) = stage.invalid(1)
        assert (found.offset, found.value) == (offset, None)
        assert "1753132 bytes" in found.reason
        stage.until(lambda: stage.runtime.live("behind"))


TOO_LONG: dict[str, Any] = {
    "content_type": "application/" + "x" * 300,
    "idempotency_key": "k" * 256,
    "retry": RetryPolicy(give_up_on=("x",) * 65),
    "metadata": {"k": "x" * 5_000},
    "queue": "no name",
    "tenant_id": "t" * 129,
}


@pytest.mark.parametrize("field", TOO_LONG)
def test_what_would_outgrow_a_ready_record_is_refused_before_it_is_accepted(engine: str, field: str) -> None:
    with staged(engine) as stage:
        value = submission("bad", **{field: TOO_LONG[field]})
        stage.write(TASK_REQUESTS, 0, (None, value))
        (found,) = stage.invalid(1)
        assert found.value == value
        assert field in found.reason or field == "retry"
        (event,) = stage.events()
        assert len(CODEC.encode(event)) < len(value) + 1_000


def test_who_waits_for_a_reply_is_told_there_and_a_duplicate_is_no_invalid_record(engine: str) -> None:
    with staged(engine) as stage:
        records = [submission("a"), submission("a"), submission("b", queue="no name", reply_to=0), b"junk"]
        offsets = stage.write(TASK_REQUESTS, 0, *((None, value) for value in records))
        (found,) = stage.invalid(1)
        assert found.offset == offsets[-1]
        assert sum(isinstance(event.body, TaskRejected) for event in stage.events()) == 3


def test_a_checkpoint_of_an_attempt_that_is_too_large_is_not_kept(engine: str) -> None:
    with staged(engine) as stage:
        stage.write(TASK_REQUESTS, 0, (None, submission("long")))
        stage.until(lambda: stage.runtime.live("long"))
        started = AttemptStarted(task_id="long", task_version=1, attempt=1, worker_id="w", started_at=0)
        saved = AttemptCheckpointed(
            task_id="long", attempt=1, worker_id="w", checkpointed_at=0, checkpoint=b"x" * (CHECKPOINT_MAX + 1)
        )
        stage.write(TASK_REPORTS, 0, (None, CODEC.encode(started)), (None, CODEC.encode(saved)))
        (found,) = stage.invalid(1)
        assert found.value == CODEC.encode(saved)
        known = stage.runtime.live("long")
        assert isinstance(known, Task) and known.status is Status.RUNNING and known.checkpoint is None


@pytest.mark.parametrize("request_type", [RedriveTask, DiscardTask])
@pytest.mark.parametrize("forged", [{"version": 2**63 - 1}, {"snooze_count": 2**63 - 1}, {"task_id": "no name"}])
def test_an_operators_request_that_no_view_can_have_given_is_refused(
    engine: str, request_type: type[RedriveTask] | type[DiscardTask], forged: dict[str, Any]
) -> None:
    fields = {"task_id": "forged", "version": 9, **forged}
    shown = Task(spec=TaskSpec(task_type="t"), status=Status.DEAD, created_at=0, updated_at=0, **fields)
    with staged(engine) as stage:
        value = CODEC.encode(request_type(request_id="r", task=shown, view_offset=2**60))
        stage.write(TASK_REQUESTS, 0, (None, value))
        (found,) = stage.invalid(1)
        assert found.value == value and next(iter(forged)) in found.reason


@pytest.mark.parametrize(("partition", "offset"), [(0, 5), (3, 5), (-1, 5), (1, -1), (1, 2**63 - 1)])
def test_what_claims_to_be_forwarded_from_nowhere_is_refused(engine: str, partition: int, offset: int) -> None:
    forged = ForwardedRequest(task_id="a", partition=partition, offset=offset, value=submission(at_home(0)))
    with staged(engine, shards=SHARDS) as stage:
        (place,) = stage.write(TASK_REQUESTS, 0, (b"key", CODEC.encode(forged)))
        (found,) = stage.invalid(1)
        assert (found.partition, found.offset, found.value) == (0, place, CODEC.encode(forged))


def _newer() -> dict[str, Any]:
    """SubmitTask as a newer version may have it: a field more, and a priority more."""
    schema: dict[str, Any] = json.loads(newest()["SubmitTask"].text)
    schema["fields"].append({"name": "colour", "type": ["null", "string"], "default": None})
    for field in schema["fields"]:
        if field["name"] == "spec":
            for inner in field["type"]["fields"]:
                if inner["name"] == "priority":
                    inner["type"]["symbols"].append("urgent")
    return schema


def _older() -> dict[str, Any]:
    """SubmitTask as an older version may have had it: without what has a default."""
    schema: dict[str, Any] = json.loads(newest()["SubmitTask"].text)
    schema["fields"] = [field for field in schema["fields"] if field["name"] not in ("fingerprint", "traceparent")]
    return schema


def test_old_and_new_producers_write_side_by_side(engine: str) -> None:
    def written(schema_id: int, schema: dict[str, Any], task_id: str, **spec: Any) -> bytes:
        body = BytesIO()
        datum = {
            "request_id": "r",
            "submitted_at": 0,
            "task_id": task_id,
            "spec": {"task_type": "t", "payload": b"1", **spec},
        }
        fastavro.schemaless_writer(body, fastavro.parse_schema(schema), datum)
        return b"\0" + schema_id.to_bytes(4, "big") + body.getvalue()

    registry = Registry()
    registry.texts = {101: json.dumps(_older()), 102: json.dumps(_newer()), 103: '{"type": "record", "name": "x"}'}
    with read_through(registry) as codec, staged(engine, codec=codec) as stage:
        other = under(103, b"")
        values = [
            written(101, _older(), "old", priority="high"),
            written(102, _newer(), "new", priority="high"),
            other,
            written(102, _newer(), "newest", priority="urgent"),
            submission("ours"),
        ]
        stage.write(TASK_REQUESTS, 0, *((None, value) for value in values))
        stage.until(lambda: all(stage.runtime.live(one) for one in ("old", "new", "newest", "ours")))
        (found,) = stage.invalid(1)
        assert found.value == other and "none of our messages" in found.reason
        tasks = {task.task_id: task for task in stage.runtime.hosts[0].shard.state.tasks.values()}
        assert tasks["old"].fingerprint is None and tasks["old"].spec.priority is Priority.HIGH
        assert tasks["newest"].spec.priority is Priority.MEDIUM  # what the schema declares for what it does not know


# --- the wrong partition ----------------------------------------------------------------------------------------------


def forwards(stage: TopicsStage) -> int:
    return sum(isinstance(event.body, RequestForwarded) for event in stage.events())


def test_a_request_in_a_partition_that_is_not_its_own_is_forwarded(engine: str) -> None:
    with staged(engine, shards=SHARDS) as stage:
        task_id = at_home(2)
        stage.write(TASK_REQUESTS, 0, (b"other key", submission(task_id)))
        stage.until(lambda: stage.runtime.live(task_id))
        update = UpdateTask(request_id="u", task_id=task_id, priority=Priority.HIGH)
        stage.write(TASK_REQUESTS, 1, (None, CODEC.encode(update)))
        stage.until(lambda: stage.runtime.hosts[2].shard.state.tasks[task_id].spec.priority is Priority.HIGH)
        stage.write(TASK_REQUESTS, 1, (None, CODEC.encode(CancelTask(request_id="c", task_id=task_id))))
        stage.until(lambda: task_id in stage.runtime.hosts[2].shard.state.ended)
        origins = [event.origin for event in stage.events() if event.entity_id == task_id and event.version]
        assert [origin.partition for origin in origins if origin] == [0, 1, 1]
        assert forwards(stage) == 3


def test_a_submission_without_an_id_gets_one_of_its_place(engine: str) -> None:
    with staged(engine, shards=SHARDS) as stage:
        offsets = stage.write(TASK_REQUESTS, 0, *((None, submission(None)) for _ in range(9)))
        ids = [record_task_id(TASK_REQUESTS, 0, offset) for offset in offsets]
        stage.until(lambda: all(stage.runtime.live(task_id) for task_id in ids))
        submitted = [event for event in stage.events() if isinstance(event.body, TaskSubmitted)]
        assert {event.entity_id for event in submitted} == set(ids)
        assert forwards(stage) == sum(shard_of(task_id, SHARDS) != 0 for task_id in ids) > 0


def test_submissions_without_an_id_but_with_one_key_are_one_task(engine: str) -> None:
    with staged(engine, shards=SHARDS) as stage:
        for partition in range(SHARDS):
            (offset,) = stage.write(TASK_REQUESTS, partition, (None, submission(None, idempotency_key="invoice-7")))
            stage.until(partial(stage.decided, TASK_REQUESTS, partition, offset))
        stage.until(lambda: sum(len(host.shard.state.tasks) for host in stage.runtime.hosts.values()))

        def decided() -> bool:
            rejected = [event for event in stage.events() if isinstance(event.body, TaskRejected)]
            return len(rejected) == SHARDS - 1

        stage.until(decided)
        assert sum(isinstance(event.body, TaskSubmitted) for event in stage.events()) == 1


def test_a_copy_of_what_was_forwarded_changes_nothing_even_when_its_task_is_forgotten(engine: str) -> None:
    with staged(engine, shards=SHARDS) as stage:
        task_id = at_home(1)
        stage.write(TASK_REQUESTS, 0, (None, submission(task_id)))
        stage.until(lambda: stage.runtime.live(task_id))
        (copy,) = [record for record in stage.read(TASK_REQUESTS) if record.partition == 1]
        stage.write(TASK_REQUESTS, 1, (None, CODEC.encode(CancelTask(request_id="c", task_id=task_id))))
        stage.until(lambda: task_id in stage.runtime.hosts[1].shard.state.ended)
        stage.runtime.hosts[1].shard.state.ended.clear()
        (offset,) = stage.write(TASK_REQUESTS, 1, (copy.key, copy.value))
        stage.until(lambda: stage.decided(TASK_REQUESTS, 1, offset))
        assert stage.runtime.live(task_id) is None
        stage.runtime.hosts[1].reload("the test asks for it")
        (offset,) = stage.write(TASK_REQUESTS, 1, (copy.key, copy.value))
        stage.until(lambda: stage.decided(TASK_REQUESTS, 1, offset))
        assert sum(isinstance(event.body, TaskSubmitted) for event in stage.events()) == 1


def test_what_was_forwarded_to_the_wrong_shard_goes_no_further(engine: str) -> None:
    with staged(engine, shards=SHARDS) as stage:
        value = submission(at_home(2))
        stage.write(TASK_REQUESTS, 0, (b"key", value))
        stage.until(lambda: stage.runtime.live(at_home(2)))
        (copy,) = [record for record in stage.read(TASK_REQUESTS) if record.partition == 2]
        stage.write(TASK_REQUESTS, 1, (copy.key, copy.value))
        (found,) = stage.invalid(1)
        assert (found.partition, found.key, found.value) == (0, b"key", value)
        assert "forwarded to shard 1, but belongs to 2" in found.reason
        assert forwards(stage) == 1
