"""Real services without a container engine: Kafka, Cassandra and a schema registry, run from their published jars.

For trials, tests and benchmarks: one machine, the loopback alone, small heaps. `tidewheel services` is the command.
"""

from __future__ import annotations

from infra.services.cassandra import SUPERUSER, CassandraNode
from infra.services.cluster import BASE_PORT, PORTS_TAKEN, SIZES, Cassandra, Cluster, Kafka, Size, Step, recorded_size
from infra.services.errors import ServiceError, ServiceFailed, ServiceMissing
from infra.services.jars import locked, version_of
from infra.services.kafka import Broker
from infra.services.node import STOP_S, Node
from infra.services.probes import is_taken
from infra.services.registry import RegistryNode
from infra.services.security import Security

__all__ = [
    "Cluster",
    "Kafka",
    "Cassandra",
    "Node",
    "Broker",
    "CassandraNode",
    "RegistryNode",
    "Security",
    "SUPERUSER",
    "Size",
    "Step",
    "SIZES",
    "BASE_PORT",
    "PORTS_TAKEN",
    "STOP_S",
    "recorded_size",
    "version_of",
    "is_taken",
    "locked",
    "ServiceError",
    "ServiceMissing",
    "ServiceFailed",
]
