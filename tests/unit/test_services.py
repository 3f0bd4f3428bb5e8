"""Services without starting any: their settings, how processes are known and stopped, what is said of failures."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from infra.services import Cluster, Node, ServiceFailed, ServiceMissing, Size, is_taken, version_of
from infra.services.cassandra import FLAGS, cassandra_yaml
from infra.services.jars import POM, jars_of, java_for, java_version, major_version
from infra.services.kafka import cluster_id, server_properties
from infra.services.probes import (
    CONSISTENCY_ONE,
    _broker_ids,
    cassandra_answers,
    http_answers,
    kafka_brokers,
)
from tests.harness import eventually
from tidewheel.cluster_settings import known_settings

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [(19092, 19095), (19093, 19096), (19094, 19097)]

# Stands for a Java: listens at the port that is its last argument, or does what that says instead.
PROGRAM = f"""#!{sys.executable}
import signal, socket, sys
what = sys.argv[-1]
print("this is", what, flush=True)
if what == "fails":
    sys.exit("no such luck")
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    what = sys.argv[-2]
with socket.create_server(("127.0.0.1", int(what))) as server:
    while True:
        server.accept()[0].close()
"""


class Listener(Node):
    """A node that runs PROGRAM and answers when its port is open."""

    service: ClassVar[str] = "listener"
    ready_s: ClassVar[float] = 20.0

    def __init__(self, folder: Path, port: int, *arguments: str) -> None:
        super().__init__("listener", folder, "127.0.0.1", port)
        self._given = arguments

    def java(self) -> str:
        program = self.folder.parent / "program"
        if not program.exists():
            program.write_text(PROGRAM)
            program.chmod(0o755)
        return str(program)

    def _arguments(self) -> list[str]:
        return [str(self.port), *self._given]

    def answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), 1).close()
        except OSError:
            return False
        return True


@contextmanager
def listener(folder: Path, *arguments: str) -> Iterator[Listener]:
    node = Listener(folder, free_port(), *arguments)
    try:
        yield node
    finally:
        node.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- processes --------------------------------------------------------------------------------------------------------


def test_a_node_is_known_to_others_and_can_be_stopped_by_them(tmp_path: Path) -> None:
    with listener(tmp_path / "node") as node:
        assert (node.pid, node.memory_bytes(), node.log_tail) == (None, None, "")
        node.start()
        node.wait()
        pid = node.pid
        node.start()
        assert node.pid == pid, "what runs is left alone"
        other = Listener(tmp_path / "node", node.port)
        eventually(lambda: other.pid == pid)
        assert (other.memory_bytes() or 0) > 1_000_000
        other.stop()
        assert (node.pid, other.pid, node.answers()) == (None, None, False)
        assert node.log_tail == f"this is {node.port}"


def test_what_does_not_end_in_order_is_killed(tmp_path: Path) -> None:
    with listener(tmp_path / "node", "deaf") as node:
        node.start()
        node.wait()
        node.stop(within_s=0.2)
        assert node.pid is None


def test_a_paused_node_runs_no_code_until_it_is_resumed_or_stopped(tmp_path: Path) -> None:
    with listener(tmp_path / "node") as node:
        node.start()
        node.wait()
        node.pause()
        eventually(lambda: state_of(node) == "T")
        node.resume()
        eventually(lambda: state_of(node) != "T")
        node.pause()
        node.stop()
        assert node.pid is None


def state_of(node: Node) -> str:
    command = ["ps", "-o", "state=", "-p", str(node.pid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:1]


def test_a_process_that_has_the_pid_now_is_never_signalled(tmp_path: Path) -> None:
    node = Listener(tmp_path / "node", free_port())
    node.folder.mkdir()
    similar = f"-Dtidewheel.node={node.folder}-2"
    waits = ["sh", "-c", "read line"]
    with (
        subprocess.Popen(waits, stdin=subprocess.PIPE) as other,
        subprocess.Popen([*waits, similar], stdin=subprocess.PIPE) as another,
    ):
        try:
            for process in (other, another):
                (node.folder / "pid").write_text(f"{process.pid}\n")
                assert node.pid is None
                node.stop()
                node.kill()
                assert process.poll() is None
        finally:
            other.kill()
            another.kill()


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with listener(tmp_path / "node", "fails") as node:
        node.start()
        with pytest.raises(ServiceFailed, match=r"ended while it started(?s:.*)this is fails\nno such luck"):
            node.wait()


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "ready_s", 0.2)
    with listener(tmp_path / "node") as node:
        node.start()
        with pytest.raises(ServiceFailed, match=r"runs, but was not ready within 0 s"):
            node.wait(lambda: False)


def test_a_taken_port_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with listener(tmp_path / "node") as node, socket.create_server(("127.0.0.1", node.port)):
        assert is_taken("127.0.0.1", node.port)
        with pytest.raises(ServiceFailed, match=f"127.0.0.1:{node.port}: another process listens there"):
            node.start()
        assert node.pid is None


# --- probes -----------------------------------------------------------------------------------------------------------


def test_who_speaks_another_protocol_does_not_answer(tmp_path: Path) -> None:
    with listener(tmp_path / "node") as node:
        for _ in range(2):  # nobody listens; then somebody who hangs up
            assert kafka_brokers(node.host, node.port) == frozenset()
            assert not cassandra_answers(node.host, node.port, "SELECT key FROM system.local", CONSISTENCY_ONE)
            assert not http_answers(node.host, node.port, "/")
            node.start()
            node.wait()


def test_brokers_are_read_from_the_reply() -> None:
    def broker(number: int, rack: bytes | None) -> bytes:
        rack_bytes = b"\xff\xff" if rack is None else len(rack).to_bytes(2, "big") + rack
        return number.to_bytes(4, "big") + b"\x00\x04host" + (9092).to_bytes(4, "big") + rack_bytes

    reply = b"\0\0\0\x01" + b"\0\0\0\x02" + broker(1, None) + broker(7, b"rack") + b"and more"
    assert _broker_ids(reply) == {1, 7}


# --- settings of the services -----------------------------------------------------------------------------------------


def properties(number: int, of: int) -> dict[str, str]:
    text = server_properties(number, PAIRS[:of], Path("/data"))
    return dict(line.split("=", 1) for line in text.splitlines())


def test_one_broker_and_three_replicate_as_they_can() -> None:
    one, three = properties(1, 1), properties(2, 3)
    for name in ("default.replication.factor", "offsets.topic.replication.factor"):
        assert (one[name], three[name]) == ("1", "3")
    for name in ("min.insync.replicas", "transaction.state.log.min.isr"):
        assert (one[name], three[name]) == ("1", "2")
    assert three["controller.quorum.voters"] == "1@127.0.0.1:19095,2@127.0.0.1:19096,3@127.0.0.1:19097"
    assert three["listeners"] == "PLAINTEXT://127.0.0.1:19093,CONTROLLER://127.0.0.1:19096"
    assert one["auto.create.topics.enable"] == "false"
    assert one["group.min.session.timeout.ms"] == "6000"


def test_an_id_of_a_cluster_is_one_that_the_tool_takes() -> None:
    ids = {cluster_id(Path(f"/data/{number}")) for number in range(200)}
    assert len(ids) == 200
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{21}", one) for one in ids)


def test_a_node_of_cassandra_keeps_to_its_folder_and_the_loopback() -> None:
    settings = cassandra_yaml(Path("/data/node"), "127.0.0.2", 9, 8)
    folders = [value for name, value in settings.items() if name.endswith(("_directory", "_directories"))]
    assert len(folders) == 5
    assert all("/data/node/" in str(folder) for folder in folders)
    assert {settings["listen_address"], settings["rpc_address"]} == {"127.0.0.2"}
    assert settings["seed_provider"][0]["parameters"] == [{"seeds": "127.0.0.1:8"}]


def test_what_is_read_from_the_package_is_in_it() -> None:
    assert FLAGS.is_file()
    assert POM.is_file()
    assert all(re.fullmatch(r"\d+(\.\d+)+", version_of(service)) for service in ("kafka", "cassandra", "registry"))


def test_the_document_names_the_versions() -> None:
    document = (ROOT / "docs" / "SERVICES.md").read_text(encoding="utf-8")
    for service in ("kafka", "cassandra", "registry"):
        assert f"| {version_of(service)} |" in document


# --- what a folder has ------------------------------------------------------------------------------------------------


def test_a_service_can_be_added_to_a_folder_but_not_resized() -> None:
    kafka, cassandra = Size(kafka=1), Size(cassandra=3, registry=True)
    assert kafka.joined(cassandra) == Size(kafka=1, cassandra=3, registry=True)
    assert kafka.joined(Size(kafka=3)) is None
    assert kafka.joined(Size(kafka=1, base_port=20_000)) is None


@pytest.mark.parametrize("wrong", [{"kafka": 2}, {"cassandra": 4}, {"base_port": 80}, {"base_port": 65_500}])
def test_sizes_that_are_not_possible_are_refused(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nodes|base_port"):
        Cluster(tmp_path, **wrong)  # type: ignore[arg-type]


def test_nodes_have_ports_of_their_own() -> None:
    cluster = Cluster(Path("x"), kafka=3, cassandra=3, registry=True, base_port=20_000)
    taken = [(node.host, port) for node in cluster.nodes for port in node.ports]
    assert len(set(taken)) == len(taken) == 14
    assert all(20_000 <= port < 20_100 for _, port in taken)
    assert cluster.addresses() == {
        "kafka": "127.0.0.1:20092,127.0.0.1:20093,127.0.0.1:20094",
        "cassandra": "127.0.0.1,127.0.0.2,127.0.0.3",
        "cassandra_port": 20_042,
        "registry": "http://127.0.0.1:20081/apis/ccompat/v7",
    }


def test_nothing_was_started_in_a_strange_folder(tmp_path: Path) -> None:
    assert Cluster.recorded(tmp_path) is None
    (tmp_path / "services.json").write_text('{"kafka": "many"}')
    with pytest.raises(ServiceFailed, match=r"services\.json cannot be read"):
        Cluster.recorded(tmp_path)


def test_a_purge_leaves_what_is_not_ours(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, kafka=1)
    (tmp_path / "kafka-1" / "data").mkdir(parents=True)
    (tmp_path / "mine").touch()
    cluster.purge()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# --- Java and jars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_392"', 8),
        ("command not found", None),
    ],
)
def test_the_version_of_a_java(said: str, version: int | None) -> None:
    assert major_version(said) == version


def a_java(home: Path, version: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    return java


def test_the_java_that_fits_is_found_and_the_others_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, on_path = a_java(tmp_path / "chosen", "98.0.1"), a_java(tmp_path / "other", "99")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "chosen"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert java_for("X", 90) == str(chosen)
    assert java_for("X", 99, 99) == str(on_path)
    with pytest.raises(ServiceMissing, match=f"X needs Java 97, and there is none: {chosen} is Java 98") as raised:
        java_for("X", 97, 97)
    assert "openjdk-97" in raised.value.hint
    assert java_version(str(tmp_path / "nowhere")) is None


def test_without_maven_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ServiceMissing, match="Maven is needed once, to fetch kafka"):
        jars_of("kafka")


def test_a_fetch_that_failed_is_told_in_maven_s_words_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maven = tmp_path / "bin" / "mvn"
    maven.parent.mkdir()
    maven.write_text("#!/bin/sh\necho 'no route to host'\nexit 1\n")
    maven.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(maven.parent), prepend=os.pathsep)
    with pytest.raises(ServiceMissing, match=r"\(exit code 1\)\nno route to host"):
        jars_of("kafka")
    assert [path.suffix for path in (tmp_path / "cache/tidewheel/services").iterdir()] == [".lock"]


# --- the way with containers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """docker-compose.yml."""
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8")))


def test_every_container_is_looked_after(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        is_one_shot = service["restart"] == "no"
        assert ("healthcheck" in service) != is_one_shot, name
        assert is_one_shot or service["restart"] == "unless-stopped", name
        for other, how in service.get("depends_on", {}).items():
            ends = compose["services"][other]["restart"] == "no"
            assert how["condition"] == ("service_completed_successfully" if ends else "service_healthy"), name


def test_containers_listen_for_this_machine_alone_and_keep_their_data(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    kept = {name: service.get("volumes", [])[0].partition(":")[0] for name, service in stores(compose).items()}
    assert kept == {"kafka": "kafka", "cassandra": "cassandra"}
    assert compose["volumes"].keys() == {"kafka", "cassandra"}


def stores(compose: dict[str, Any]) -> dict[str, Any]:
    return {name: service for name, service in compose["services"].items() if "build" not in service}


def test_our_containers_are_given_settings_that_exist(compose: dict[str, Any]) -> None:
    known = {setting.variable for setting in known_settings().values()}
    ours = [service for service in compose["services"].values() if "build" in service]
    assert len(ours) == 6
    for service in ours:
        assert service["environment"].keys() <= known
        assert {"TIDEWHEEL_KAFKA_BOOTSTRAP", "TIDEWHEEL_CASSANDRA_HOSTS"} <= service["environment"].keys()


def test_containers_are_of_the_same_versions_and_settings_as_the_jars(compose: dict[str, Any]) -> None:
    images = {service["image"] for service in stores(compose).values()}
    assert images == {f"apache/kafka:{version_of('kafka')}", f"cassandra:{version_of('cassandra')}"}
    given = {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in compose["services"]["kafka"]["environment"].items()
    }
    own = properties(1, 1)
    differ = {name for name in own if own[name] != given.get(name)}
    its_own = {
        "listeners",
        "advertised.listeners",
        "listener.security.protocol.map",
        "controller.quorum.voters",
        "log.dirs",
    }
    assert differ == its_own  # it listens for the host, too


def test_the_image_has_all_packages_and_no_root() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for package in ("schemas", "scheduler", "workers", "cron", "infra", "tidewheel"):
        assert f"\nCOPY {package} {package}\n" in dockerfile
        assert f"!{package}" in ignored
    last_stage = dockerfile.rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!root|0)\w+$", last_stage, re.MULTILINE)
