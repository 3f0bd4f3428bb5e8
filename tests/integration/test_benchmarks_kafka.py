"""Benchmarks of the Kafka engine in a tiny form, on real services. How fast anything was is not looked at."""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from benchmarks.__main__ import main
from benchmarks.cluster import ClusterOptions, started_services
from benchmarks.cluster_audit import audit
from benchmarks.cluster_losses import longest_gap_s
from infra.services import Cluster, ServiceFailed
from infra.services.node import command_line
from scheduler.ports import Record
from schemas.codec import Codec
from schemas.ids import shard_of
from schemas.messages import Event, EventBody, ShardOpened, Status, TaskSpec, TaskStarted, TaskSubmitted, TaskSucceeded
from schemas.topics import TASK_EVENTS, TASK_REQUESTS
from tests.samples import minimal
from tests.services import cassandra_address, kafka_bootstrap, require, reserved_ports

ALWAYS = {"engine", "settings", "versions", "noise", "cpu_us_per_task", "missing", "duplicates", "early"}
MUST_NOT_HAPPEN = ("missing", "early", "lost", "decided_twice", "doubled")
TINY = {
    "throughput --tasks 200 --warm-up 50 --projectors 0": {"tasks_per_s", "submit_per_s", "log_bytes_per_task"},
    "timers --rate 50 --seconds 2 --lead-s 5 --waiting 100 --projectors 0": {"p50_ms", "p99_ms", "max_ms"},
    "cron_loss --rounds 1 --count 3 --projectors 0": {"lost", "doubled", "decided_twice"},
    "limits --rate 20 --seconds 3 --shards 2 --workers 1 --keys 3 --keyed-tasks 30 --kills 1 --tasks 200": {
        "used_ratio",
        "exceeded",
        "met",
        "throughput_ratio",
    },
    "worker_loss --rounds 1 --running 5 --projectors 0": {"restart_s_max", "restart_s_p50", "duplicate_starts"},
}


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.service("cassandra")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", TINY)
def test_a_benchmark_prints_its_contract(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = cassandra_address()
    monkeypatch.setenv("TIDEWHEEL_KAFKA_BOOTSTRAP", kafka_bootstrap())
    monkeypatch.setenv("TIDEWHEEL_CASSANDRA_HOSTS", host)
    monkeypatch.setenv("TIDEWHEEL_CASSANDRA_PORT", str(port))
    assert main([*command.split(), "--engine", "kafka", "--json", "--data", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert TINY[command] | ALWAYS <= found.keys()
    assert {figure: found[figure] for figure in MUST_NOT_HAPPEN if found.get(figure, 0)} == {}
    assert not list(tmp_path.iterdir()), "the files of a benchmark are removed"


@pytest.mark.parametrize("brokers", ["0", "2", "4", "x"])
def test_a_cluster_that_cannot_be_is_refused_at_once(brokers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["throughput", "--engine", "kafka", "--brokers", brokers])
    assert refused.value.code == 2
    assert "--brokers" in capsys.readouterr().err


# --- what is counted --------------------------------------------------------------------------------------------------


def record(offset: int, task_id: str, body: EventBody, *, epoch: int, source: int | None = None) -> Record:
    event = minimal(
        Event, entity_id=task_id, epoch=epoch, body=body,
        source_topic=None if source is None else TASK_REQUESTS, source_offset=source,
    )  # fmt: skip
    return Record(TASK_EVENTS, 0, offset, None, Codec.builtin().encode(event))


def submitted(due_at: int) -> TaskSubmitted:
    return TaskSubmitted(spec=TaskSpec(task_type="t"), status=Status.SCHEDULED, next_run_at=due_at)


def started(at: int, attempt: int = 1) -> TaskStarted:
    return TaskStarted(attempt=attempt, worker_id="w", started_at=at)


def test_the_audit_counts_what_must_not_happen() -> None:
    bodies: list[tuple[str, EventBody, int, int | None]] = [
        ("", ShardOpened(owner="a"), 1, None),
        ("early", submitted(50), 1, 0),
        ("early", started(49), 1, None),
        ("again", submitted(0), 1, 1),
        ("again", started(1), 1, None),
        ("", ShardOpened(owner="b"), 2, None),
        ("again", minimal(TaskSucceeded), 1, None),  # by an owner that is none any more: void
        ("again", started(2, 2), 2, None),
        ("never", submitted(0), 2, 2),
        ("early", minimal(TaskSucceeded), 2, None),
        ("twice", submitted(0), 2, 2),
    ]
    records = [
        record(offset, task_id, body, epoch=epoch, source=source)
        for offset, (task_id, body, epoch, source) in enumerate(bodies)
    ]
    stage: Any = SimpleNamespace(records=lambda topic: records)
    found = audit(stage)
    assert (found.early, found.void, found.decided_twice, found.again()) == (1, 1, 1, 1)
    assert found.missing(["early", "again", "never", "unknown"]) == 2
    assert found.lost(["early", "again", "never", "unknown"]) == 3


def test_the_longest_gap_is_that_of_one_shard_and_reaches_to_both_ends() -> None:
    ids = {index: f"t{index}" for index in range(20)}
    of_0 = [index for index, task_id in ids.items() if shard_of(task_id, 2) == 0]
    first_ns = array("q", [10**9 if index in of_0 else 9 * 10**9 for index in ids])
    stage: Any = SimpleNamespace(shards=2, starts=SimpleNamespace(first_ns=first_ns))
    load: Any = SimpleNamespace(ids=ids)
    assert longest_gap_s(stage, load, 0, 10 * 10**9) == 9.0
    assert longest_gap_s(stage, load, 0, 12 * 10**9) == 11.0


@pytest.mark.slow
@pytest.mark.service("kafka")
@pytest.mark.timeout(180)
def test_services_that_do_not_start_leave_nothing_behind(tmp_path: Path) -> None:
    with reserved_ports() as base_port:
        cluster = Cluster(tmp_path / "services", kafka=1, cassandra=1, base_port=base_port)
        require(cluster)
        (broker,), (node,) = cluster.kafka.nodes, cluster.cassandra.nodes
        with (
            closing(socket.create_server((node.host, node.port))),  # so that it cannot start, after the broker did
            pytest.raises(ServiceFailed),
            started_services(tmp_path / "services", ClusterOptions(), base_port),
        ):
            pytest.fail("the database has started")
        assert (broker.folder / "server.properties").exists(), "the broker was started"
        processes = [command_line(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()]
        assert [one for one in processes if str(tmp_path) in one] == []
