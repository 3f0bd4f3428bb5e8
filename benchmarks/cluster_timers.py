"""Tasks that are due later, on Kafka: how late they are started, and what it costs that millions of them wait.

Both submit by topic, as applications do that wait for no reply. `timers` counts from the due time to the start of the
handler, for timers that were parked in the delay wheel and come back from it, with others waiting behind them; with
`--kills` schedulers are killed meanwhile. `waiting` is about the others: how fast they are accepted and parked, what
memory and log they take, and how long a scheduler needs that begins with them. `slope_bytes_per_task` is how much the
scheduler's memory grew for each task between half of them and all.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import msgspec
from msgspec import Meta

from benchmarks.cluster import ClusterOptions, ClusterStage, Process, running
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say, Seed, quantiles
from benchmarks.load import wait_until
from benchmarks.machine import rss_mb, rss_mb_max
from benchmarks.producer import DAY_US, Order, sending, wait_for
from benchmarks.stage import WAIT_S
from scheduler.ports import TopicPartition
from scheduler.timer_report import TimersView
from schemas.topics import SHARD_STATE, delay_topic
from schemas.wheel import WheelShape

ACCEPTS_PER_S_MIN = 1_000  # slower than that something is broken
TOMORROW_US = DAY_US  # the nearest of those that wait: none of them is due in a run
WARM_UP = 200  # tasks
QUIET_S = 15.0  # for a checkpoint after the load
ASK_S = 10.0
SAMPLE, SAMPLE_S = 5_000, 5.0  # records of a topic whose size is looked at, and for how long

Waiting_ = Annotated[int, Meta(ge=0, le=100_000_000, description="other tasks that wait meanwhile")]
HorizonDays = Annotated[int, Meta(ge=2, le=3_650, description="the farthest is due then, the nearest tomorrow")]
Rate = Annotated[float, Meta(gt=0, le=20_000, description="timers that become due in a second")]
LeadS = Annotated[float, Meta(ge=1, le=3_600, description="seconds until the first is due; from 95 on all are parked")]


class TimersOptions(ClusterOptions, frozen=True, kw_only=True):
    """How many are timed, and what waits behind them."""

    rate: Rate = 1_000.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long")] = 60.0
    lead_s: LeadS = 150.0
    waiting: Waiting_ = 1_000_000
    horizon_days: HorizonDays = 30
    kills: Annotated[int, Meta(ge=0, le=100, description="kill -9 of a scheduler while timers are due")] = 0
    seed: Seed = 1


class Timers(Figures, frozen=True, kw_only=True):
    """Start minus due, in milliseconds; `min_ms` is negative if one was early. `waiting` were there at the end."""

    min_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    waiting: int
    scheduler_rss_mb: float


def _measure_timers(options: TimersOptions, folder: Path, say: Say) -> Timers:
    count = round(options.rate * options.seconds)
    with running(options, folder, count + 1 + WARM_UP) as stage:
        warm_up(stage, count + 1)
        if options.waiting:
            say(f"{options.waiting} tasks that wait")
            _park(stage, _far(options.waiting, options.horizon_days, count, stage.blob, options.seed), say)
        begun_cpu_s = _scheduler_s(stage)
        due_ns = _submit_timers(stage, count, options, options.seed + 1)
        say(f"{count} timers, the first due in {due_ns[0] / 1e9 - time.perf_counter():.0f} s")
        last_ns = due_ns[-1]
        time.sleep(max(0.0, due_ns[0] / 1e9 - time.perf_counter()))
        for number in range(options.kills):
            restart_s = kill_and_restart(stage, options.shards)
            say(f"kill {number + 1} of {options.kills}: {restart_s:.1f} s")
        stage.starts.wait_for(count, max(0.0, last_ns / 1e9 - time.perf_counter()) + WAIT_S)
        cpu_s = _scheduler_s(stage) - begun_cpu_s
        view = _timers(stage)
        late = [start - due for start, due in zip(stage.starts.first_ns[:count], due_ns, strict=True) if start]
        quantile = quantiles(late)
        return Timers(
            count=count,
            missing=count - len(late),
            duplicates=stage.starts.duplicates,
            early=sum(one < 0 for one in late) + int(stage.starts.first_ns[count] != 0),
            cpu_us_per_task=round(max(0.0, cpu_s) / count * 1e6, 1),
            min_ms=round(min(late) / 1e6, 3),
            **quantile._asdict(),
            waiting=view.waiting,
            scheduler_rss_mb=_rss(stage).now_mb,
        )


# --- what waits -------------------------------------------------------------------------------------------------------


class WaitingOptions(ClusterOptions, frozen=True, kw_only=True):
    """How much waits."""

    tasks: Annotated[int, Meta(ge=1_000, le=100_000_000, description="that wait")] = 10_000_000
    horizon_days: HorizonDays = 30
    restarts: Annotated[int, Meta(ge=1, le=20, description="kill -9 of the scheduler, and another one")] = 3
    rate: Rate = 1_000.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long timers are due with them waiting")] = 30.0
    lead_s: LeadS = 150.0
    seed: Seed = 1


class Waiting(Figures, frozen=True, kw_only=True):
    """Memory of the scheduler in MB, before and after; times in seconds; lateness in milliseconds.

    `submit_per_s`: until all are accepted, `parked_per_s`: until all have left memory for the wheel. `restart_s`: from
    SIGKILL until all shards are loaded elsewhere, of which 6 s pass until the group misses the dead.
    `bytes_per_task`: keys and values that are kept for each waiting task, in the wheel and in the checkpoints.
    `rewrites_per_task`: records of the wheel beyond the first of each task; at most one for each level to come.
    """

    submit_per_s: float
    parked_per_s: float
    empty_rss_mb: float
    scheduler_rss_mb: float
    scheduler_rss_mb_max: float
    restart_rss_mb: float
    slope_bytes_per_task: float
    restart_s: float
    restart_s_max: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    bytes_per_task: float
    rewrites_per_task: float


def _measure_waiting(options: WaitingOptions, folder: Path, say: Say) -> Waiting:
    timed = round(options.rate * options.seconds)
    half = options.tasks // 2
    with running(options, folder, timed + 1 + WARM_UP) as stage:
        warm_up(stage, timed + 1)
        empty_mb, cpu_begun_s = _rss(stage).now_mb, _scheduler_s(stage)
        first = _park(stage, _far(half, options.horizon_days, timed, stage.blob, options.seed), say)
        time.sleep(QUIET_S)
        half_mb = _rss(stage).now_mb
        rest = _far(options.tasks - half, options.horizon_days, timed, stage.blob, options.seed, first=half)
        second = _park(stage, rest, say)
        cpu_s = _scheduler_s(stage) - cpu_begun_s
        time.sleep(QUIET_S)
        full, waiting = _rss(stage), _timers(stage).waiting
        wheel = _kept(stage, (delay_topic(level) for level in WheelShape().levels))
        state = _kept(stage, (SHARD_STATE,))
        restarts_s = []
        for number in range(options.restarts):
            restarts_s.append(kill_and_restart(stage, options.shards))
            say(f"restart {number + 1} of {options.restarts}: {restarts_s[-1]:.1f} s")
        restart_mb = _rss(stage).now_mb
        due_ns = _submit_timers(stage, timed, options, options.seed + 1)
        say(f"{timed} timers at {options.rate:g} a second")
        stage.starts.wait_for(timed, max(0.0, due_ns[-1] / 1e9 - time.perf_counter()) + WAIT_S)
        late = [start - due for start, due in zip(stage.starts.first_ns[:timed], due_ns, strict=True) if start]
        late_by = quantiles(late)
        accepted_s, parked_s = first.accepted_s + second.accepted_s, first.parked_s + second.parked_s
        return Waiting(
            count=options.tasks,
            missing=max(0, options.tasks - waiting) + timed - len(late),
            duplicates=max(0, waiting - options.tasks) + stage.starts.duplicates,
            early=sum(one < 0 for one in late) + int(stage.starts.first_ns[timed] != 0),
            cpu_us_per_task=round(cpu_s / options.tasks * 1e6, 1),
            submit_per_s=round(options.tasks / accepted_s, 1),
            parked_per_s=round(options.tasks / parked_s, 1),
            empty_rss_mb=empty_mb,
            scheduler_rss_mb=full.now_mb,
            scheduler_rss_mb_max=full.max_mb,
            restart_rss_mb=restart_mb,
            slope_bytes_per_task=round((full.now_mb - half_mb) * 1e6 / (options.tasks - half), 1),
            restart_s=round(statistics.median(restarts_s), 3),
            restart_s_max=max(restarts_s),
            p50_ms=late_by.p50_ms,
            p99_ms=late_by.p99_ms,
            max_ms=late_by.max_ms,
            bytes_per_task=round((wheel.bytes + state.bytes) / options.tasks, 1),
            rewrites_per_task=round(max(0, wheel.records - options.tasks) / options.tasks, 3),
        )


# --- what both do -----------------------------------------------------------------------------------------------------


class Rss(NamedTuple):
    """Memory of all schedulers, in MB."""

    now_mb: float
    max_mb: float


class Parked(NamedTuple):
    """How long it took until all were accepted, and until all had left memory."""

    accepted_s: float
    parked_s: float


class Kept(NamedTuple):
    """What topics hold: about so many bytes, by the mean size of some of the records."""

    records: int
    bytes: float


def warm_up(stage: ClusterStage, first: int) -> None:
    """Run some tasks, noted from `first` on, so that the ready topic is there, and what is imported late."""
    cells = range(first, first + WARM_UP)

    async def submit() -> None:
        await stage.noop.asubmit_many([{"index": index, "blob": stage.blob} for index in cells])

    asyncio.run(submit())
    if not stage.wait_until_settled(WARM_UP, stage.shards):  # with the opening of each shard
        raise NothingMeasured(f"the tasks of the warm-up did not end within {WAIT_S:.0f} s")


def _far(count: int, days: int, index: int, blob: str, seed: int, *, first: int = 0) -> Order:
    begin_us = time.time_ns() // 1_000 + TOMORROW_US
    span_us = days * DAY_US - TOMORROW_US
    return Order(
        kind="tasks", count=count, first=first, index=index, blob=blob, begin_us=begin_us, span_us=span_us, seed=seed
    )


def _park(stage: ClusterStage, order: Order, say: Say) -> Parked:
    """Submit them, and wait until the scheduler has accepted all and parked all."""
    limit_s = WAIT_S + order.count / ACCEPTS_PER_S_MIN
    with stage.log() as log:
        wanted = sum(stage.end_offsets(log)) + order.count
        with sending(stage, order) as producer:
            wait_until(lambda: sum(stage.end_offsets(log)) > wanted - order.count, WAIT_S)  # its interpreter has begun
            begun_s = time.perf_counter()
            is_done = wait_until(lambda: sum(stage.end_offsets(log)) >= wanted, limit_s, every_s=0.05)
            accepted_s = time.perf_counter() - begun_s
            written_s = wait_for(producer, WAIT_S)
        if not is_done:
            raise NothingMeasured(f"{order.count} tasks were not accepted within {limit_s:.0f} s")
    say(f"    written in {written_s:.0f} s, accepted in {accepted_s:.0f} s")
    if not wait_until(lambda: in_memory(_timers(stage)) == 0, limit_s, every_s=0.25):
        raise NothingMeasured(f"the accepted tasks did not leave memory within {limit_s:.0f} s")
    return Parked(accepted_s, time.perf_counter() - begun_s)


def _submit_timers(stage: ClusterStage, count: int, options: TimersOptions | WaitingOptions, seed: int) -> list[int]:
    """Submit them by topic; when each is due, in nanoseconds by the clock of the starts."""
    begin_us = time.time_ns() // 1_000 + round(options.lead_s * 1e6)
    order = Order(
        kind="tasks",
        count=count,
        blob=stage.blob,
        begin_us=begin_us,
        span_us=round(count / options.rate * 1e6),
        is_even=True,
        seed=seed,
    )
    shift_ns = time.perf_counter_ns() - time.time_ns()
    with sending(stage, order) as producer:
        wait_for(producer, options.lead_s + WAIT_S)
    return [order.due_us(number) * 1_000 + shift_ns for number in range(count)]


def schedulers(stage: ClusterStage) -> list[Process]:
    """The schedulers that were not ended."""
    return [process for process in stage.processes if process.name == "scheduler"]


def _timers(stage: ClusterStage) -> TimersView:
    """What the only scheduler says."""
    (process,) = schedulers(stage)
    return timers_of_process(process)


def timers_of_process(process: Process) -> TimersView:
    """What a scheduler says of its shards. NothingMeasured: it does not answer."""
    try:
        answer = httpx.get(f"{process.facts['health']}/timers", timeout=ASK_S).raise_for_status()
    except httpx.HTTPError as error:
        raise NothingMeasured(f"the scheduler does not say what waits: {error}") from error
    return msgspec.json.decode(answer.content, type=TimersView)


def in_memory(view: TimersView) -> int:
    """How many tasks wait there."""
    return sum(window.tasks for window in view.windows if window.level is None)


def kill_and_restart(stage: ClusterStage, shards: int, timeout_s: float = WAIT_S) -> float:
    """From SIGKILL of the scheduler until another one has all shards, in seconds."""
    (victim,) = schedulers(stage)
    begun_s = time.perf_counter()
    victim.kill()
    stage.processes.remove(victim)
    process = stage.start("scheduler")
    if not wait_until(lambda: timers_of_process(process).shards == shards, timeout_s, every_s=0.02):
        raise NothingMeasured(f"{timeout_s:.0f} s after a kill not all shards are loaded")
    return round(time.perf_counter() - begun_s, 3)


def _scheduler_s(stage: ClusterStage) -> float:
    return stage.processor_s().get("scheduler", 0.0)


def _rss(stage: ClusterStage) -> Rss:
    pids = [process.pid for process in schedulers(stage)]
    return Rss(round(sum(map(rss_mb, pids)), 1), round(sum(map(rss_mb_max, pids)), 1))


def _kept(stage: ClusterStage, topics: Iterable[str]) -> Kept:
    """By offsets; what was removed since counts as well, so that this is the most."""
    records, size = 0, 0.0
    for topic in topics:
        with stage.log() as log, closing(log.reader()) as reader:
            ends = {number: log.end_offset(TopicPartition(topic, number)) for number in range(log.partitions(topic))}
            for number in (number for number, end in ends.items() if end):
                reader.seek(TopicPartition(topic, number), 0)
            sizes: list[int] = []
            give_up_at = time.monotonic() + SAMPLE_S
            while len(sizes) < SAMPLE and time.monotonic() < give_up_at:
                log.poll(0.05)
                sizes += [len(one.key or b"") + len(one.value or b"") for one in reader.take(SAMPLE)]
        records += sum(ends.values())
        size += sum(ends.values()) * (statistics.fmean(sizes) if sizes else 0.0)
    return Kept(records, size)


BENCHMARKS = (
    Benchmark("timers", "how late timers are that come out of the delay wheel", TimersOptions, _measure_timers),
    Benchmark("waiting", "what millions of tasks cost that wait for days", WaitingOptions, _measure_waiting),
)
