"""The benchmarks of the Kafka engine: brokers, database, processes and load share the machine.

`start_latency` and `throughput` mean what they mean for the embedded engine. `takeover` ends schedulers under load, by
SIGKILL and by SIGTERM in turn, and counts from the signal until the first start of a task that the ended one's shards
had to decide. `projection` is the lag of the view at a fixed rate. Processor time is stated for each kind of process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from benchmarks.cluster import ClusterOptions, ClusterStage, running
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say, quantiles
from benchmarks.load import closed_loop, open_loop, wait_until
from benchmarks.stage import WAIT_S
from benchmarks.start_latency import StartLatency, Submissions, figures_of
from schemas.codec import Codec
from schemas.errors import DecodeError
from schemas.ids import shard_of
from schemas.limits import BULK_MAX
from schemas.messages import Event, ShardOpened, TaskSucceeded
from schemas.topics import TASK_EVENTS
from tidewheel import TidewheelError

BULKS_AT_ONCE = 4
LAG_EVERY_S = 0.02
TAKEOVER_S = 60.0  # until a takeover is given up

_codec = Codec.builtin()


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
        succeeded = _counted(stage)["succeeded"]
        log_bytes = stage.log_bytes()
        each = {name: round(used / options.tasks * 1e6, 1) for name, used in spent.items()}
        return Throughput(
            count=options.tasks,
            missing=total - succeeded,
            duplicates=stage.starts.duplicates,
            early=0,  # all of them are due at once
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


def _counted(stage: ClusterStage) -> Mapping[str, int]:
    """What the raw events come to: successes, and inputs that were decided twice."""
    epochs: Counter[int] = Counter()
    sources: Counter[tuple[str | None, int, int | None]] = Counter()
    succeeded: set[str] = set()
    for record in stage.records(TASK_EVENTS):
        try:
            event = _codec.decode(record.value)
        except DecodeError as error:
            raise NothingMeasured(f"an event cannot be read: {error}") from error
        assert isinstance(event, Event)
        if isinstance(event.body, ShardOpened):
            epochs[record.partition] = max(epochs[record.partition], event.epoch)
        if event.epoch < epochs[record.partition]:
            continue
        if event.source_offset is not None:
            sources[event.source_topic, record.partition, event.source_offset] += 1
        if isinstance(event.body, TaskSucceeded):
            succeeded.add(event.entity_id)
    return {"succeeded": len(succeeded), "decided_twice": sum(count > 1 for count in sources.values())}


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


# --- takeovers --------------------------------------------------------------------------------------------------------


class TakeoverOptions(ClusterOptions, frozen=True, kw_only=True):
    """How often, and under which load."""

    schedulers: Annotated[int, Meta(ge=2, le=16, description="scheduler processes")] = 2
    rounds: Annotated[int, Meta(ge=1, le=100, description="of each kind")] = 3
    rate: Annotated[float, Meta(gt=0, le=5_000, description="submissions a second meanwhile")] = 500.0


class Takeover(Figures, frozen=True, kw_only=True):
    """From the signal until the first start of a task of each of the ended scheduler's shards, in seconds.

    `stop_s` is how long a planned stop took until the process had ended. `lost`: acknowledged and not succeeded.
    """

    killed_first_start_s_p50: float
    killed_first_start_s_max: float
    stopped_first_start_s_p50: float
    stopped_first_start_s_max: float
    stop_s_max: float
    acknowledged: int
    lost: int
    decided_twice: int


class _Load:
    """Submissions at a rate from a thread of its own, whatever becomes of them; what was acknowledged is noted."""

    def __init__(self, stage: ClusterStage, rate: float, capacity: int) -> None:
        self.submitted_ns: dict[int, int] = {}
        self.ids: dict[int, str] = {}
        self._stage, self._rate, self._capacity = stage, rate, capacity
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(2 * WAIT_S)

    async def _run(self) -> None:
        begun_s, index = time.perf_counter(), 0
        async with asyncio.TaskGroup() as calls:
            while not self._stopping.is_set() and index < self._capacity:
                await asyncio.sleep(max(0.0, begun_s + index / self._rate - time.perf_counter()))
                calls.create_task(self._submit(index))
                index += 1

    async def _submit(self, index: int) -> None:
        self.submitted_ns[index] = time.perf_counter_ns()
        try:
            self.ids[index] = (await self._stage.noop.asubmit(index, self._stage.blob)).task_id
        except TidewheelError:  # not decided in time, or the log is away: it was not acknowledged
            return


def _measure_takeover(options: TakeoverOptions, folder: Path, say: Say) -> Takeover:
    capacity = round(options.rate * (options.rounds + 1) * 4 * TAKEOVER_S)
    killed: list[float] = []
    stopped: list[float] = []
    stops_s: list[float] = []
    with running(options, folder, capacity) as stage:
        cpu_begun_s = sum(stage.processor_s().values())
        with _Load(stage, options.rate, capacity) as load:
            wait_until(lambda: len(load.ids) > options.rate, WAIT_S)
            schedulers = [process for process in stage.processes if process.name == "scheduler"]
            for number in range(options.rounds):
                for end, took in ((_kill, killed), (_stop, stopped)):
                    say(f"round {number + 1} of {options.rounds}: {end.__name__.strip('_')}")
                    victim = schedulers.pop(0)
                    at_ns = time.perf_counter_ns()
                    ended_s = end(victim)
                    if ended_s is not None:
                        stops_s.append(ended_s)
                    took.append(_first_starts_s(stage, load, at_ns))
                    stage.processes.remove(victim)
                    schedulers.append(stage.start("scheduler"))
                    _settle(stage, load)
        cpu_s = sum(stage.processor_s().values()) - cpu_begun_s
        say("reading the topics")
        wait_until(lambda: _counted(stage)["succeeded"] >= len(load.ids), WAIT_S, every_s=1.0)
        found = _counted(stage)
        succeeded = {
            event.entity_id
            for record in stage.records(TASK_EVENTS)
            if isinstance(event := _codec.decode(record.value), Event) and isinstance(event.body, TaskSucceeded)
        }
        return Takeover(
            count=len(load.submitted_ns),
            missing=0,  # what was not acknowledged may be missing, what was is counted as lost
            duplicates=stage.starts.duplicates,
            early=0,
            cpu_us_per_task=round(cpu_s / max(1, len(load.ids)) * 1e6, 1),
            killed_first_start_s_p50=sorted(killed)[len(killed) // 2],
            killed_first_start_s_max=max(killed),
            stopped_first_start_s_p50=sorted(stopped)[len(stopped) // 2],
            stopped_first_start_s_max=max(stopped),
            stop_s_max=round(max(stops_s), 3),
            acknowledged=len(load.ids),
            lost=len(set(load.ids.values()) - succeeded),
            decided_twice=found["decided_twice"],
        )


def _kill(process: object) -> None:
    process.kill()  # type: ignore[attr-defined]


def _stop(process: object) -> float:
    stopped_s: float = process.stop()  # type: ignore[attr-defined]
    return stopped_s


def _first_starts_s(stage: ClusterStage, load: _Load, at_ns: int) -> float:
    """Until each shard has started a task that was submitted after the signal."""
    started: dict[int, int] = {}

    def all_started() -> bool:
        for index, task_id in list(load.ids.items()):
            begun = stage.starts.first_ns[index]
            if begun and load.submitted_ns[index] > at_ns:
                shard = shard_of(task_id, stage.shards)
                started[shard] = min(started.get(shard, begun), begun)
        return len(started) == stage.shards

    if not wait_until(all_started, TAKEOVER_S, every_s=0.05):
        raise NothingMeasured(f"{TAKEOVER_S:.0f} s after the end of a scheduler not all shards had an owner")
    return round((max(started.values()) - at_ns) / 1e9, 3)


def _settle(stage: ClusterStage, load: _Load) -> None:
    """Until the group has shared the shards with the new scheduler: a while in which every shard starts tasks."""
    _first_starts_s(stage, load, time.perf_counter_ns() + 2_000_000_000)


BENCHMARKS = (
    Benchmark("start_latency", "from submission to start, at a fixed rate", RateOptions, _measure_latency),
    Benchmark("throughput", "tasks a second from submission to success", ThroughputOptions, _measure_throughput),
    Benchmark("projection", "how far the view lags", RateOptions, _measure_projection),
    Benchmark("takeover", "schedulers that end under load", TakeoverOptions, _measure_takeover),
)
