"""What must not stop a scheduler, and what must: the edges of the host of a shard, over the embedded adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage, SqliteStateStore
from infra.topics import embedded_catalog
from scheduler.core.shard import ShardSettings
from scheduler.host import CHECKPOINT_KEY, CHECKPOINT_US, Phase, RuntimeSettings
from scheduler.ports import Clock, Entry, OnAck, TopicPartition
from scheduler.runtime import SchedulerRuntime
from schemas.catalog import newest, releases
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable, TidewheelIOError, UnknownSchema
from schemas.ids import shard_of
from schemas.messages import (
    Event,
    InvalidRecord,
    Schedule,
    ScheduleSpec,
    ShardCheckpoint,
    Status,
    SubmitTask,
    TaskRejected,
    TaskSpec,
    WorkerHeartbeat,
)
from schemas.topics import TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS, TASK_REQUESTS_INVALID
from schemas.wheel import MINUTE_US, WheelShape
from tests.harness import eventually
from tidewheel import App
from tidewheel.clock import SteadyClock

CODEC = Codec.builtin()
MEMORY = ":memory:"


class FullStates(SqliteStateStore):
    """A store that has too much to write already, for a while."""

    refusals = 3

    def commit(
        self,
        shard: int,
        token: int,
        changes: Iterable[tuple[bytes, bytes | None]],
        on_done: Callable[[TidewheelIOError | None], None],
    ) -> None:
        if self.refusals:
            self.refusals -= 1
            raise Retriable("too many commits wait")
        super().commit(shard, token, changes, on_done)


def events_at(log: LocalLog) -> list[Event]:
    """What the shard has decided, but for its openings."""
    reader = log.reader()
    reader.seek(TopicPartition(TASK_EVENTS, 0), 0)
    found = [CODEC.decode(record.value) for record in reader.take(1_000)]
    reader.close()
    return [event for event in found if isinstance(event, Event)]


class Outage:
    """A registry that has the built-in ids, and one more under which it knows SubmitTask; it may be down."""

    FOREIGN = 999_999

    def __init__(self) -> None:
        self.is_down = True
        self.has_foreign = True

    def register(self, name: str, text: str) -> int:
        """The built-in id."""
        return next(release.schema_id for release in releases() if release.text == text)

    def schema(self, schema_id: int) -> str:
        """The text, when it is up."""
        if self.is_down:
            raise Retriable("the registry is down")
        if not self.has_foreign:
            raise UnknownSchema(f"schema {schema_id} is not in the registry")
        return newest()["SubmitTask"].text


class Unwritable:
    """A log that takes no records for one topic, for a while: as said, when asked, or when it reports."""

    def __init__(self, log: LocalLog, topic: str, *, when: str) -> None:
        self._log, self._topic, self._when = log, topic, when
        self.is_failing = True
        self.refused = 0
        self._reports: list[OnAck] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Send entries, or not."""
        if not self.is_failing or all(entry.topic != self._topic for entry in entries):
            self._log.append(entries, on_ack)
            return
        self.refused += 1
        if self._when == "asked":
            raise Retriable("the buffer is full")
        if on_ack is not None:
            self._reports.append(on_ack)

    def poll(self, timeout_s: float) -> None:
        """Report what was not taken."""
        reports, self._reports = self._reports, []
        for on_ack in reports:
            on_ack(Retriable("no broker has the topic"))
        self._log.poll(timeout_s)


@contextmanager
def scheduler(
    states: SqliteStateStore,
    codec: Codec = CODEC,
    around: Callable[[LocalLog], Any] = lambda log: log,
    clock: Clock | None = None,
    checkpoint_us: int = 0,
) -> Iterator[tuple[SchedulerRuntime, LocalLog]]:
    """One shard, active, turned by the test."""
    storage = SqliteLogStorage(MEMORY)
    broker = LocalBroker(storage, embedded_catalog(1))
    log: LocalLog = around(broker.connect(commits=True))
    settings = RuntimeSettings(owner="test", checkpoint_us=checkpoint_us)
    runtime = SchedulerRuntime(log, states, codec, clock or SteadyClock(), Random(1), settings)
    try:
        turned_until(runtime, lambda: any(host.phase is Phase.ACTIVE for host in runtime.hosts.values()))
        yield runtime, log
    finally:
        broker.close()
        storage.close()
        states.close()


