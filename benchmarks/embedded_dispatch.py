"""Who goes next, and what holds back, in one process: limits, priorities, tenants, and more than can be done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from benchmarks import dispatch
from benchmarks.contract import Benchmark, Figures, Options, Say
from benchmarks.dispatch import Overload, Priorities, Tenants
from benchmarks.stage import running
from scheduler.core.admission import AdmissionSettings

TENANT_SUBMITS_PER_S = 1_000  # as a cluster has it by default; an embedded engine holds nobody to a rate


class LimitOptions(Options, frozen=True, kw_only=True):
    """What is limited."""

    rate: dispatch.LimitRate = 100
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long the rate is wanted")] = 30.0
    tasks: dispatch.Tasks = 20_000


class Limits(Figures, frozen=True, kw_only=True):
    """`used_ratio` of what the rate allows; `exceeded`: starts beyond it in some interval."""

    used_ratio: float
    exceeded: int
    throughput_ratio: float
    tasks_per_s: float
    limited_tasks_per_s: float


def _measure_limits(options: LimitOptions, folder: Path, say: Say) -> Limits:
    say(f"a rate of {options.rate}/s")
    used_ratio, exceeded, wanted = dispatch.measure_rate(
        lambda count: running(folder / "rate", count, shards=options.shards), options.rate, options.seconds
    )
    say(f"{options.tasks} tasks, without limits and with two that hold nobody back")
    plain_per_s, limited_per_s, missing, cpu_us = dispatch.throughput_ratio(
        lambda count: running(folder / "plain", count, shards=options.shards),
        lambda count: running(folder / "limited", count, shards=options.shards),
        options.tasks,
    )
    return Limits(
        count=wanted + 2 * options.tasks,
        missing=missing,
        duplicates=0,
        early=0,
        cpu_us_per_task=cpu_us,
        used_ratio=used_ratio,
        exceeded=exceeded,
        throughput_ratio=round(limited_per_s / plain_per_s, 3),
        tasks_per_s=round(plain_per_s, 1),
        limited_tasks_per_s=round(limited_per_s, 1),
    )


class PriorityOptions(Options, frozen=True, kw_only=True):
    """What waits."""

    backlog: dispatch.Backlog = 30_000
    urgent: dispatch.Urgent = 20


def _measure_priorities(options: PriorityOptions, folder: Path, say: Say) -> Priorities:
    return dispatch.measure_priorities(
        lambda count: running(folder, count, shards=options.shards), options.backlog, options.urgent, say
    )


class TenantOptions(Options, frozen=True, kw_only=True):
    """Who submits how much."""

    tenants: dispatch.TenantCount = 10
    rate: dispatch.TenantRate = 10.0
    bulk: dispatch.Bulk = 10
    skew: dispatch.Skew = 100.0
    seconds: dispatch.Seconds = 30.0


def _measure_tenants(options: TenantOptions, folder: Path, say: Say) -> Tenants:
    return dispatch.measure_tenants(lambda count: running(folder, count, shards=options.shards), options, say)


class OverloadOptions(Options, frozen=True, kw_only=True):
    """How much too much."""

    tenants: dispatch.Flooding = 2
    rate: dispatch.Sustained = 2_000.0
    factor: dispatch.Factor = 3.0
    seconds: dispatch.Seconds = 60.0


def _measure_overload(options: OverloadOptions, folder: Path, say: Say) -> Overload:
    admission = AdmissionSettings(tenant_submits_per_s=TENANT_SUBMITS_PER_S)
    return dispatch.measure_overload(
        lambda count: running(folder, count, shards=options.shards, admission=admission), options, say
    )


BENCHMARKS = (
    Benchmark("limits", "rates and concurrency: exact, used, and what they cost", LimitOptions, _measure_limits),
    Benchmark("priority", "shares of the priorities, and urgent tasks", PriorityOptions, _measure_priorities),
    Benchmark("tenants", "what a tenant that floods does to the others", TenantOptions, _measure_tenants),
    Benchmark("overload", "more than can be done", OverloadOptions, _measure_overload),
)
