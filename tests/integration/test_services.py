"""Real services: they come up, are found again, survive what tests do to them, and are gone when nobody needs them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from infra.registry import RegistryIds
from infra.services import Cluster, is_taken
from infra.services.node import has_ended
from infra.services.probes import CONSISTENCY_ALL, CONSISTENCY_ONE, cassandra_answers, kafka_brokers
from tests import services
from tests.harness import eventually, notes

ROOT = Path(__file__).resolve().parents[2]
LISTENING = "0A"  # the state in /proc/net/tcp
RUN_S = 300.0  # a whole command or run, with what it has to fetch

# One after the other: three nodes of anything are enough for a small machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_S)]


def tidewheel_services(*arguments: str, code: int = 0) -> Any:
    """What a command answers."""
    command = [sys.executable, "-m", "tidewheel", "services", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout if done.stdout else done.stderr)


@pytest.mark.service("kafka")
def test_the_command_starts_what_does_not_run_and_stops_by_pid(tmp_path: Path) -> None:
    services.require(Cluster(tmp_path, kafka=1))
    data = ("--data", str(tmp_path / "services"))
    with services.reserved_ports() as base_port:
        try:
            address = tidewheel_services("up", *data, "--cassandra", "0", "--base-port", str(base_port))
            assert address == {"kafka": f"127.0.0.1:{base_port + 92}"}
            assert kafka_brokers("127.0.0.1", base_port + 92) == {1}
            (first,) = tidewheel_services("status", *data)["services"]
            assert (first["node"], first["state"], first["memory_bytes"] > 0) == ("kafka-1", "answers", True)

            assert tidewheel_services("up", *data) == address
            (same,) = tidewheel_services("status", *data)["services"]
            assert same["pid"] == first["pid"]

            os.kill(first["pid"], signal.SIGKILL)
            eventually(lambda: has_ended(first["pid"]))
            (gone,) = tidewheel_services("status", *data, code=1)["services"]
            assert (gone["state"], gone["pid"]) == ("stopped", None)

            assert tidewheel_services("up", *data) == address
            refusal = tidewheel_services("up", *data, "--kafka", "3", code=1)
            assert "which cannot become 3 Kafka brokers" in refusal["detail"]
        finally:
            stopped = tidewheel_services("down", *data, "--purge")
    assert stopped == {"stopped": ["kafka-1"], "purged": True}
    assert not is_taken("127.0.0.1", base_port + 92)
    assert list(tmp_path.iterdir()) == []
    assert tidewheel_services("status", *data, code=1)["kind"] == "no-services"


@pytest.mark.service("cassandra")
def test_three_nodes_of_cassandra_are_one_cluster() -> None:
    with services.own_cluster(cassandra=3) as cluster:
        first, second, _ = cluster.cassandra.nodes
        replicated = "{'class': 'NetworkTopologyStrategy', 'datacenter1': 3}"
        create = f"CREATE KEYSPACE tasks WITH replication = {replicated}"
        assert cassandra_answers(first.host, first.port, create, CONSISTENCY_ONE)
        assert cassandra_answers(
            first.host, first.port, "CREATE TABLE tasks.t (k int PRIMARY KEY, v int)", CONSISTENCY_ONE
        )
        index = "CREATE INDEX ON tasks.t (v) USING 'sai'"
        assert cassandra_answers(first.host, first.port, index, CONSISTENCY_ONE)
        insert = "INSERT INTO tasks.t (k, v) VALUES (1, 2)"
        eventually(lambda: cassandra_answers(second.host, second.port, insert, CONSISTENCY_ALL))
        second.kill()
        eventually(lambda: not cassandra_answers(first.host, first.port, insert, CONSISTENCY_ALL))
        assert first.answers()
        cluster.up()
        assert cassandra_answers(second.host, second.port, insert, CONSISTENCY_ALL)


@pytest.mark.service("kafka")
@pytest.mark.service("cassandra")
@pytest.mark.service("registry")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="who listens where is read from /proc")
def test_services_listen_on_their_own_ports_of_the_loopback_alone() -> None:
    with services.own_cluster(kafka=1, cassandra=1, registry=True) as cluster:
        for node in cluster.nodes:
            assert node.pid is not None
            assert listening(node.pid) == {(node.host, port) for port in node.ports}


def listening(pid: int) -> set[tuple[str, int]]:
    """Where a process listens: address and port."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENING and f"socket:[{columns[9]}]" in sockets:
                address, _, port = columns[1].partition(":")
                found.add((str(ip_address(int(address[-8:], 16).to_bytes(4, sys.byteorder))), int(port, 16)))
    return found