def turned_until(runtime: SchedulerRuntime, fact: Callable[[], object]) -> None:
    """Turn the loop until the fact is there."""

    def is_there() -> bool:
        runtime.step(0)
        return bool(fact())

    eventually(is_there)


def submit(
    log: LocalLog,
    task_id: str,
    reply_to: int | None = None,
    schema_id: int | None = None,
    due_at: int | None = None,
    partition: int = 0,
) -> None:
    spec = TaskSpec(task_type="t", scheduled_at=due_at)
    request = SubmitTask(request_id="r", spec=spec, submitted_at=0, task_id=task_id, reply_to=reply_to)
    value = CODEC.encode(request)
    if schema_id is not None:
        value = b"\0" + schema_id.to_bytes(4, "big") + value[5:]
    log.append([Entry(TASK_REQUESTS, partition, task_id.encode(), value)])


def test_a_checkpoint_that_finds_no_room_is_taken_again_later() -> None:
    states = FullStates(MEMORY)
    tasks = {f"task-{number}" for number in range(3)}
    with scheduler(states) as (runtime, log):
        for task_id in sorted(tasks):
            submit(log, task_id)
        turned_until(runtime, lambda: tasks <= {key.decode().removeprefix("task/") for key, _ in states.load(0)})
    assert states.refusals == 0


class SlowClock:
    """A clock that goes on by five microseconds with each look at it."""

    def __init__(self) -> None:
        self._now = SteadyClock().now_us()

    def now_us(self) -> int:
        """The time since it was made, or so."""
        self._now += 5
        return self._now


@pytest.mark.parametrize(
    "age_us", [CHECKPOINT_US, -CHECKPOINT_US, None], ids=["old", "of a clock that is ahead", "none was ever taken"]
)
def test_the_age_of_a_checkpoint_counts_over_its_owners(age_us: int | None) -> None:
    """Else owners that do not live until their first one would leave ever more events to read."""
    states, clock = SqliteStateStore(MEMORY), SlowClock()
    token = eventually(lambda: states.fence(0))
    if age_us is not None:
        checkpoint = ShardCheckpoint(epoch=0, next_offset=0, positions={}, taken_at=clock.now_us() - age_us)
        results: list[TidewheelIOError | None] = []
        states.commit(0, token, [(CHECKPOINT_KEY, CODEC.encode(checkpoint))], results.append)
        eventually(lambda: results == [None], "it is stored")
    with scheduler(states, clock=clock, checkpoint_us=CHECKPOINT_US) as (runtime, log):
        if age_us is None:
            submit(log, "before")
            turned_until(runtime, lambda: runtime.live("before") and not runtime.hosts[0].has_unacknowledged())
            runtime.hosts[0].reload("another owner begins")
        submit(log, "task")
        turned_until(runtime, lambda: runtime.live("task") and not runtime.hosts[0].has_unacknowledged())
        if age_us is None or age_us > 0:
            turned_until(runtime, lambda: b"task/task" in dict(states.load(0)))
        else:
            assert b"task/task" not in dict(states.load(0))


def test_a_request_that_wants_its_answer_nowhere_is_decided_all_the_same() -> None:
    with scheduler(SqliteStateStore(MEMORY)) as (runtime, log):
        submit(log, "lost-answer", reply_to=99)
        submit(log, "next", reply_to=0)
        turned_until(runtime, lambda: runtime.live("lost-answer") and runtime.live("next"))
        turned_until(runtime, lambda: not runtime.hosts[0].has_unacknowledged())
        assert [event.entity_id for event in events_at(log) if event.version] == ["lost-answer", "next"]


