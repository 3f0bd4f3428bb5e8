"""All services of one folder: started, looked at and stopped together, or node by node."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from infra.services.cassandra import CassandraNode
from infra.services.errors import ServiceFailed
from infra.services.jars import are_cached, jars_of, locked, version_of
from infra.services.kafka import Broker
from infra.services.node import STOP_S, Node
from infra.services.registry import RegistryNode
from infra.services.security import Security

BASE_PORT = 19000  # not where these services are found by default, so that a user's own are left alone
PORTS_TAKEN = 100  # all ports of a cluster are in base_port … base_port + 99
SIZES = (0, 1, 3)  # two nodes are no more available than one
_CASSANDRA, _STORAGE, _REGISTRY, _MANAGEMENT, _KAFKA, _CONTROLLER = 42, 70, 81, 82, 92, 95  # from base_port
_RECORD = "services.json"


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes of each service a folder has, and from where on their ports are."""

    kafka: int = 0
    cassandra: int = 0
    registry: bool = False
    base_port: int = BASE_PORT

    def __post_init__(self) -> None:
        if self.kafka not in SIZES or self.cassandra not in SIZES:
            raise ValueError(f"{self}: a service has 0, 1 or 3 nodes")
        if not 1024 <= self.base_port <= 65_535 - PORTS_TAKEN:
            raise ValueError(f"{self}: base_port is from 1024 to {65_535 - PORTS_TAKEN}")

    def __str__(self) -> str:
        registry = "a" if self.registry else "no"
        return (
            f"{self.kafka} Kafka brokers, {self.cassandra} Cassandra nodes, {registry} registry"
            f" and base port {self.base_port}"
        )

    def joined(self, other: Size) -> Size | None:
        """Both in one folder: a service can be added later. None: the size of one, or the ports, cannot change."""
        same = (self.kafka, self.cassandra), (other.kafka, other.cassandra)
        if self.base_port != other.base_port or any(a and b and a != b for a, b in zip(*same, strict=True)):
            return None
        return Size(
            kafka=self.kafka or other.kafka,
            cassandra=self.cassandra or other.cassandra,
            registry=self.registry or other.registry,
            base_port=self.base_port,
        )


class Step(StrEnum):
    """What `Cluster.up` says of a node, or of a service whose jars it fetches."""

    FETCHING = "fetching"
    STARTING = "starting"
    UP = "up"
    WAS_UP = "was up"


@dataclass(frozen=True)
class Kafka:
    """The brokers of a cluster."""

    nodes: tuple[Broker, ...]

    @property
    def bootstrap(self) -> str:
        """host:port of all, with commas."""
        return ",".join(node.address for node in self.nodes)


