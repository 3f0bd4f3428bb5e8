"""How many tasks a second go all the way: submitted, started, succeeded, each of their events on disk.

Three things are measured one after the other in the same process, each with a fresh engine: bulk submission with a
worker beside it (`tasks_per_s`, `submit_per_s`), single submissions from many coroutines (`single_…`), and bulk
submission to an engine whose worker is elsewhere (`submit_alone_per_s`), which is what accepting alone costs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, NothingMeasured, Options, Say
from benchmarks.load import closed_loop, wait_until
from benchmarks.machine import processor_s, written_bytes
from benchmarks.stage import WAIT_S, LogMeter, Stage, is_settled, live_tasks, running
from scheduler.ports import TaskFilter
from schemas.limits import BULK_MAX
from schemas.messages import Status

BULKS_AT_ONCE = 4
SINGLES_AT_ONCE = 200


class ThroughputOptions(Options, frozen=True, kw_only=True):
    """How much is submitted."""

    tasks: Annotated[int, Meta(ge=1, le=10_000_000, description="submitted in bulk; half as many singly")] = 20_000
    warm_up: Annotated[int, Meta(ge=0, le=1_000_000, description="tasks before that, not timed")] = 2_000


class Throughput(Figures, frozen=True, kw_only=True):
    """Rates in tasks a second; `visible_per_s` counts until the view shows the last success."""

    tasks_per_s: float
    submit_per_s: float
    visible_per_s: float
    single_tasks_per_s: float
    single_submit_per_s: float
    submit_alone_per_s: float
    log_bytes_per_task: float
    disk_bytes_per_task: float | None


class _Run(NamedTuple):
    """One engine's run, in seconds."""

    submit_s: float
    settle_s: float
    visible_s: float
    cpu_s: float
    log_bytes: int
    disk_bytes: int | None
    missing: int
    duplicates: int


def measure(options: ThroughputOptions, folder: Path, say: Say) -> Throughput:
    """Run once."""
    singles = max(1, options.tasks // 2)
    say(f"{options.tasks} tasks in bulk")
    bulk = _run(options, folder / "bulk", options.tasks, _submit_bulk)
    say(f"{singles} tasks one by one, {SINGLES_AT_ONCE} at a time")
    single = _run(options, folder / "single", singles, _submit_singly)
    say(f"{options.tasks} tasks in bulk to an engine without a worker")
    alone_s = _accept(options, folder / "alone")
    return Throughput(
        count=options.tasks + singles,
        missing=bulk.missing + single.missing,
        duplicates=bulk.duplicates + single.duplicates,
        early=0,  # all of them are due at once
        cpu_us_per_task=round(bulk.cpu_s / options.tasks * 1e6, 1),
        tasks_per_s=round(options.tasks / bulk.settle_s, 1),
        submit_per_s=round(options.tasks / bulk.submit_s, 1),
        visible_per_s=round(options.tasks / bulk.visible_s, 1),
        single_tasks_per_s=round(singles / single.settle_s, 1),
        single_submit_per_s=round(singles / single.submit_s, 1),
        submit_alone_per_s=round(options.tasks / alone_s, 1),
        log_bytes_per_task=round(bulk.log_bytes / options.tasks, 1),
        disk_bytes_per_task=None if bulk.disk_bytes is None else round(bulk.disk_bytes / options.tasks, 1),
    )


Submit = Callable[[Stage, int, int], Awaitable[None]]  # the tasks of the indexes from … to …


def _run(options: ThroughputOptions, folder: Path, count: int, submit: Submit) -> _Run:
    total = options.warm_up + count
    with running(folder, total, shards=options.shards) as stage:
        asyncio.run(_timed(submit, stage, 0, options.warm_up))
        _settle(stage, options.warm_up)
        meter, disk_begun = LogMeter(stage.engine), written_bytes()
        cpu_begun_s, begun_s = processor_s(), time.perf_counter()
        submit_s = asyncio.run(_timed(submit, stage, options.warm_up, total))
        settle_s = _settle(stage, total) - begun_s
        stage.wait_until_projected()
        visible_s = time.perf_counter() - begun_s
        cpu_s, disk_ended = processor_s() - cpu_begun_s, written_bytes()
        log_bytes = meter.appended_bytes()
        meter.close()
        succeeded = stage.engine.view.count(TaskFilter(status=Status.SUCCEEDED))
    disk_bytes = disk_ended - disk_begun if disk_begun is not None and disk_ended is not None else None
    missing = total - min(succeeded, stage.starts.started)
    return _Run(submit_s, settle_s, visible_s, cpu_s, log_bytes, disk_bytes, missing, stage.starts.duplicates)


def _settle(stage: Stage, started: int) -> float:
    """Wait until so many were started, and all have ended; the instant of that. Raises NothingMeasured."""
    stage.starts.wait_for(started)
    if not wait_until(lambda: is_settled(stage.engine), WAIT_S):
        raise NothingMeasured(f"{live_tasks(stage.engine)} tasks have not ended {WAIT_S:.0f} s after the last start")
    return time.perf_counter()


def _accept(options: ThroughputOptions, folder: Path) -> float:
    total = options.warm_up + options.tasks
    with running(folder, total, shards=options.shards, has_worker=False) as stage:
        asyncio.run(_timed(_submit_bulk, stage, 0, options.warm_up))
        return asyncio.run(_timed(_submit_bulk, stage, options.warm_up, total))


async def _timed(submit: Submit, stage: Stage, first: int, end: int) -> float:
    begun_s = time.perf_counter()
    await submit(stage, first, end)
    return time.perf_counter() - begun_s


async def _submit_bulk(stage: Stage, first: int, end: int) -> None:
    async def submit(start: int) -> None:
        indexes = range(start, min(start + BULK_MAX, end))
        await stage.noop.asubmit_many([{"index": index, "blob": stage.blob} for index in indexes])

    await closed_loop(range(first, end, BULK_MAX), BULKS_AT_ONCE, submit)


async def _submit_singly(stage: Stage, first: int, end: int) -> None:
    async def submit(index: int) -> None:
        await stage.noop.asubmit(index, stage.blob)

    await closed_loop(range(first, end), SINGLES_AT_ONCE, submit)


BENCHMARK = Benchmark("throughput", "tasks a second from submission to success", ThroughputOptions, measure)