@pytest.mark.parametrize("is_known", [True, False])
def test_while_the_registry_is_down_a_request_waits_and_nothing_else(is_known: bool) -> None:
    """An outage is not poison: requests keep their order, and reports and timers go on."""
    registry = Outage()
    registry.has_foreign = is_known
    with scheduler(SqliteStateStore(MEMORY), Codec(registry)) as (runtime, log):
        clock = SteadyClock()
        submit(log, "timed", due_at=clock.now_us() + 200_000)
        submit(log, "foreign", schema_id=Outage.FOREIGN)
        submit(log, "behind")
        turned_until(runtime, lambda: runtime.live("timed"))
        heartbeat = WorkerHeartbeat(worker_id="w", sent_at=clock.now_us(), free_slots=1)
        log.append([Entry(TASK_REPORTS, 0, None, CODEC.encode(heartbeat))])
        turned_until(runtime, lambda: runtime.hosts[0]._read_positions.get(TASK_REPORTS))
        turned_until(runtime, lambda: runtime.statuses().get(Status.PENDING))
        assert runtime.live("foreign") is None
        assert runtime.live("behind") is None
        registry.is_down = False
        turned_until(runtime, lambda: runtime.live("behind"))
        assert (runtime.live("foreign") is not None) is is_known
        turned_until(runtime, lambda: not runtime.hosts[0].has_unacknowledged())
        offsets = [event.source_offset for event in events_at(log) if event.source_topic == TASK_REQUESTS]
        assert offsets == [0, 1, 2]


def test_a_state_that_is_ahead_of_its_log_is_refused(tmp_path: Path) -> None:
    states = SqliteStateStore(tmp_path / "state.db")
    checkpoint = ShardCheckpoint(epoch=3, next_offset=3_000, positions={}, taken_at=0)
    done: list[TidewheelIOError | None] = []
    states.commit(0, states.fence(0), [(CHECKPOINT_KEY, CODEC.encode(checkpoint))], done.append)
    states.close()
    assert done == [None]
    with pytest.raises(Fatal, match="reaches to event 3000, but the log ends at 0"):
        App().embedded(tmp_path, shards=1).start()


@pytest.mark.parametrize("when", ["asked", "reported"])
def test_no_checkpoint_passes_a_record_that_cannot_be_set_aside(when: str) -> None:
    states = SqliteStateStore(MEMORY)
    with scheduler(states, around=lambda log: Unwritable(log, TASK_REQUESTS_INVALID, when=when)) as (runtime, log):
        submit(log, "before")
        log.append([Entry(TASK_REQUESTS, 0, b"key", b"junk")])
        submit(log, "behind")
        turned_until(runtime, lambda: log.refused > 3)  # type: ignore[attr-defined]
        rejected = [event.source_offset for event in events_at(log) if isinstance(event.body, TaskRejected)]
        assert rejected == [1], "it is decided once, however often it is sent"
        checkpoints = [CODEC.decode(value) for key, value in states.load(0) if key == CHECKPOINT_KEY]
        assert all(isinstance(one, ShardCheckpoint) and one.positions[TASK_REQUESTS] <= 1 for one in checkpoints)
        log.is_failing = False  # type: ignore[attr-defined]

        def checkpoint() -> object:
            found = [CODEC.decode(value) for key, value in states.load(0) if key == CHECKPOINT_KEY]
            return found and isinstance(found[0], ShardCheckpoint) and found[0].positions.get(TASK_REQUESTS) == 3

        turned_until(runtime, checkpoint)
        reader = log.reader()
        reader.seek(TopicPartition(TASK_REQUESTS_INVALID, 0), 0)
        found = [CODEC.decode(record.value) for record in reader.take(100)]
        assert found
        for one in found:
            assert isinstance(one, InvalidRecord)
            assert (one.topic, one.partition, one.offset, one.key, one.value) == (TASK_REQUESTS, 0, 1, b"key", b"junk")
        assert runtime.live("before") and runtime.live("behind")


def test_a_scheduler_that_stops_before_the_record_was_set_aside_leaves_it_to_the_next() -> None:
    storage, states = SqliteLogStorage(MEMORY), SqliteStateStore(MEMORY)
    broker = LocalBroker(storage, embedded_catalog(1))
    first = Unwritable(broker.connect(commits=True), TASK_REQUESTS_INVALID, when="asked")
    runtimes = []
    for log in (first, first._log):
        settings = RuntimeSettings(owner="test", checkpoint_us=0)
        runtime = SchedulerRuntime(log, states, CODEC, SteadyClock(), Random(1), settings)
        runtimes.append(runtime)
        turned_until(runtime, lambda of=runtime: any(host.phase is Phase.ACTIVE for host in of.hosts.values()))  # type: ignore[misc]
        if log is first:
            log.append([Entry(TASK_REQUESTS, 0, None, b"junk")])
            turned_until(runtime, lambda: first.refused)
            runtime._member.close()
    log = first._log
    reader = log.reader()
    reader.seek(TopicPartition(TASK_REQUESTS_INVALID, 0), 0)
    (found,) = [CODEC.decode(record.value) for record in reader.take(100)]
    assert isinstance(found, InvalidRecord) and found.value == b"junk"
    assert len([event for event in events_at(log) if isinstance(event.body, TaskRejected)]) == 1
    broker.close()
    storage.close()
    states.close()


