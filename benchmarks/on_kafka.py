"""The benchmarks of the Kafka engine: brokers, database, processes and load share the machine.

`start_latency` and `throughput` mean what they mean for the embedded engine. `projection` is the lag of the view at a
fixed rate. Processor time is stated for each kind of process. What happens when a process or a service ends is in
`cluster_losses`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from benchmarks.cluster import ClusterOptions, ClusterStage, running
from benchmarks.cluster_audit import audit
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say, quantiles
from benchmarks.load import closed_loop, open_loop, wait_until
from benchmarks.stage import WAIT_S
from benchmarks.start_latency import StartLatency, Submissions, figures_of
from schemas.limits import BULK_MAX

BULKS_AT_ONCE = 4
LAG_EVERY_S = 0.02


class RateOptions(ClusterOptions, frozen=True, kw_only=True):
    """How much is submitted."""

    rate: Annotated[float, Meta(gt=0, le=20_000, description="submissions a second")] = 500.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long")] = 10.0
    warm_up_s: Annotated[float, Meta(ge=0, le=600, description="seconds at the same rate before that, not timed")] = 3.0


def _measure_latency(options: RateOptions, folder: Path, say: Say) -> StartLatency:
    warm_up, count = round(options.rate * options.warm_up_s), max(1, round(options.rate * options.seconds))
    total = warm_up + count
    with running(options, folder, total) as stage:
        say(f"{count} tasks at {options.rate:g} a second, after {warm_up} to warm up")

        def processor_s() -> float:
            return sum(stage.processor_s().values())

        done = Submissions(stage.noop, stage.blob, total, warm_up, processor_s)
        asyncio.run(open_loop(total, options.rate, done.submit, say))
        stage.starts.wait_for(total, WAIT_S)
        cpu_s = processor_s() - done.cpu_begun_s
        return figures_of(done, stage.starts, warm_up, total, cpu_s)


# --- throughput -------------------------------------------------------------------------------------------------------


class ThroughputOptions(ClusterOptions, frozen=True, kw_only=True):
    """How much is submitted."""

    tasks: Annotated[int, Meta(ge=1, le=10_000_000, description="submitted in bulk")] = 50_000
    warm_up: Annotated[int, Meta(ge=0, le=1_000_000, description="tasks before that, not timed")] = 5_000


class Throughput(Figures, frozen=True, kw_only=True):
    """Rates in tasks a second; `visible_per_s` until the view shows all of it, None without a projector.

    `…_cpu_us` is the processor time for a task of each kind of process; `submit` is the one that submits.
    """

    tasks_per_s: float
    submit_per_s: float
    visible_per_s: float | None
    log_bytes_per_task: float
    submit_cpu_us: float
    scheduler_cpu_us: float
    worker_cpu_us: float
    projector_cpu_us: float | None


def _measure_throughput(options: ThroughputOptions, folder: Path, say: Say) -> Throughput:
    total = options.warm_up + options.tasks
    with running(options, folder, total) as stage, stage.log() as log:
        _submit(stage, 0, options.warm_up)
        if not stage.wait_until_settled(options.warm_up, 0):
            raise NothingMeasured(f"the tasks of the warm-up did not end within {WAIT_S:.0f} s")
        base, cpu = sum(stage.end_offsets(log)), stage.processor_s()
        say(f"{options.tasks} tasks in bulk")
        begun_s = time.perf_counter()
        _submit(stage, options.warm_up, total)
        submit_s = time.perf_counter() - begun_s
        stage.wait_until_settled(options.tasks, base)
        settle_s = time.perf_counter() - begun_s
        visible_s = None
        if options.projectors:
            wait_until(lambda: stage.view_lag(log) == 0, WAIT_S, every_s=0.05)
            visible_s = time.perf_counter() - begun_s
        spent = {name: used - cpu.get(name, 0.0) for name, used in stage.processor_s().items()}
        say("reading the topics")
        found = audit(stage)
        log_bytes = stage.log_bytes()
        each = {name: round(used / options.tasks * 1e6, 1) for name, used in spent.items()}
        return Throughput(
            count=options.tasks,
            missing=total - len(found.succeeded),
            duplicates=stage.starts.duplicates,
            early=found.early,
            cpu_us_per_task=round(sum(each.values()), 1),
            tasks_per_s=round(options.tasks / settle_s, 1),
            submit_per_s=round(options.tasks / submit_s, 1),
            visible_per_s=None if visible_s is None else round(options.tasks / visible_s, 1),
            log_bytes_per_task=round(log_bytes / total, 1),
            submit_cpu_us=each["submit"],
            scheduler_cpu_us=each["scheduler"],
            worker_cpu_us=each.get("worker", 0.0),
            projector_cpu_us=each.get("projector"),
        )


def _submit(stage: ClusterStage, first: int, end: int) -> None:
    async def submit(start: int) -> None:
        indexes = range(start, min(start + BULK_MAX, end))
        await stage.noop.asubmit_many([{"index": index, "blob": stage.blob} for index in indexes])

    asyncio.run(closed_loop(range(first, end, BULK_MAX), BULKS_AT_ONCE, submit))


# --- the view ---------------------------------------------------------------------------------------------------------


class ProjectionLag(Figures, frozen=True, kw_only=True):
    """From the moment at which events are seen in the log until the view has them, in milliseconds."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float


