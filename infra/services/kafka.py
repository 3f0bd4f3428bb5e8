"""Kafka in KRaft mode: one broker, or three that are controllers as well."""

from __future__ import annotations

import base64
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from infra.services.errors import ServiceFailed
from infra.services.jars import jars_of, java_for
from infra.services.node import Node
from infra.services.probes import Login, kafka_brokers
from infra.services.security import Security

HOST = "127.0.0.1"
JAVA_OLDEST = 17
HEAP = "-Xmx512m"
FORMAT_S = 60.0
INTERNAL_PARTITIONS = 8  # of the topics for offsets and transactions: 50 each would only make a start slow


class Broker(Node):
    """A broker and controller. `ports` has a pair for every broker of the cluster: of clients, of controllers."""

    service: ClassVar[str] = "kafka"
    ready_s: ClassVar[float] = 60.0

    def __init__(
        self, folder: Path, number: int, ports: Sequence[tuple[int, int]], security: Security | None = None
    ) -> None:
        """`number` counts from 1; `folder` is that of the whole cluster. With `security` clients need all of it."""
        super().__init__(f"kafka-{number}", folder / f"kafka-{number}", HOST, ports[number - 1][0])
        self._number, self._ports = number, tuple(ports)
        self._cluster_id = cluster_id(folder.absolute())
        self._security = security
        self._login = None if security is None else Login(security.context, security.username, security.password)

    @property
    def ports(self) -> tuple[int, ...]:
        """For clients, and for controllers."""
        return self._ports[self._number - 1]

    def answers(self) -> bool:
        """Whether it counts itself among the brokers: then it has registered and serves."""
        return self._number in kafka_brokers(self.host, self.port, self._login)

    def is_settled(self) -> bool:
        """Whether it sees all brokers."""
        return len(kafka_brokers(self.host, self.port, self._login)) == len(self._ports)

    def java(self) -> str:
        """The path of the Java that runs it. Raises ServiceMissing."""
        return java_for("Kafka", JAVA_OLDEST)

    def _arguments(self) -> list[str]:
        classpath = f"{jars_of('kafka')}/*"
        settings = self.folder / "server.properties"
        properties = server_properties(self._number, self._ports, self.folder / "data", self._security)
        settings.write_text(properties, "utf-8")
        if not (self.folder / "data" / "meta.properties").exists():
            self._format(classpath, settings)
        flags = [HEAP, "-XX:+UseSerialGC"]
        if len(self._ports) > 1:
            flags.append("-XX:TieredStopAtLevel=1")  # three compilers at once would slow each other's start down
        return [*flags, "-cp", classpath, "kafka.Kafka", str(settings)]

    def _format(self, classpath: str, settings: Path) -> None:
        tool = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", classpath, "kafka.tools.StorageTool", "format"]
        command = [self.java(), *tool, "-t", self._cluster_id, "-c", str(settings), *self._scram()]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FORMAT_S)
        except subprocess.TimeoutExpired as error:
            raise self._unprepared(f"did not end within {FORMAT_S:.0f} s") from error
        if done.returncode:
            raise self._unprepared((done.stdout + done.stderr).strip())

    def _scram(self) -> list[str]:
        """The user, whom the metadata hold from the beginning."""
        if self._security is None:
            return []
        user = f"name={self._security.username},password={self._security.password}"
        return ["--add-scram", f"SCRAM-SHA-512=[{user}]"]

    def _unprepared(self, said: str) -> ServiceFailed:
        return ServiceFailed(
            f"{self.name}: its folder {self.folder} could not be prepared",
            hint=f"is the disk full or read-only? If its data are not needed, remove {self.folder}",
            log=said,
        )


def cluster_id(folder: Path) -> str:
    """An id for the cluster in a folder, always the same: 22 characters, which do not begin with a dash."""
    return base64.urlsafe_b64encode(b"\0" + uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).bytes[1:]).decode()[:22]


def server_properties(
    number: int, ports: Sequence[tuple[int, int]], data: Path, security: Security | None = None
) -> str:
    """The settings of broker `number` of as many as there are pairs of ports. All listen on the loopback alone."""
    client, controller = ports[number - 1]
    replicas, in_sync = (3, 2) if len(ports) >= 3 else (1, 1)
    voters = ",".join(f"{n}@{HOST}:{port}" for n, (_, port) in enumerate(ports, 1))
    listener = "PLAINTEXT" if security is None else "SASL_SSL"
    settings = {
        "process.roles": "broker,controller",
        "node.id": number,
        "controller.quorum.voters": voters,
        "listeners": f"{listener}://{HOST}:{client},CONTROLLER://{HOST}:{controller}",
        "advertised.listeners": f"{listener}://{HOST}:{client}",
        "inter.broker.listener.name": listener,
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{listener}:{listener}",
        "log.dirs": data,
        "auto.create.topics.enable": "false",  # a topic with the wrong partitions is worse than an error
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "offsets.topic.num.partitions": INTERNAL_PARTITIONS,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "transaction.state.log.num.partitions": INTERNAL_PARTITIONS,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        "group.min.session.timeout.ms": 6000,
        "group.initial.rebalance.delay.ms": 0,
        **({} if security is None else _secured(security)),
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def _secured(security: Security) -> dict[str, object]:
    """SASL over TLS, also between the brokers, which log in as the user does."""
    plain, scram = "org.apache.kafka.common.security.plain.PlainLoginModule", "org.apache.kafka.common.security.scram"
    login = f'username="{security.username}" password="{security.password}"'
    user = f'user_{security.username}="{security.password}"'
    return {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{plain} required {login} {user};",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": f"{scram}.ScramLoginModule required;",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": security.server,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": security.ca,
        "listener.name.sasl_ssl.ssl.client.auth": "required",  # without the prefix it is not in force beside SASL
    }
