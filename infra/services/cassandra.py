"""Cassandra: one node, or three on 127.0.0.1, 127.0.0.2 and 127.0.0.3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from infra.services.jars import jars_of, java_for
from infra.services.node import Node
from infra.services.probes import CONSISTENCY_ALL, CONSISTENCY_ONE, Login, cassandra_answers
from infra.services.security import Security

JAVA = 17  # the only version that Cassandra 5.0 supports and that the flags are for
RING_DELAY_MS = 10_000  # a node gives up its start if the others are silent for about so long; they may be busy
SUPERUSER = ("cassandra", "cassandra")  # of a new secured node, and the password
FLAGS = Path(__file__).with_name("cassandra-jvm17.options")
_OF_ITSELF = "SELECT key FROM system.local"
# Kept three times: with consistency ALL it is readable only if this node sees three that are up.
_OF_ALL = "SELECT parent_id FROM system_distributed.parent_repair_history WHERE parent_id = {}"
_ANY_ID = "00000000-0000-1000-8000-000000000000"
_LOGBACK = """\
<configuration>
  <appender name="log" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level %date{ISO8601} [%thread] %logger{20}: %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="log"/></root>
</configuration>
"""


class CassandraNode(Node):
    """A node; all of a cluster have the same ports, on addresses of their own."""

    service: ClassVar[str] = "cassandra"
    ready_s: ClassVar[float] = 120.0
    starts_alone: ClassVar[bool] = True  # nodes that join at the same time do not learn of each other

    def __init__(
        self, folder: Path, number: int, of: int, port: int, storage_port: int, security: Security | None = None
    ) -> None:
        """`number` counts from 1, of `of` nodes; `folder` is that of the whole cluster.

        With `security` clients need TLS, a certificate and a login; the first one is SUPERUSER.
        """
        super().__init__(f"cassandra-{number}", folder / f"cassandra-{number}", f"127.0.0.{number}", port)
        self._of, self._storage_port, self._security = of, storage_port, security
        self._login = None if security is None else Login(security.context, *SUPERUSER)

    @property
    def ports(self) -> tuple[int, ...]:
        """For clients, and for other nodes."""
        return self.port, self._storage_port

    def answers(self) -> bool:
        """Whether it answers a query."""
        return cassandra_answers(self.host, self.port, _OF_ITSELF, CONSISTENCY_ONE, self._login)

    def is_settled(self) -> bool:
        """Whether it sees all nodes as up."""
        if self._of < 3:
            return self.answers()
        return cassandra_answers(self.host, self.port, _OF_ALL.format(_ANY_ID), CONSISTENCY_ALL, self._login)

    def java(self) -> str:
        """The path of the Java that runs it. Raises ServiceMissing."""
        return java_for("Cassandra", JAVA, JAVA)

    def _arguments(self) -> list[str]:
        jars = jars_of("cassandra")
        conf = self.folder / "conf"
        conf.mkdir(exist_ok=True)
        settings = cassandra_yaml(self.folder, self.host, self.port, self._storage_port)
        if self._security is not None:
            settings |= _secured(self._security)
        (conf / "cassandra.yaml").write_text(json.dumps(settings, indent=2), "utf-8")  # JSON is YAML
        (conf / "logback.xml").write_text(_LOGBACK, "utf-8")
        (agent,) = jars.glob("jamm-*.jar")
        return [
            f"@{FLAGS}",
            "-Xms256m",
            "-Xmx768m" if self._of == 1 else "-Xmx512m",
            "-XX:+UseSerialGC",
            f"-Dcassandra.ring_delay_ms={RING_DELAY_MS if self._of > 1 else 0}",
            f"-Dcassandra.storagedir={self.folder}",
            f"-javaagent:{agent}",
            "-cp",
            f"{conf}:{jars}/*",
            "org.apache.cassandra.service.CassandraDaemon",
        ]


def cassandra_yaml(folder: Path, host: str, port: int, storage_port: int) -> dict[str, Any]:
    """The settings of a node that keeps all it has in `folder` and whose first contact is the node on 127.0.0.1."""
    seeds = {"seeds": f"127.0.0.1:{storage_port}"}
    return {
        "cluster_name": "tidewheel",
        "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
        "num_tokens": 4,
        "auto_bootstrap": False,  # the nodes of a new cluster have nothing to hand over
        "endpoint_snitch": "SimpleSnitch",
        "seed_provider": [{"class_name": "org.apache.cassandra.locator.SimpleSeedProvider", "parameters": [seeds]}],
        "listen_address": host,
        "rpc_address": host,
        "native_transport_port": port,
        "storage_port": storage_port,
        "commitlog_sync": "periodic",
        "commitlog_sync_period": "10000ms",
        "data_file_directories": [str(folder / "data")],
        "commitlog_directory": str(folder / "commitlog"),
        "saved_caches_directory": str(folder / "saved_caches"),
        "hints_directory": str(folder / "hints"),
        "cdc_raw_directory": str(folder / "cdc_raw"),
    }


def _secured(security: Security) -> dict[str, Any]:
    """The settings that ask clients for a login and a certificate. Between nodes all stays as it is."""
    return {
        "authenticator": "PasswordAuthenticator",
        "authorizer": "CassandraAuthorizer",
        "role_manager": "CassandraRoleManager",
        "client_encryption_options": {
            "enabled": True,
            "optional": False,
            "require_client_auth": True,
            "ssl_context_factory": {"class_name": "org.apache.cassandra.security.PEMBasedSslContextFactory"},
            "keystore": str(security.server),
            "truststore": str(security.ca),
        },
    }
