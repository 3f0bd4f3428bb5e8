"""What tasks cost that wait for days: memory, disk, and the time to start again with them after a kill -9.

The engine is killed the moment the last task was accepted, so that the first restart finds a checkpoint that is behind.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, Options, Say, Seed
from benchmarks.engine_process import PARKED_INDEX, EngineProcess, Measured, Park, Setup
from benchmarks.machine import folder_bytes


class WaitingOptions(Options, frozen=True, kw_only=True):
    """How much waits."""

    tasks: Annotated[int, Meta(ge=1, le=10_000_000, description="that wait")] = 100_000
    payload: Annotated[int, Meta(ge=50, le=200_000, description="bytes of each")] = 1_024
    horizon_days: Annotated[int, Meta(ge=1, le=3_650, description="the farthest is due then, the nearest tomorrow")] = (
        30
    )
    restarts: Annotated[int, Meta(ge=1, le=100, description="how often the engine is killed and started again")] = 3
    warm_up: Annotated[int, Meta(ge=0, le=1_000_000, description="waiting tasks before those that count")] = 2_000
    seed: Seed = 1


class Waiting(Figures, frozen=True, kw_only=True):
    """Memory in MB on top of the engine without them; times in seconds. `restart_s` includes the interpreter's start.

    `rewrites_per_task`: events about a waiting task after that of its submission. `bytes_per_task`: all files.
    """

    submit_per_s: float
    scheduler_rss_mb: float
    scheduler_rss_mb_max: float
    restart_rss_mb: float
    restart_s: float
    restart_s_max: float
    load_s: float
    bytes_per_task: float
    rewrites_per_task: float


def measure(options: WaitingOptions, folder: Path, say: Say) -> Waiting:
    """Run once."""
    setup = Setup(folder=str(folder), shards=options.shards, capacity=PARKED_INDEX + 1)
    total = options.warm_up + options.tasks
    with EngineProcess(setup) as engine:
        empty_mb = engine.ready.rss_mb
        engine.park(_park(options, options.warm_up))
        before = engine.measure()
        say(f"{options.tasks} tasks of {options.payload} bytes")
        parked = engine.park(_park(options, options.tasks))
        after = engine.measure()
    restarts_s, loads_s, last = _restart(options, setup, say)
    return Waiting(
        count=options.tasks,
        missing=max(0, total - last.live),
        duplicates=max(0, last.live - total),
        early=after.started + last.started,
        cpu_us_per_task=round(parked.cpu_s / options.tasks * 1e6, 1),
        submit_per_s=round(options.tasks / parked.seconds, 1),
        scheduler_rss_mb=round(after.rss_mb - before.rss_mb, 1),
        scheduler_rss_mb_max=round(after.rss_mb_max - before.rss_mb, 1),
        restart_rss_mb=round(last.rss_mb - empty_mb, 1),
        restart_s=round(statistics.median(restarts_s), 3),
        restart_s_max=round(max(restarts_s), 3),
        load_s=round(statistics.median(loads_s), 3),
        bytes_per_task=round(folder_bytes(folder) / total, 1),
        rewrites_per_task=round((last.events - total - options.shards * (1 + options.restarts)) / total, 3),
    )


def _park(options: WaitingOptions, count: int) -> Park:
    return Park(count=count, payload_bytes=options.payload, horizon_days=options.horizon_days, seed=options.seed)


def _restart(options: WaitingOptions, setup: Setup, say: Say) -> tuple[list[float], list[float], Measured]:
    """Start it again and again; the last one is let end in order, so that its files are all there is."""
    restarts_s, loads_s = [], []
    for number in range(1, options.restarts + 1):
        with EngineProcess(setup) as engine:
            restarts_s.append(engine.restart_s)
            loads_s.append(engine.ready.load_s)
            say(f"restart {number} of {options.restarts}: {engine.restart_s:.2f} s")
            measured = engine.measure()
            if number == options.restarts:
                engine.stop()
    return restarts_s, loads_s, measured


BENCHMARK = Benchmark("waiting", "what tasks cost that wait for days", WaitingOptions, measure)