@dataclass(frozen=True)
class Cassandra:
    """The nodes of a cluster."""

    nodes: tuple[CassandraNode, ...]
    port: int

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses of all."""
        return tuple(node.host for node in self.nodes)


class Cluster:
    """The services of a folder. To make one starts nothing; what runs already may have been started by another process.

    Methods raise ServiceMissing where this machine lacks what is needed, ServiceFailed where a service does not work.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kafka: int = 0,
        cassandra: int = 0,
        registry: bool = False,
        base_port: int = BASE_PORT,
        security: Security | None = None,
    ) -> None:
        """`security` is of Kafka and Cassandra, and not recorded. ValueError: sizes or ports that are not possible."""
        self.folder = folder.absolute()
        self.size = Size(kafka=kafka, cassandra=cassandra, registry=registry, base_port=base_port)
        ports = [(base_port + _KAFKA + n, base_port + _CONTROLLER + n) for n in range(kafka)]
        storage, native = base_port + _STORAGE, base_port + _CASSANDRA
        self.kafka = Kafka(tuple(Broker(self.folder, n + 1, ports, security) for n in range(kafka)))
        nodes = (CassandraNode(self.folder, n + 1, cassandra, native, storage, security) for n in range(cassandra))
        self.cassandra = Cassandra(tuple(nodes), native)
        registry_ports = base_port + _REGISTRY, base_port + _MANAGEMENT
        self.registry = RegistryNode(self.folder, *registry_ports) if registry else None

    @classmethod
    def recorded(cls, folder: Path) -> Cluster | None:
        """What was started in a folder, whether it runs or not; None if nothing was."""
        size = recorded_size(folder)
        return None if size is None else cls(folder, **msgspec.structs.asdict(size))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes of all services."""
        registry = () if self.registry is None else (self.registry,)
        return (*self.kafka.nodes, *registry, *self.cassandra.nodes)

    def node(self, name: str) -> Node:
        """A node by its name, for example `kafka-2`. KeyError: there is none."""
        return {node.name: node for node in self.nodes}[name]

    def addresses(self) -> dict[str, str | int]:
        """Where clients find what is there."""
        found: dict[str, str | int] = {}
        if self.kafka.nodes:
            found["kafka"] = self.kafka.bootstrap
        if self.cassandra.nodes:
            found |= {"cassandra": ",".join(self.cassandra.hosts), "cassandra_port": self.cassandra.port}
        if self.registry is not None:
            found["registry"] = self.registry.url
        return found

    def fetch(self, on_step: Callable[[str, Step], None] = lambda name, step: None) -> None:
        """Make sure that all could be started: there is a Java for each node, and its jars are in the cache."""
        for node in self.nodes:
            node.java()  # before anything is fetched in vain
        for service in dict.fromkeys(node.service for node in self.nodes):
            if not are_cached(service):
                on_step(f"{service} {version_of(service)}", Step.FETCHING)
            jars_of(service)

    def up(self, on_step: Callable[[str, Step], None] = lambda name, step: None) -> None:
        """Start what does not run, wait until all answers and sees the others. `on_step` is told of every step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / "lock"):
            self.fetch(on_step)
            self._record()
            started = [node for node in self.nodes if not _is_up(node, on_step)]
            for node in started:
                on_step(node.name, Step.STARTING)
                node.start()
                if node.starts_alone and node is not started[-1]:
                    node.wait()
            for node in started:
                node.wait()
                on_step(node.name, Step.UP)
            for node in self.nodes:
                node.wait(node.is_settled)

    def down(self, within_s: float = STOP_S) -> None:
        """Stop what runs, all at once; kill what has not ended after `within_s`. Waits for an `up` under way."""
        if not self.folder.exists():
            return
        with locked(self.folder / "lock"):
            give_up_at = time.monotonic() + within_s
            for node, pid in [(node, node.tell_to_stop()) for node in self.nodes]:
                node.finish(pid, max(0.0, give_up_at - time.monotonic()))

    def purge(self) -> None:
        """Remove all that the nodes left in the folder, and the folder if it has nothing else. They must be down."""
        for node in self.nodes:
            shutil.rmtree(node.folder, ignore_errors=True)
        for name in (_RECORD, "lock"):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else's files are in it
            self.folder.rmdir()

    def _record(self) -> None:
        """So that others know what there is to stop, even if we do not live to see it start."""
        before = recorded_size(self.folder) or self.size
        size = before.joined(self.size)
        if size is None:
            raise ServiceFailed(
                f"{self.folder} was made with {before}, which cannot become {self.size}",
                hint="choose another --data folder, or remove this one: tidewheel services down --purge",
            )
        (self.folder / _RECORD).write_bytes(msgspec.json.encode(size))


def _is_up(node: Node, on_step: Callable[[str, Step], None]) -> bool:
    is_up = node.pid is not None and node.answers()
    if is_up:
        on_step(node.name, Step.WAS_UP)
    return is_up


def recorded_size(folder: Path) -> Size | None:
    """How many nodes a folder was made with; None if it has none. Raises ServiceFailed if it cannot be read."""
    try:
        return msgspec.json.decode((folder / _RECORD).read_bytes(), type=Size)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise ServiceFailed(
            f"{folder / _RECORD} cannot be read: {error}", hint="is it the right --data folder?"
        ) from error
