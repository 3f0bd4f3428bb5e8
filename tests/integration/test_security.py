"""A cluster whose brokers and database ask for TLS, a certificate and a login: it works, and what is wrong is said."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from infra.cassandra import CassandraSettings
from infra.services import SUPERUSER, Security
from tests.cassandra_stage import TIMEOUT_S, session
from tests.certificates import Authority, security_in
from tests.cluster import Cluster, Process
from tests.harness import TASKS, eventually
from tests.services import own_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service("kafka"),
    pytest.mark.service("cassandra"),
]

APP = "tests.process_app:app"
LONG_S = 120.0
DEADLINE_S = 40.0  # of a process that cannot get what it needs, and does not wait for it
WRONG = "not-the-password"
TLS = ("ENABLED", "CA", "CERT", "KEY")


class Secured(NamedTuple):
    """Services that ask for all of it, and the files of their clients."""

    kafka: str
    cassandra: tuple[str, int]
    security: Security
    folder: Path

    def settings(self) -> dict[str, str]:
        """What a process is told, without TIDEWHEEL_."""
        client = str(self.security.client)
        tls = {"TLS_ENABLED": "true", "TLS_CA": str(self.security.ca), "TLS_CERT": client, "TLS_KEY": client}
        user, password = self.security.username, str(self.folder / "password")
        return {
            **{f"{service}_{name}": value for service in ("KAFKA", "CASSANDRA") for name, value in tls.items()},
            "KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "KAFKA_SASL_USERNAME": user,
            "KAFKA_SASL_PASSWORD_FILE": password,
            "CASSANDRA_USERNAME": user,
            "CASSANDRA_PASSWORD_FILE": password,
        }

    def cluster(self, folder: Path, **settings: str) -> Cluster:
        """A cluster on them; an empty setting is none."""
        given = self.settings() | settings
        return Cluster(folder, kafka=self.kafka, cassandra=self.cassandra, settings=given)

    def file(self, name: str, content: bytes) -> str:
        """The path of another file."""
        path = self.folder / name
        path.write_bytes(content)
        return str(path)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A broker and a node, with a user who may make keyspaces."""
    folder = tmp_path_factory.mktemp("secured")
    security = security_in(folder)
    (folder / "password").write_text(f"{security.password}\n")
    with own_cluster(kafka=1, cassandra=1, security=security) as services:
        host, port = services.cassandra.hosts[0], services.cassandra.port
        make_user(host, port, security)
        yield Secured(services.kafka.bootstrap, (host, port), security, folder)


def make_user(host: str, port: int, security: Security) -> None:
    """As an administrator does."""
    settings = CassandraSettings(
        hosts=(host,),
        port=port,
        username=SUPERUSER[0],
        password=SUPERUSER[1],
        ca_file=str(security.ca),
        certificate_file=str(security.client),
    )
    with session(settings) as opened:
        opened.run(f"CREATE ROLE {security.username} WITH LOGIN = true AND PASSWORD = '{security.password}'", TIMEOUT_S)
        opened.run(f"GRANT CREATE ON ALL KEYSPACES TO {security.username}", TIMEOUT_S)


# --- it works ---------------------------------------------------------------------------------------------------------


def test_a_task_goes_through_and_nothing_shows_the_password(tmp_path: Path, secured: Secured) -> None:
    password = secured.security.password
    with secured.cluster(tmp_path, LOG_LEVEL="debug") as cluster:
        process = cluster.start("all", APP)
        api = cluster.api(process)
        task_id = api.submit("note", {"journal": str(tmp_path / "journal"), "text": "safe"})
        assert api.until(task_id)["status"] == "SUCCEEDED"
        listed = eventually(lambda: api("GET", TASKS).json()["tasks"], "the view has it", LONG_S)
        assert [task["task_id"] for task in listed] == [task_id]
        told = [
            cluster.run("config", "show"),
            cluster.run("topics", "plan"),
            process.errors(),
            str(process.facts),
            command_lines(process),
            *(httpx.get(f"{process.facts['health']}{path}").text for path in ("/readyz", "/healthz", "/metrics")),
        ]
    assert "SCRAM-SHA-512" in told[0]
    assert "projector_child" in told[4]
    assert [text for text in told if password in text] == []


def test_plain_with_the_password_in_a_variable(tmp_path: Path, secured: Secured) -> None:
    password = secured.security.password
    given = {"KAFKA_SASL_MECHANISM": "PLAIN", "KAFKA_SASL_PASSWORD_FILE": "", "KAFKA_SASL_PASSWORD": password}
    with secured.cluster(tmp_path, **given) as cluster:
        told = cluster.run("config", "show"), cluster.run("topics", "plan")
    assert "PLAIN" in told[0]
    assert [text for text in told if password in text] == []