def test_how_late_things_were_is_counted_on_when_shards_go_to_others() -> None:
    storage, states = SqliteLogStorage(MEMORY), SqliteStateStore(MEMORY)
    broker = LocalBroker(storage, embedded_catalog(2))
    settings = RuntimeSettings(owner="test", checkpoint_us=0)

    def joined() -> SchedulerRuntime:
        return SchedulerRuntime(broker.connect(commits=True), states, CODEC, SteadyClock(), Random(1), settings)

    def released() -> int:
        return sum(first.lateness.releases.histogram().counts)

    first = joined()
    turned_until(first, lambda: sum(host.phase is Phase.ACTIVE for host in first.hosts.values()) == 2)
    log = broker.connect(commits=True)
    by_shard = {shard_of(f"timed-{number}", 2): f"timed-{number}" for number in range(20)}
    for shard, task_id in by_shard.items():
        submit(log, task_id, due_at=SteadyClock().now_us() + 100_000, partition=shard)
    turned_until(first, lambda: released() == 2)
    second = joined()

    def shared() -> bool:
        second.step(0)
        return len(first.hosts) == len(second.hosts) == 1

    turned_until(first, shared)
    assert released() == 2
    broker.close()
    storage.close()
    states.close()


def test_a_wheel_that_has_not_the_slots_of_its_topics_stops_the_process_before_it_reads_anything() -> None:
    broker = LocalBroker(SqliteLogStorage(MEMORY), embedded_catalog(1))
    few = WheelShape(widths_us=(MINUTE_US,), leads_us=(MINUTE_US,), slots=2)
    settings = RuntimeSettings(owner="test", shard=ShardSettings(wheel=few))
    states = SqliteStateStore(MEMORY)
    with pytest.raises(Fatal, match=r"delay\.0 has 16 partitions.*need 2"):
        SchedulerRuntime(broker.connect(commits=True), states, CODEC, SteadyClock(), Random(1), settings)
    broker.close()
    states.close()


@pytest.mark.parametrize(
    "marks", [{"opened": (1, 1)}, {"opened": (1, 1, 1, 1), "next_offsets": {"0/16": 3}}], ids=["levels", "slots"]
)
def test_a_checkpoint_of_another_wheel_stops_the_process(marks: dict[str, Any]) -> None:
    states = SqliteStateStore(MEMORY)
    checkpoint = ShardCheckpoint(epoch=0, next_offset=0, positions={}, taken_at=0, **marks)
    results: list[TidewheelIOError | None] = []
    token = eventually(lambda: states.fence(0))
    states.commit(0, token, [(CHECKPOINT_KEY, CODEC.encode(checkpoint))], results.append)
    eventually(lambda: results == [None], "it is stored")
    with pytest.raises(Fatal, match="another shape"), scheduler(states):
        pass


def test_a_schedule_that_is_flagged_is_said_where_operators_look() -> None:
    states = SqliteStateStore(MEMORY)
    spec = ScheduleSpec(name="n", task=TaskSpec(task_type="t"), cron_expression="of another version")
    schedule = Schedule(
        schedule_id="s", spec=spec, version=1, created_at=0, updated_at=0, considered_at=0, next_fire_at=1, tzdata="old"
    )
    token = eventually(lambda: states.fence(0))
    results: list[TidewheelIOError | None] = []
    states.commit(0, token, [(b"schedule/s", CODEC.encode(schedule))], results.append)
    eventually(lambda: results == [None], "it is stored")
    with capture_logs() as said, scheduler(states) as (runtime, _):
        turned_until(runtime, lambda: [one for one in said if one.get("schedule") == "s"])
    (line,) = [one for one in said if one.get("schedule") == "s"]
    assert line["log_level"] == "error" and "InvalidSchedule" in line["problem"]
