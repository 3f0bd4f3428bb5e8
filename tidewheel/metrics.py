"""The engine's figures for Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tidewheel.embedded import Engine

QUEUES_MAX = 100  # queues with series of their own; the others are counted under "other"


class _EngineCollector(Collector):
    """Turns what the parts count into metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        yield self._tasks()
        yield self._depth()
        shards = list(self._engine.runtime.hosts.values())
        yield CounterMetricFamily(
            "tidewheel_shard_reloads", "Loads of a shard after a doubt.", sum(host.reloads for host in shards)
        )
        yield CounterMetricFamily(
            "tidewheel_stale_reports",
            "Reports of attempts that did not run any more.",
            sum(host.shard.stale_reports for host in shards),
        )
        yield GaugeMetricFamily("tidewheel_view_lag_events", "Events not yet in the view.", self._engine.view_lag())
        yield from self._worker()

    def _tasks(self) -> Metric:
        metric = GaugeMetricFamily("tidewheel_tasks_live", "Tasks that have not ended, by status.", labels=["status"])
        for status, count in self._engine.runtime.statuses().items():
            metric.add_metric([str(status)], count)
        return metric

    def _depth(self) -> Metric:
        metric = GaugeMetricFamily(
            "tidewheel_queue_depth", "Pending tasks, by queue and priority.", labels=["queue", "priority"]
        )
        depth: dict[tuple[str, str], int] = {}
        for (queue, priority), count in sorted(self._engine.runtime.depth().items()):
            name = queue if len({q for q, _ in depth} | {queue}) <= QUEUES_MAX else "other"
            depth[name, priority] = depth.get((name, priority), 0) + count
        for (queue, priority), count in depth.items():
            metric.add_metric([queue, priority], count)
        return metric

    def _worker(self) -> Iterable[Metric]:
        worker = self._engine.worker
        if worker is None:
            return
        stats = worker.stats
        yield GaugeMetricFamily("tidewheel_worker_slots", "Attempts that may run at once.", stats.slots)
        yield GaugeMetricFamily("tidewheel_worker_running", "Attempts that run.", stats.running)
        attempts = CounterMetricFamily("tidewheel_attempts", "Attempts of this worker, by outcome.", labels=["outcome"])
        for outcome in ("succeeded", "failed", "snoozed", "cancelled", "crashed", "returned", "revoked"):
            attempts.add_metric([outcome], getattr(stats, outcome))
        yield attempts


def engine_metrics(engine: Engine) -> CollectorRegistry:
    """A registry that holds the metrics of one engine."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(engine))
    return registry
