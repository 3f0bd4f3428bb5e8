"""Who goes next, and what holds back, on Kafka: limits, priorities, tenants, and more than can be done.

`limits` has three parts, each with a cluster of its own: a rate that is always wanted, concurrency of one for each of
many keys while workers and schedulers are killed, and the throughput with limits that hold nobody back.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from benchmarks import dispatch, shared_keys
from benchmarks.cluster import APP, ClusterOptions, ClusterStage, Process, running
from benchmarks.contract import Benchmark, Figures, Say, Seed
from benchmarks.dispatch import SETTLE_S, Overload, Priorities, Tenants
from benchmarks.load import closed_loop
from benchmarks.shared_keys import SharedKeys
from benchmarks.stage import WAIT_S, keyed_in
from tidewheel import App

Projectors = Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")]


class LimitOptions(ClusterOptions, frozen=True, kw_only=True):
    """What is limited."""

    shards: Annotated[int, Meta(ge=1, le=64, description="shards of the engine")] = 8
    workers: Annotated[int, Meta(ge=1, le=16, description="worker processes")] = 4
    projectors: Projectors = 0
    rate: dispatch.LimitRate = 100
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long the rate is wanted")] = 30.0
    keys: Annotated[int, Meta(ge=1, le=100_000, description="keys with one attempt at a time")] = 1_000
    keyed_tasks: Annotated[int, Meta(ge=1, le=1_000_000, description="tasks under these keys")] = 20_000
    kills: Annotated[int, Meta(ge=0, le=100, description="kill -9 of a worker or scheduler meanwhile")] = 10
    tasks: dispatch.Tasks = 50_000
    seed: Seed = 1


class Limits(Figures, frozen=True, kw_only=True):
    """`used_ratio` of what the rate allows; `exceeded`: starts beyond it in some interval; `met`: two under one key.

    `keyed_duplicates` are starts of attempts that were repeated since a process was killed.
    """

    used_ratio: float
    exceeded: int
    met: int
    keyed_missing: int
    keyed_duplicates: int
    throughput_ratio: float
    tasks_per_s: float
    limited_tasks_per_s: float


def _measure_limits(options: LimitOptions, folder: Path, say: Say) -> Limits:
    say(f"a rate of {options.rate}/s over {options.shards} shards and {options.workers} workers")
    used_ratio, exceeded, wanted = dispatch.measure_rate(
        lambda count: running(options, folder / "rate", count), options.rate, options.seconds
    )
    met, keyed_missing, keyed_duplicates = _measure_keys(options, folder / "keys", say)
    say(f"{options.tasks} tasks, without limits and with two that hold nobody back")
    one_worker = replace(options, workers=1)
    plain_per_s, limited_per_s, missing, cpu_us = dispatch.throughput_ratio(
        lambda count: running(one_worker, folder / "plain", count),
        lambda count: running(one_worker, folder / "limited", count),
        options.tasks,
    )
    return Limits(
        count=wanted + options.keyed_tasks + 2 * options.tasks,
        missing=missing,
        duplicates=0,
        early=0,
        cpu_us_per_task=cpu_us,
        used_ratio=used_ratio,
        exceeded=exceeded,
        met=met,
        keyed_missing=keyed_missing,
        keyed_duplicates=keyed_duplicates,
        throughput_ratio=round(limited_per_s / plain_per_s, 3),
        tasks_per_s=round(plain_per_s, 1),
        limited_tasks_per_s=round(limited_per_s, 1),
    )


def _measure_keys(options: LimitOptions, folder: Path, say: Say) -> tuple[int, int, int]:
    """How often two were at work under one key, how many tasks were never started, and how many again."""
    say(f"one at a time of {options.keys} keys, {options.kills} kills meanwhile")
    folder.mkdir(parents=True)
    keys = SharedKeys(folder / "key-cells", options.keys)
    extra = {shared_keys.PLACE: str((folder / "key-cells").resolve())}
    rng = Random(options.seed)
    two = replace(options, schedulers=max(2, options.schedulers), workers=max(2, options.workers))
    with running(two, folder, options.keyed_tasks, environ=extra) as stage:
        stage.backend.limits.set_limit("one", {"count": 1, "key": "{metadata.key}"}).run()
        time.sleep(SETTLE_S)
        app = App()
        keyed = keyed_in(app, lambda index: None, lambda key, index: 0, lambda key, mine: None)
        app.use(stage.backend)
        calls = [(index, rng.randrange(options.keys)) for index in range(options.keyed_tasks)]

        async def submit_one(call: tuple[int, int]) -> None:
            index, key = call
            await keyed.options(metadata={"key": str(key)}).asubmit(index, key)

        asyncio.run(closed_loop(calls, 200, submit_one))
        for number in range(options.kills):
            _kill_and_replace(stage, rng)
            say(f"    kill {number + 1}")
            time.sleep(8.0)
        stage.starts.wait_for(options.keyed_tasks, 10 * WAIT_S)
        return keys.met, options.keyed_tasks - stage.starts.started, stage.starts.duplicates


def _kill_and_replace(stage: ClusterStage, rng: Random) -> None:
    victims = [process for process in stage.processes if process.name in ("scheduler", "worker")]
    victim: Process = rng.choice(victims)
    stage.processes.remove(victim)
    victim.kill()
    stage.start(victim.name, *([APP] if victim.name == "worker" else []))


class PriorityOptions(ClusterOptions, frozen=True, kw_only=True):
    """What waits."""

    projectors: Projectors = 0
    backlog: dispatch.Backlog = 30_000
    urgent: dispatch.Urgent = 20


def _measure_priorities(options: PriorityOptions, folder: Path, say: Say) -> Priorities:
    return dispatch.measure_priorities(
        lambda count: running(options, folder, count), options.backlog, options.urgent, say
    )


class TenantOptions(ClusterOptions, frozen=True, kw_only=True):
    """Who submits how much."""

    projectors: Projectors = 0
    tenants: dispatch.TenantCount = 10
    rate: dispatch.TenantRate = 10.0
    bulk: dispatch.Bulk = 10
    skew: dispatch.Skew = 100.0
    seconds: dispatch.Seconds = 30.0


def _measure_tenants(options: TenantOptions, folder: Path, say: Say) -> Tenants:
    return dispatch.measure_tenants(lambda count: running(options, folder, count), options, say)


class OverloadOptions(ClusterOptions, frozen=True, kw_only=True):
    """How much too much."""

    projectors: Projectors = 0
    tenants: dispatch.Flooding = 4
    rate: dispatch.Sustained = 4_000.0
    factor: dispatch.Factor = 3.0
    seconds: dispatch.Seconds = 60.0


def _measure_overload(options: OverloadOptions, folder: Path, say: Say) -> Overload:
    return dispatch.measure_overload(lambda count: running(options, folder, count, is_open=False), options, say)


BENCHMARKS = (
    Benchmark("limits", "rates and concurrency: exact, used, and what they cost", LimitOptions, _measure_limits),
    Benchmark("priority", "shares of the priorities, and urgent tasks", PriorityOptions, _measure_priorities),
    Benchmark("tenants", "what a tenant that floods does to the others", TenantOptions, _measure_tenants),
    Benchmark("overload", "more than can be done", OverloadOptions, _measure_overload),
)
