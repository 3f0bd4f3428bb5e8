"""What the parts of a process count, for Prometheus; read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.gateway import Gateway
from scheduler.lateness import BOUNDS_S, Histogram
from scheduler.projector import Projector
from scheduler.runtime import SchedulerRuntime
from scheduler.timer_report import waiting_by_level
from workers.runtime import WorkerRuntime

if TYPE_CHECKING:
    from tidewheel.embedded import Engine

QUEUES_MAX = 100  # queues with series of their own; the others are counted under "other"


class SchedulerMetrics(Collector):
    """The shards of a process."""

    def __init__(self, runtime: SchedulerRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        yield self._tasks()
        yield self._depth()
        shards = list(self._runtime.hosts.values())
        yield GaugeMetricFamily("tidewheel_shards_hosted", "Shards of this process.", len(shards))
        yield CounterMetricFamily(
            "tidewheel_shard_reloads", "Loads of a shard after a doubt.", sum(host.reloads for host in shards)
        )
        yield CounterMetricFamily(
            "tidewheel_stale_reports",
            "Reports of attempts that did not run any more.",
            sum(host.shard.stale_reports for host in shards),
        )
        yield CounterMetricFamily(
            "tidewheel_invalid_records",
            "Inputs that could not be taken, and stand on task-requests-invalid.",
            sum(host.shard.invalid_records for host in shards),
        )

    def _tasks(self) -> Metric:
        metric = GaugeMetricFamily("tidewheel_tasks_live", "Tasks that have not ended, by status.", labels=["status"])
        for status, count in self._runtime.statuses().items():
            metric.add_metric([str(status)], count)
        return metric

    def _depth(self) -> Metric:
        metric = GaugeMetricFamily(
            "tidewheel_queue_depth", "Pending tasks, by queue and priority.", labels=["queue", "priority"]
        )
        depth: dict[tuple[str, str], int] = {}
        for (queue, priority), count in sorted(self._runtime.depth().items()):
            name = queue if len({q for q, _ in depth} | {queue}) <= QUEUES_MAX else "other"
            depth[name, priority] = depth.get((name, priority), 0) + count
        for (queue, priority), count in depth.items():
            metric.add_metric([queue, priority], count)
        return metric


class TimerMetrics(Collector):
    """What waits for its time in the shards of a process, and how late the last ones were."""

    def __init__(self, runtime: SchedulerRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        hosts = list(self._runtime.hosts.values())
        waiting = GaugeMetricFamily(
            "tidewheel_timers_waiting",
            "Tasks that wait for their time, in memory and about how many by level of the delay wheel.",
            labels=["level"],
        )
        for level, count in waiting_by_level(hosts).items():
            waiting.add_metric(["memory" if level is None else str(level)], count)
        yield waiting
        yield _histogram(
            "tidewheel_timer_lateness_seconds",
            "From when a task is due until it is released, in the log.",
            self._runtime.lateness.releases.histogram(),
        )
        schedules = sum(len(host.shard.state.schedules) for host in hosts)
        yield GaugeMetricFamily("tidewheel_schedules", "Schedules of the shards of this process.", schedules)
        yield _histogram(
            "tidewheel_cron_drift_seconds",
            "From a nominal time until its run is decided, in the log; of schedules without jitter.",
            self._runtime.lateness.fires.histogram(),
        )


def _histogram(name: str, documentation: str, found: Histogram) -> Metric:
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(found.counts), strict=True))
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=found.sum_us / 1e6)


class ReadyTopicMetrics(Collector):
    """The ready topics that a scheduler cannot write, by name."""

    def __init__(self, held: Callable[[], Mapping[str, str]]) -> None:
        self._held = held

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        help_text = "Ready topics that cannot be written now: their tasks wait. /readyz says why."
        yield GaugeMetricFamily("tidewheel_ready_topics_held", help_text, len(self._held()))


class ViewMetrics(Collector):
    """How far the view is behind; None where it is not known."""

    def __init__(self, lag: Callable[[], int | None]) -> None:
        self._lag = lag

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        lag = self._lag()
        if lag is not None:
            yield GaugeMetricFamily("tidewheel_view_lag_events", "Events not yet in the view.", lag)


class ProjectorMetrics(Collector):
    """The projector of a process."""

    def __init__(self, projector: Projector) -> None:
        self._projector = projector

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        help_text = "Seconds since the view moved, or had nothing to catch up with."
        yield GaugeMetricFamily("tidewheel_view_stalled_seconds", help_text, self._projector.stalled_s())
        skipped = CounterMetricFamily(
            "tidewheel_view_skipped_events", "Events that changed nothing, by reason.", labels=["reason"]
        )
        for reason, count in sorted(self._projector.skipped.copy().items()):
            skipped.add_metric([reason], count)
        yield skipped


class GatewayMetrics(Collector):
    """The requests of a process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        yield GaugeMetricFamily(
            "tidewheel_requests_pending", "Requests that wait for a decision.", self._gateway.pending()
        )


class WorkerMetrics(Collector):
    """The worker of a process, once it has one."""

    def __init__(self, worker: Callable[[], WorkerRuntime | None]) -> None:
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        """One scrape."""
        worker = self._worker()
        if worker is None:
            return
        stats = worker.stats
        yield GaugeMetricFamily("tidewheel_worker_slots", "Attempts that may run at once.", stats.slots)
        yield GaugeMetricFamily("tidewheel_worker_running", "Attempts that run.", stats.running)
        attempts = CounterMetricFamily("tidewheel_attempts", "Attempts of this worker, by outcome.", labels=["outcome"])
        for outcome in ("succeeded", "failed", "snoozed", "cancelled", "crashed", "returned", "revoked"):
            attempts.add_metric([outcome], getattr(stats, outcome))
        yield attempts


def registry_of(*collectors: Collector) -> CollectorRegistry:
    """A registry of a process's metrics."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def engine_metrics(engine: Engine) -> CollectorRegistry:
    """A registry that holds the metrics of one engine."""
    return registry_of(
        SchedulerMetrics(engine.runtime),
        TimerMetrics(engine.runtime),
        ViewMetrics(engine.view_lag),
        WorkerMetrics(lambda: engine.worker),
    )


def exposition(registry: CollectorRegistry) -> bytes:
    """The text of /metrics."""
    return generate_latest(registry)
