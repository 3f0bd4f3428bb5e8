"""How long after its due time a task is started, for timers that are all accepted before the first is due."""

from __future__ import annotations

import asyncio
import time
from array import array
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Annotated

from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, NothingMeasured, Options, Say, Seed, quantiles
from benchmarks.load import closed_loop
from benchmarks.machine import processor_s
from benchmarks.stage import WAIT_S, Stage, running
from schemas.limits import BULK_MAX

AT_ONCE = 64  # submissions in flight
ACCEPTS_PER_S = 500  # far below what any engine here takes: from it follows when the first timer is due
LEAD_S = 1.0
FAR = timedelta(days=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TimerAccuracyOptions(Options, frozen=True, kw_only=True):
    """How many timers, and how close together."""

    timers: Annotated[int, Meta(ge=1, le=1_000_000, description="how many are timed")] = 2_000
    rate: Annotated[float, Meta(gt=0, le=20_000, description="how many become due in a second, at random instants")] = (
        200.0
    )
    waiting: Annotated[int, Meta(ge=0, le=10_000_000, description="other tasks that wait for tomorrow meanwhile")] = 0
    warm_up: Annotated[int, Meta(ge=0, le=100_000, description="timers before those that count")] = 100
    seed: Seed = 1


class TimerAccuracy(Figures, frozen=True, kw_only=True):
    """Start minus due, in milliseconds. `min_ms` is negative if one was early. `accepted_late`: after it was due."""

    min_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    accepted_late: int


def measure(options: TimerAccuracyOptions, folder: Path, say: Say) -> TimerAccuracy:
    """Run once."""
    total = options.warm_up + options.timers
    with running(folder, total + 1, shards=options.shards, clock_ns=time.time_ns) as stage:
        if options.waiting:
            say(f"{options.waiting} tasks that wait for tomorrow")
            asyncio.run(_park(stage, options.waiting, total))
        due_us = _due_times(options, total)
        say(f"{options.timers} timers, the last of them due in {due_us[-1] / 1e6 - time.time():.1f} s")
        accepted_late = asyncio.run(_submit(stage, due_us))
        cpu_begun_s = processor_s()
        stage.starts.wait_for(total, max(0.0, due_us[-1] / 1e6 - time.time()) + WAIT_S)
        cpu_s = processor_s() - cpu_begun_s
    starts = stage.starts
    late_ns = [
        start_ns - due_us[index] * 1_000
        for index, start_ns in enumerate(starts.first_ns[:total])
        if index >= options.warm_up and start_ns
    ]
    if not late_ns:
        raise NothingMeasured("no timer was released")
    return TimerAccuracy(
        count=len(late_ns),
        missing=total - starts.started,
        duplicates=starts.duplicates,
        early=sum(1 for late in late_ns if late < 0) + int(starts.first_ns[total] != 0),
        cpu_us_per_task=round(cpu_s / total * 1e6, 1),
        min_ms=round(min(late_ns) / 1e6, 3),
        **quantiles(late_ns)._asdict(),
        accepted_late=accepted_late,
    )


def _due_times(options: TimerAccuracyOptions, total: int) -> list[int]:
    """Microseconds of Unix time, ascending."""
    rng = Random(options.seed)
    begin = time.time_ns() // 1_000 + round((LEAD_S + total / ACCEPTS_PER_S) * 1e6)
    span = round(total / options.rate * 1e6)
    return sorted(begin + rng.randrange(span) for _ in range(total))


async def _submit(stage: Stage, due_us: list[int]) -> int:
    accepted_us = array("q", bytes(8 * len(due_us)))

    async def submit(index: int) -> None:
        due = EPOCH + timedelta(microseconds=due_us[index])
        await stage.noop.options(at=due).asubmit(index, stage.blob)
        accepted_us[index] = time.time_ns() // 1_000

    await closed_loop(range(len(due_us)), AT_ONCE, submit)
    return sum(1 for accepted, due in zip(accepted_us, due_us, strict=True) if accepted > due)


async def _park(stage: Stage, count: int, index: int) -> None:
    """Tasks that are not due in this run; a start of one would be noted under `index`."""
    call = {"index": index, "blob": stage.blob}

    async def submit(first: int) -> None:
        await stage.noop.options(delay=FAR).asubmit_many([call] * min(BULK_MAX, count - first))

    await closed_loop(range(0, count, BULK_MAX), 2, submit)


BENCHMARK = Benchmark("timer_accuracy", "how late timers are", TimerAccuracyOptions, measure)
