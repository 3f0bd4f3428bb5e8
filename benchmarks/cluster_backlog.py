"""Tasks that could start but must wait, on Kafka: what a long queue costs in memory, throughput and time to cancel.

A queue is paused and filled by topic, tasks in the middle are cancelled, and the queue is resumed: then as many tasks
as before it was filled are submitted while what waits is worked off. At last the scheduler is killed.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Annotated

from msgspec import Meta

from benchmarks.cluster import ClusterOptions, ClusterStage, running
from benchmarks.cluster_timers import ACCEPTS_PER_S_MIN, kill_and_restart, schedulers
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say, Seed, quantiles
from benchmarks.dispatch import SETTLE_S, submit
from benchmarks.load import closed_loop, wait_until
from benchmarks.machine import rss_mb_max
from benchmarks.producer import Order, sending, wait_for
from benchmarks.stage import WAIT_S
from schemas.messages import Status

CHECKPOINT_S = 15.0  # until one that began with the last of what waits is written
DRAINS_PER_S_MIN = 500  # slower than that something is broken


class BacklogOptions(ClusterOptions, frozen=True, kw_only=True):
    """How much waits."""

    projectors: Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")] = 0
    pending: Annotated[int, Meta(ge=1_000, le=10_000_000, description="tasks that wait in one queue")] = 1_000_000
    tasks: Annotated[int, Meta(ge=1_000, le=1_000_000, description="for the throughput, before and with them")] = 50_000
    cancels: Annotated[int, Meta(ge=1, le=10_000, description="of tasks that wait, one after the other")] = 500
    seed: Seed = 1


class Backlog(Figures, frozen=True, kw_only=True):
    """Memory of the scheduler in MB; `restart_s` from SIGKILL until all shards are loaded, `cancel_…` until answered.

    `tasks_per_s` are submitted and started with nothing that waits. With the backlog more start than are submitted, so
    that `throughput_ratio` is of the mean of both.
    """

    accepted_per_s: float
    empty_rss_mb: float
    scheduler_rss_mb: float
    scheduler_rss_mb_max: float
    bytes_per_task: float
    restart_s: float
    restart_rss_mb_max: float
    cancel_p50_ms: float
    cancel_p99_ms: float
    tasks_per_s: float
    backlog_accepted_per_s: float
    backlog_started_per_s: float
    throughput_ratio: float
    cancelled_but_started: int


def _measure(options: BacklogOptions, folder: Path, say: Say) -> Backlog:
    tasks, pending = options.tasks, options.pending
    total = pending + 3 * tasks  # the first of them warm up
    with running(options, folder, total) as stage:
        _run(stage, pending, tasks)
        empty_s = _run(stage, pending + tasks, tasks)
        empty_rss_mb = stage.scheduler_rss_mb()
        say(f"{tasks / empty_s:,.0f} tasks/s with nothing that waits; now {pending:,} are to wait")
        stage.backend.queues.pause("default").run()
        time.sleep(SETTLE_S)
        accepted_s = _fill(stage, options)
        time.sleep(CHECKPOINT_S)
        filled_rss_mb, filled_rss_mb_max = stage.scheduler_rss_mb(), _rss_mb_max(stage)
        say(f"accepted in {accepted_s:.0f} s, {filled_rss_mb:,.0f} MB; {options.cancels} are cancelled")
        cancelled, took_ns = asyncio.run(_cancel(stage, options))
        accepted_per_s, started_per_s = _run_behind(stage, pending + 2 * tasks, tasks)
        say(f"{accepted_per_s:,.0f} accepted/s, {started_per_s:,.0f} started/s; the scheduler is killed")
        restart_s = kill_and_restart(stage, options.shards, WAIT_S + pending / ACCEPTS_PER_S_MIN)
        say(f"another one has them after {restart_s:.1f} s, and works them off")
        wanted = total - len(cancelled)
        _started(stage, wanted, WAIT_S + pending / DRAINS_PER_S_MIN)
        is_started = [bool(stage.starts.first_ns[number]) for number in cancelled]
        return Backlog(
            count=total,
            missing=wanted + sum(is_started) - stage.starts.started,
            duplicates=stage.starts.duplicates,
            early=0,
            cpu_us_per_task=round(sum(stage.processor_s().values()) / total * 1e6, 1),
            accepted_per_s=round(pending / accepted_s, 1),
            empty_rss_mb=empty_rss_mb,
            scheduler_rss_mb=filled_rss_mb,
            scheduler_rss_mb_max=filled_rss_mb_max,
            bytes_per_task=round((filled_rss_mb - empty_rss_mb) * 1e6 / pending, 1),
            restart_s=restart_s,
            restart_rss_mb_max=_rss_mb_max(stage),
            cancel_p50_ms=quantiles(took_ns).p50_ms,
            cancel_p99_ms=quantiles(took_ns).p99_ms,
            tasks_per_s=round(tasks / empty_s, 1),
            backlog_accepted_per_s=round(accepted_per_s, 1),
            backlog_started_per_s=round(started_per_s, 1),
            throughput_ratio=round((accepted_per_s + started_per_s) / 2 * empty_s / tasks, 3),
            cancelled_but_started=sum(is_started),
        )


def _run(stage: ClusterStage, first: int, tasks: int) -> float:
    """Submit tasks and wait until all have started; how many seconds that took."""
    wanted, begun_s = stage.starts.started + tasks, time.perf_counter()
    submit(stage, first, first + tasks)
    if not _started(stage, wanted, 4 * WAIT_S):
        raise NothingMeasured(f"{wanted - stage.starts.started} tasks did not start")
    return time.perf_counter() - begun_s


def _run_behind(stage: ClusterStage, first: int, tasks: int) -> tuple[float, float]:
    """Resume the queue and submit tasks; how many were accepted and how many started in a second meanwhile."""
    begun = stage.starts.started
    stage.backend.queues.resume("default").run()
    wait_until(lambda: stage.starts.started > begun, WAIT_S)
    begun, begun_s = stage.starts.started, time.perf_counter()
    submit(stage, first, first + tasks)
    took_s = time.perf_counter() - begun_s
    return tasks / took_s, (stage.starts.started - begun) / took_s


def _started(stage: ClusterStage, count: int, timeout_s: float) -> bool:
    """Wait until so many have started, whichever; whether they have. To count them takes a while."""
    return wait_until(lambda: stage.starts.started >= count, timeout_s, every_s=0.1)


def _fill(stage: ClusterStage, options: BacklogOptions) -> float:
    """Submit what is to wait by topic; how many seconds it took until all were accepted."""
    order = Order(
        kind="tasks",
        count=options.pending,
        blob=stage.blob,
        begin_us=time.time_ns() // 1_000,
        span_us=1,
        seed=options.seed,
    )
    limit_s = WAIT_S + options.pending / ACCEPTS_PER_S_MIN
    with stage.log() as log:
        before = sum(stage.end_offsets(log))
        with sending(stage, order) as producer:
            wait_until(lambda: sum(stage.end_offsets(log)) > before, WAIT_S)  # its interpreter has begun
            begun_s = time.perf_counter()
            is_done = wait_until(lambda: sum(stage.end_offsets(log)) >= before + order.count, limit_s, every_s=0.05)
            accepted_s = time.perf_counter() - begun_s
            wait_for(producer, WAIT_S)
    if not is_done:
        raise NothingMeasured(f"{order.count} tasks were not accepted within {limit_s:.0f} s")
    return accepted_s


async def _cancel(stage: ClusterStage, options: BacklogOptions) -> tuple[list[int], list[int]]:
    """Cancel some of what waits; which ones, and how many nanoseconds each took."""
    numbers = Random(options.seed).sample(range(options.pending), options.cancels)
    took_ns: list[int] = []

    async def cancel(number: int) -> None:
        begun_ns = time.perf_counter_ns()
        view = await stage.backend.cancel(f"bench{options.seed}-{number:09d}")
        took_ns.append(time.perf_counter_ns() - begun_ns)
        if view.status != Status.CANCELLED:
            raise NothingMeasured(f"a task that waits was not cancelled but is {view.status}")

    await closed_loop(numbers, 1, cancel)
    return numbers, took_ns


def _rss_mb_max(stage: ClusterStage) -> float:
    return round(sum(rss_mb_max(process.pid) for process in schedulers(stage)), 1)


BENCHMARKS = (Benchmark("backlog", "a long queue: its memory, throughput, cancels", BacklogOptions, _measure),)
