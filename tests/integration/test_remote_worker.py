"""Workers in processes of their own, over the socket of an engine in this one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.remote import SOCKET_NAME
from scheduler.core.shard import ShardSettings
from scheduler.ports import TopicPartition
from schemas.codec import Codec
from schemas.messages import Event, Status, TaskStarted
from schemas.topics import TASK_EVENTS
from tests.contract.log import poll_until
from tests.remote_worker import HEARTBEAT_MS, app, double, hold
from tidewheel import Engine

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
HELD = 8
QUICK = 300


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    shard = ShardSettings(worker_timeout_us=5 * HEARTBEAT_MS * 1000)
    with app.embedded(tmp_path, has_worker=False, shard=shard) as engine:
        yield engine


@contextmanager
def worker(data: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A worker's process; it is killed at the end unless it ended before."""
    command = [sys.executable, "-m", "tests.remote_worker", str(data / SOCKET_NAME), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def starts_of(engine: Engine) -> dict[tuple[str, int], str]:
    """Which worker each attempt was started by, as the log has it. Fails if one was started twice."""
    codec, log = Codec.builtin(), engine.broker.connect()
    reader = log.reader()
    ends = {TopicPartition(TASK_EVENTS, n): 0 for n in range(engine.settings.shards)}
    for partition in ends:
        ends[partition] = log.end_offset(partition)
        reader.seek(partition, 0)
    starts: dict[tuple[str, int], str] = {}
    seen: Counter[TopicPartition] = Counter()

    def has_all() -> bool:
        for record in reader.take(1_000):
            seen[TopicPartition(record.topic, record.partition)] = record.offset + 1
            event = codec.decode(record.value or b"")
            if isinstance(event, Event) and isinstance(event.body, TaskStarted):
                attempt = event.entity_id, event.body.attempt
                assert attempt not in starts
                starts[attempt] = event.body.worker_id
        return all(seen[partition] >= end for partition, end in ends.items())

    poll_until(has_all, log)
    log.close()
    return starts


def test_another_worker_takes_over_from_a_killed_one(engine: Engine, tmp_path: Path) -> None:
    with worker(tmp_path, "hold") as killed:
        held = [hold.submit(number) for number in range(HELD)]
        assert killed.stdout is not None
        assert {int(killed.stdout.readline()) for _ in range(HELD)} == set(range(HELD))
        first = [double.submit(number) for number in range(QUICK)]
        killed.send_signal(signal.SIGKILL)
        killed.wait(WAIT_S)
        second = [double.submit(number) for number in range(QUICK)]
        with worker(tmp_path):
            assert [handle.result(WAIT_S) for handle in held] == list(range(HELD))
            for handles in (first, second):
                assert [handle.result(WAIT_S) for handle in handles] == [2 * number for number in range(QUICK)]
    expected = {(handle.task_id, attempt) for handle in held for attempt in (1, 2)}
    expected |= {(handle.task_id, 1) for handle in second}
    starts = set(starts_of(engine))
    assert expected <= starts
    # Of the quick ones, those that were running at the kill were started twice.
    assert starts - expected <= {(handle.task_id, attempt) for handle in first for attempt in (1, 2)}


def test_workers_share_the_work(engine: Engine, tmp_path: Path) -> None:
    with worker(tmp_path) as one, worker(tmp_path) as two:
        everyone = {f"remote-{process.pid}" for process in (one, two)}
        while set(starts_of(engine).values()) != everyone:
            handles = double.submit_many([{"n": number} for number in range(QUICK)])
            assert [handle.result(WAIT_S) for handle in handles] == [2 * number for number in range(QUICK)]


def test_when_the_engine_stops_its_workers_end_and_their_work_is_done_after_its_restart(
    engine: Engine, tmp_path: Path
) -> None:
    with worker(tmp_path, "hold") as left:
        handle = hold.submit(7)
        assert left.stdout is not None
        assert left.stdout.readline() == "7\n"
        engine.stop()
        assert not (tmp_path / SOCKET_NAME).exists()
        assert left.wait(WAIT_S) not in (0, -signal.SIGKILL)
    with app.embedded(tmp_path, has_worker=False, shard=engine.settings.shard), worker(tmp_path):
        again = app.handle(handle.task_id)
        assert again.result(WAIT_S) == 7
        assert again.status() is Status.SUCCEEDED
