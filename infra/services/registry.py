"""A schema registry with Confluent's interface: Apicurio, its content in a file database."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from infra.services.jars import jars_of, java_for
from infra.services.node import Node
from infra.services.probes import http_answers

HOST = "127.0.0.1"
JAVA_OLDEST = 21
PATH = "/apis/ccompat/v7"


class RegistryNode(Node):
    """The registry."""

    service: ClassVar[str] = "registry"
    ready_s: ClassVar[float] = 90.0

    def __init__(self, folder: Path, port: int, management_port: int) -> None:
        """`folder` is that of all services."""
        super().__init__("registry", folder / "registry", HOST, port)
        self._management_port = management_port

    @property
    def ports(self) -> tuple[int, ...]:
        """For clients, and for health and metrics of its own."""
        return self.port, self._management_port

    @property
    def url(self) -> str:
        """What clients of a Confluent-compatible registry are given."""
        return f"http://{self.address}{PATH}"

    def answers(self) -> bool:
        """Whether it lists its subjects."""
        return http_answers(self.host, self.port, f"{PATH}/subjects")

    def java(self) -> str:
        """The path of the Java that runs it. Raises ServiceMissing."""
        return java_for("The schema registry", JAVA_OLDEST)

    def _arguments(self) -> list[str]:
        jars = jars_of("registry")
        return [
            "-Xmx512m",
            "-XX:+UseSerialGC",
            f"-Dquarkus.http.host={self.host}",
            f"-Dquarkus.http.port={self.port}",
            f"-Dquarkus.management.host={self.host}",
            f"-Dquarkus.management.port={self._management_port}",
            "-Dapicurio.storage.kind=sql",
            "-Dapicurio.storage.sql.kind=h2",
            f"-Dapicurio.datasource.url=jdbc:h2:file:{self.folder}/content",
            "-jar",
            str(jars / "quarkus-run.jar"),
        ]
