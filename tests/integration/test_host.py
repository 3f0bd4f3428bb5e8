"""What must not stop a scheduler, and what must: the edges of the host of a shard, over the embedded adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from infra.local import LocalBroker, LocalLog
from infra.sqlite import SqliteLogStorage, SqliteStateStore
from infra.topics import embedded_catalog
from scheduler.host import CHECKPOINT_KEY, Phase, RuntimeSettings
from scheduler.ports import Entry, TopicPartition
from scheduler.runtime import SchedulerRuntime
from schemas.catalog import newest, releases
from schemas.codec import Codec
from schemas.errors import Fatal, Retriable, TidewheelIOError, UnknownSchema
from schemas.messages import Event, ShardCheckpoint, Status, SubmitTask, TaskSpec, WorkerHeartbeat
from schemas.topics import TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS
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


@contextmanager
def scheduler(states: SqliteStateStore, codec: Codec = CODEC) -> Iterator[tuple[SchedulerRuntime, LocalLog]]:
    """One shard, active, turned by the test."""
    storage = SqliteLogStorage(MEMORY)
    broker = LocalBroker(storage, embedded_catalog(1))
    log = broker.connect(commits=True)
    settings = RuntimeSettings(owner="test", checkpoint_us=0)
    runtime = SchedulerRuntime(log, states, codec, SteadyClock(), Random(1), settings)
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
    log: LocalLog, task_id: str, reply_to: int | None = None, schema_id: int | None = None, due_at: int | None = None
) -> None:
    spec = TaskSpec(task_type="t", scheduled_at=due_at)
    request = SubmitTask(request_id="r", spec=spec, submitted_at=0, task_id=task_id, reply_to=reply_to)
    value = CODEC.encode(request)
    if schema_id is not None:
        value = b"\0" + schema_id.to_bytes(4, "big") + value[5:]
    log.append([Entry(TASK_REQUESTS, 0, task_id.encode(), value)])


def test_a_checkpoint_that_finds_no_room_is_taken_again_later() -> None:
    states = FullStates(MEMORY)
    tasks = {f"task-{number}" for number in range(3)}
    with scheduler(states) as (runtime, log):
        for task_id in sorted(tasks):
            submit(log, task_id)
        turned_until(runtime, lambda: tasks <= {key.decode().removeprefix("task/") for key, _ in states.load(0)})
    assert states.refusals == 0


def test_a_request_that_wants_its_answer_nowhere_is_decided_all_the_same() -> None:
    with scheduler(SqliteStateStore(MEMORY)) as (runtime, log):
        submit(log, "lost-answer", reply_to=99)
        submit(log, "next", reply_to=0)
        turned_until(runtime, lambda: runtime.live("lost-answer") and runtime.live("next"))
        turned_until(runtime, lambda: not runtime.hosts[0].has_unacknowledged())


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