def command_lines(process: Process) -> str:
    """The arguments of a process and of its children, which every user of the machine can read."""
    pids = [str(process.process.pid)]
    for thread in Path(f"/proc/{process.process.pid}/task").iterdir():
        pids += (thread / "children").read_text().split()
    return "\n".join(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in pids)


# --- what is wrong is said --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_a_wrong_password_of_kafka(mechanism: str, tmp_path: Path, secured: Secured) -> None:
    given = {"KAFKA_SASL_MECHANISM": mechanism, "KAFKA_SASL_PASSWORD_FILE": secured.file("wrong", WRONG.encode())}
    check_ends(secured, tmp_path, ["scheduler"], given, 1, "kafka.sasl.username, its password and kafka.sasl.mechanism")


def test_a_mechanism_that_the_broker_does_not_have(tmp_path: Path, secured: Secured) -> None:
    check_ends(secured, tmp_path, ["scheduler"], {"KAFKA_SASL_MECHANISM": "SCRAM-SHA-256"}, 1, "kafka.sasl.mechanism")


@pytest.mark.parametrize("command", [["schema", "apply"], ["api"], ["projector"], ["all"]])
def test_a_wrong_password_of_cassandra(command: list[str], tmp_path: Path, secured: Secured) -> None:
    given = {"CASSANDRA_PASSWORD_FILE": secured.file("wrong", WRONG.encode())}
    check_ends(secured, tmp_path, command, given, 1, "check cassandra.username and its password")


def test_another_authority(tmp_path: Path, secured: Secured) -> None:
    other = secured.file("other.pem", Authority("another").certificate)
    check_ends(secured, tmp_path, ["scheduler"], {"KAFKA_TLS_CA": other}, 1, "kafka.tls.ca")
    check_ends(secured, tmp_path, ["schema", "apply"], {"CASSANDRA_TLS_CA": other}, 1, "cassandra.tls.ca")


def test_no_certificate_where_one_is_asked_for(tmp_path: Path, secured: Secured) -> None:
    of_kafka = {"KAFKA_TLS_CERT": "", "KAFKA_TLS_KEY": ""}
    check_ends(secured, tmp_path, ["scheduler"], of_kafka, 3, "without a certificate of ours (kafka.tls.cert)")
    of_cassandra = {"CASSANDRA_TLS_CERT": "", "CASSANDRA_TLS_KEY": ""}
    # Whether the node's own word of it arrives before the end of the connection is not certain.
    check_ends(secured, tmp_path, ["schema", "apply"], of_cassandra, None, "cassandra.tls.cert")


def test_a_client_without_tls(tmp_path: Path, secured: Secured) -> None:
    without = {f"{service}_TLS_{name}": "" for service in ("KAFKA", "CASSANDRA") for name in TLS}
    check_ends(secured, tmp_path, ["scheduler"], without, 3, "without TLS (kafka.tls.enabled)")
    check_ends(secured, tmp_path, ["schema", "apply"], without, 3, "without TLS (cassandra.tls.enabled)")


def test_a_client_without_a_login(tmp_path: Path, secured: Secured) -> None:
    of_kafka = {f"KAFKA_SASL_{name}": "" for name in ("MECHANISM", "USERNAME", "PASSWORD_FILE")}
    check_ends(secured, tmp_path, ["scheduler"], of_kafka, 3, "without SASL (kafka.sasl.mechanism)")
    of_cassandra = {"CASSANDRA_USERNAME": "", "CASSANDRA_PASSWORD_FILE": ""}
    check_ends(secured, tmp_path, ["schema", "apply"], of_cassandra, 1, "check cassandra.username and its password")


def test_an_api_that_cannot_speak_with_cassandra_says_so_while_it_takes_tasks(tmp_path: Path, secured: Secured) -> None:
    without = {f"CASSANDRA_TLS_{name}": "" for name in TLS}
    with ExitStack() as files:
        cluster = secured.cluster(tmp_path, **without)
        files.push(cluster)
        cluster.run("topics", "apply")
        process = cluster.start("api")
        ready = httpx.get(f"{process.facts['health']}/readyz")
        assert ready.status_code == 200
        assert "without TLS (cassandra.tls.enabled)" in ready.text


def check_ends(
    secured: Secured, folder: Path, command: list[str], given: Mapping[str, str], code: int | None, said: str
) -> None:
    """A process that does not wait ends in time, with the name of what to change and without the password."""
    cluster = secured.cluster(folder, STARTUP_TIMEOUT_S="0", **given)
    if command in (["api"], ["projector"], ["all"]):
        secured.cluster(folder, KAFKA_PREFIX=cluster.kafka.prefix).run("topics", "apply")
    done = subprocess.run(
        [sys.executable, "-m", "tidewheel", *command],
        env=os.environ | cluster.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode in ((1, 3) if code is None else (code,)), done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    for secret in (secured.security.password, WRONG):
        assert secret not in done.stdout + done.stderr