@pytest.mark.service("registry")
def test_the_registry_knows_its_ids_after_a_restart() -> None:
    with services.own_cluster(registry=True) as cluster:
        assert cluster.registry is not None
        ids = RegistryIds(cluster.registry.url)
        try:
            text = '{"type": "record", "name": "Sample", "fields": [{"name": "n", "type": "int"}]}'
            number = ids.register("Sample", text)
            cluster.registry.stop()
            cluster.up()
            assert ids.register("Sample", text) == number
        finally:
            ids.close()


# --- services of a run of the tests -----------------------------------------------------------------------------------

ASKING = """
import os, pathlib, pytest, select
from tests import services
from tests.harness import note

@pytest.mark.parametrize("n", range(2))
def test_asks(n):
    note("asked", services.kafka_bootstrap())
    if os.environ["ENDS"] == "no":
        select.select([], [], [], 300)
"""


def run_of_tests(folder: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    """A run of two tests that ask for Kafka, with files of its own for whatever is temporary."""
    (folder / "test_asking.py").write_text(ASKING)
    (folder / "tmp").mkdir()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *options,
    ]
    return subprocess.Popen(
        [*command, "test_asking.py"],
        cwd=folder,
        env={**own_environment(), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def own_environment() -> Mapping[str, str]:
    """Ours, without what it says of this run."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "TIDEWHEEL_TEST_")) and name != "CI"
    }


@pytest.mark.service("kafka")
@pytest.mark.parametrize("ends", ["in order", "by SIGKILL"])
def test_workers_of_a_run_share_a_service_that_ends_with_it(ends: str, tmp_path: Path) -> None:
    services.require(Cluster(tmp_path, kafka=1))
    with run_of_tests(tmp_path, "-n", "2", ENDS="yes" if ends == "in order" else "no") as run:
        try:
            eventually(lambda: len(notes(tmp_path / "asked")) == 2, "both asked", RUN_S)
        finally:
            if ends == "by SIGKILL":
                os.killpg(run.pid, signal.SIGKILL)
            said = run.communicate(timeout=RUN_S)[0]
    assert ends == "by SIGKILL" or "2 passed" in said
    (address,) = set(notes(tmp_path / "asked"))
    host, _, port = address.partition(":")
    eventually(lambda: not is_taken(host, int(port)), "the broker is gone")
    eventually(lambda: not list((tmp_path / "tmp").glob("tidewheel-tests-*")), "its folder is gone")


@pytest.mark.parametrize(("ci", "outcome"), [("", "2 skipped"), ("true", "2 failed")])
def test_what_cannot_be_had_is_skipped_but_not_in_ci(ci: str, outcome: str, tmp_path: Path) -> None:
    missing = {"PATH": "/nowhere", "JAVA_HOME": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with run_of_tests(tmp_path, ENDS="yes", CI=ci, **missing) as run:
        said = run.communicate(timeout=RUN_S)[0]
    assert outcome in said
    assert "there is no mvn on PATH" in said or "needs Java" in said


def test_a_service_that_the_environment_names_is_taken(tmp_path: Path) -> None:
    with run_of_tests(tmp_path, ENDS="yes", TIDEWHEEL_TEST_KAFKA="broker:1234") as run:
        said = run.communicate(timeout=RUN_S)[0]
    assert "2 passed" in said
    assert notes(tmp_path / "asked") == ["broker:1234"] * 2
    assert list((tmp_path / "tmp").iterdir()) == []