def _measure_projection(options: RateOptions, folder: Path, say: Say) -> ProjectionLag:
    warm_up, count = round(options.rate * options.warm_up_s), max(1, round(options.rate * options.seconds))
    total = warm_up + count
    with running(options, folder, total) as stage:

        async def submit(index: int, _: int) -> None:
            await stage.noop.asubmit(index, stage.blob)

        say(f"{count} tasks at {options.rate:g} a second, after {warm_up} to warm up")
        asyncio.run(open_loop(warm_up, options.rate, submit))
        cpu_begun_s = sum(stage.processor_s().values())
        with _LagSampler(stage) as sampler:
            asyncio.run(open_loop(count, options.rate, lambda index, at: submit(warm_up + index, at), say))
            stage.starts.wait_for(total, WAIT_S)
        cpu_s = sum(stage.processor_s().values()) - cpu_begun_s
        lag = quantiles(sampler.lags_ns)
        return ProjectionLag(
            count=count,
            missing=total - stage.starts.started,
            duplicates=stage.starts.duplicates,
            early=0,
            cpu_us_per_task=round(cpu_s / count * 1e6, 1),
            lag_p50_ms=lag.p50_ms,
            lag_p99_ms=lag.p99_ms,
            lag_max_ms=lag.max_ms,
        )


class _LagSampler:
    """Watches where the events end and where the view stands, from a thread of its own."""

    def __init__(self, stage: ClusterStage) -> None:
        self.lags_ns: list[int] = []
        self._stage = stage
        self._open: list[list[tuple[int, int]]] = [[] for _ in range(stage.shards)]  # an end, and when it was seen
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag-sampler", daemon=True)

    def __enter__(self) -> _LagSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        with self._stage.log() as log:
            while not self._stopping.wait(LAG_EVERY_S):
                self._look(self._stage.end_offsets(log), time.perf_counter_ns())

    def _look(self, ends: list[int], now: int) -> None:
        positions = self._stage.view.positions()
        for shard, end in enumerate(ends):
            waiting = self._open[shard]
            if not waiting or end > waiting[-1][0]:
                waiting.append((end, now))
            applied = positions[shard].next_offset if shard in positions else 0
            while waiting and waiting[0][0] <= applied:
                self.lags_ns.append(time.perf_counter_ns() - waiting.pop(0)[1])


BENCHMARKS = (
    Benchmark("start_latency", "from submission to start, at a fixed rate", RateOptions, _measure_latency),
    Benchmark("throughput", "tasks a second from submission to success", ThroughputOptions, _measure_throughput),
    Benchmark("projection", "how far the view lags", RateOptions, _measure_projection),
)
