"""The brokers as a process of a cluster sees them: whether its topics are there, and whether they answer now."""

from __future__ import annotations

import threading

import structlog

from infra.kafka.topics import TopicAdmin, wanted_topics
from infra.topics import TopicCatalog
from scheduler.api.health import PartHealth
from schemas.errors import Fatal, Retriable, TidewheelIOError
from schemas.topics import SHARD_STATE, TASK_EVENTS, TASK_REPORTS, TASK_REQUESTS

PROBE_S = 2.0  # for one question to the brokers; at the start a signal is noticed after it
PROBE_EVERY_S = 5.0
PER_SHARD = (TASK_REQUESTS, TASK_REPORTS, TASK_EVENTS, SHARD_STATE)

_log = structlog.get_logger(__name__)


def check_topics(admin: TopicAdmin, catalog: TopicCatalog) -> None:
    """Retriable: topics are missing, or no broker answers. Fatal: there are not as many shards as we think.

    Topics of queues are used as they are; what differs is said in the log.
    """
    counts = admin.partition_counts(PROBE_S)
    wanted = {f"{admin.prefix}{spec.name}": spec for spec in catalog if not spec.is_prefix}
    missing = sorted(wanted.keys() - counts.keys())
    if missing:
        raise Retriable(f"topics are missing ({', '.join(missing)}): run `tidewheel topics apply`")
    for name, spec in wanted.items():
        if spec.name in PER_SHARD and counts[name] != spec.partitions:
            raise Fatal(
                f"{name} has {counts[name]} partitions, and shards is {spec.partitions}: the number is fixed for the "
                f"life of a cluster; set shards={counts[name]}, or another kafka.prefix for another cluster"
            )
    for topic in wanted_topics(catalog, admin.prefix, counts):
        found, configured = counts[topic.name], topic.spec.partitions
        if topic.spec.is_prefix and found != configured:
            what = "a topic of a queue has other partitions than configured, and is used as it is"
            hint = f"at most {found} workers share it; see `tidewheel topics plan`"
            _log.warning(what, topic=topic.name, partitions=found, configured=configured, hint=hint)


class BrokerWatch:
    """Asks the brokers again and again: the clients of the roles connect by themselves and do not say how they fare."""

    def __init__(self, admin: TopicAdmin) -> None:
        """They answered a moment ago."""
        self._admin = admin
        self._reason: str | None = None

    def run(self, stop: threading.Event) -> None:
        """Ask until `stop` is set."""
        while not stop.wait(PROBE_EVERY_S):
            try:
                self._admin.ping(PROBE_S)
                self._reason = None
            except TidewheelIOError as error:  # rights may come back as well as brokers do
                self._reason = str(error)

    def readiness(self) -> PartHealth:
        """Whether they answered the last time; at once, from any thread."""
        return PartHealth(name="kafka", is_ok=self._reason is None, detail=self._reason or "")
