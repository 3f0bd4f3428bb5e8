"""Who goes next, and what holds back, on Kafka: limits, priorities, tenants, and more than can be done.

`limits` has three parts, each with a cluster of its own: a rate that is always wanted, concurrency of one for each of
many keys while workers and schedulers are killed, and the throughput with limits that hold nobody back.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from benchmarks import shared_keys
from benchmarks.cluster import APP, ClusterOptions, ClusterStage, Process, running
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say, Seed, quantiles
from benchmarks.load import closed_loop, open_loop, wait_until
from benchmarks.machine import rss_mb
from benchmarks.shared_keys import SharedKeys
from benchmarks.shared_starts import SharedStarts
from benchmarks.stage import TASK_TYPE, WAIT_S, keyed_in
from scheduler.refusals import RefusalKind
from schemas.limits import BULK_MAX
from tidewheel import App
from tidewheel.errors import NotSubmitted

BULKS_AT_ONCE = 4
WARM_UP = 200  # tasks before what is timed: topics of the queue are made, processes have met each other
SETTLE_S = 3.0  # after a policy: until all schedulers have it
PRIORITIES = ("high", "medium", "low")


async def _submit_all(stage: ClusterStage, first: int, end: int, **options: Any) -> None:
    submitter = stage.noop.options(**options)

    async def submit(start: int) -> None:
        indexes = range(start, min(start + BULK_MAX, end))
        await submitter.asubmit_many([{"index": index, "blob": stage.blob} for index in indexes])

    await closed_loop(range(first, end, BULK_MAX), BULKS_AT_ONCE, submit)


def submit(stage: ClusterStage, first: int, end: int, **options: Any) -> None:
    """Submit the tasks from `first` up to `end` in bulk, and wait for their acceptance."""
    asyncio.run(_submit_all(stage, first, end, **options))


def _warm_up(stage: ClusterStage, first: int) -> None:
    """A few tasks of each priority."""
    for number, priority in enumerate(PRIORITIES):
        begin, end = (first + WARM_UP * part // len(PRIORITIES) for part in (number, number + 1))
        submit(stage, begin, end, priority=priority)
    if not wait_until(lambda: all(stage.starts.first_ns[first : first + WARM_UP]), WAIT_S):
        raise NothingMeasured("the tasks of the warm-up did not start in time")
    time.sleep(1.0)


# --- limits -----------------------------------------------------------------------------------------------------------


class LimitOptions(ClusterOptions, frozen=True, kw_only=True):
    """What is limited."""

    shards: Annotated[int, Meta(ge=1, le=64, description="shards of the engine")] = 8
    workers: Annotated[int, Meta(ge=1, le=16, description="worker processes")] = 4
    projectors: Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")] = 0
    rate: Annotated[int, Meta(ge=1, le=5_000, description="starts a second that the limit allows")] = 100
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long the rate is wanted")] = 30.0
    keys: Annotated[int, Meta(ge=1, le=100_000, description="keys with one attempt at a time")] = 1_000
    keyed_tasks: Annotated[int, Meta(ge=1, le=1_000_000, description="tasks under these keys")] = 20_000
    kills: Annotated[int, Meta(ge=0, le=100, description="kill -9 of a worker or scheduler meanwhile")] = 10
    tasks: Annotated[int, Meta(ge=1, le=10_000_000, description="for the throughput, with and without limits")] = 50_000
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
    used_ratio, exceeded, wanted = _measure_rate(options, folder / "rate", say)
    met, keyed_missing, keyed_duplicates = _measure_keys(options, folder / "keys", say)
    say(f"{options.tasks} tasks, without limits and with two that hold nobody back")
    one_worker = replace(options, workers=1)
    plain_per_s, _, _ = _throughput(one_worker, folder / "plain", {})
    declared = {
        "rate": {"count": 1_000_000, "period_seconds": 1.0, "where": {"task_type": TASK_TYPE}},
        "at-once": {"count": 5_000, "key": "{tenant_id}"},
    }
    limited_per_s, missing, cpu_us = _throughput(one_worker, folder / "limited", declared)
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


def _measure_rate(options: LimitOptions, folder: Path, say: Say) -> tuple[float, int, int]:
    """The share of the rate that was used, the starts beyond it, and how many tasks there were."""
    wanted = round(options.rate * options.seconds * 1.2)
    say(f"a rate of {options.rate}/s over {options.shards} shards and {options.workers} workers")
    with running(options, folder, wanted) as stage:
        limit = stage.backend.limits.set_limit("rate", {"count": options.rate, "period_seconds": 1.0}).run()
        time.sleep(SETTLE_S)
        submit(stage, 0, wanted)
        time.sleep(options.seconds)
        starts = sorted(at for at in stage.starts.first_ns if at)
    if len(starts) < 2:
        raise NothingMeasured("fewer than two tasks were started under the rate")
    burst = limit.burst or 0
    took_s = (starts[-1] - starts[0]) / 1e9
    return (
        round((len(starts) - burst) / (options.rate * took_s), 4),
        beyond(starts, options.rate, burst),
        wanted,
    )


def beyond(starts_ns: Sequence[int], rate: int, burst: int) -> int:
    """How many starts are more than the burst and what came meanwhile, in any interval that ends with them."""
    period_ns, count = 1_000_000_000, 0
    highest = -(1 << 62)
    for number, at in enumerate(starts_ns):
        highest = max(highest, at * rate - number * period_ns)
        if at * rate - (number + 1 - burst) * period_ns < highest:
            count += 1
    return count


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


def _throughput(
    options: LimitOptions, folder: Path, limits: Mapping[str, Mapping[str, Any]]
) -> tuple[float, int, float]:
    warm_up = min(5_000, options.tasks)
    total = warm_up + options.tasks
    with running(options, folder, total) as stage, stage.log() as log:
        for name, fields in limits.items():
            stage.backend.limits.set_limit(name, fields).run()
        time.sleep(SETTLE_S)
        submit(stage, 0, warm_up)
        if not wait_until(lambda: stage.starts.started >= warm_up, WAIT_S):
            raise NothingMeasured("the tasks of the warm-up did not start in time")
        time.sleep(1.0)
        cpu_s = sum(stage.processor_s().values())
        begun_s = time.perf_counter()
        submit(stage, warm_up, total)
        is_done = stage.starts.wait_for(total, 4 * WAIT_S)
        took_s = (max(stage.starts.first_ns) / 1e9) - begun_s
        stage.end_offsets(log)
        cpu_us = round((sum(stage.processor_s().values()) - cpu_s) / options.tasks * 1e6, 1)
        missing = 0 if is_done else total - stage.starts.started
        return options.tasks / took_s, missing, cpu_us


# --- priorities -------------------------------------------------------------------------------------------------------


class PriorityOptions(ClusterOptions, frozen=True, kw_only=True):
    """What waits."""

    projectors: Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")] = 0
    backlog: Annotated[int, Meta(ge=100, le=10_000_000, description="tasks of each priority that wait")] = 30_000
    urgent: Annotated[int, Meta(ge=1, le=1_000, description="high ones, one by one behind a backlog of low ones")] = 20


class Priorities(Figures, frozen=True, kw_only=True):
    """`high_…` from the submission of a high task to its start behind the low ones; shares in percent of the starts."""

    high_p50_ms: float
    high_max_ms: float
    high_percent: float
    medium_percent: float
    low_percent: float
    low_starved_ms: float


def _measure_priorities(options: PriorityOptions, folder: Path, say: Say) -> Priorities:
    backlog = options.backlog
    total = 3 * backlog + options.urgent + backlog
    with running(options, folder, total + WARM_UP) as stage:
        _warm_up(stage, total)
        say(f"{backlog} tasks of each priority")
        queues = stage.backend.queues
        queues.pause("default").run()
        time.sleep(SETTLE_S)
        for number, priority in enumerate(PRIORITIES):
            submit(stage, number * backlog, (number + 1) * backlog, priority=priority)
        queues.resume("default").run()
        stage.starts.wait_for(3 * backlog, 10 * WAIT_S)
        order = sorted((stage.starts.first_ns[index], index // backlog) for index in range(3 * backlog))
        # As long as all three wait: the high ones, 70 of 100, end first.
        saturated = [priority for at, priority in order[: backlog * 100 // 70 * 9 // 10] if at]
        shares = Counter(saturated[len(saturated) // 10 :])
        counted = shares.total()
        low_at = [at for at, priority in order[: len(saturated)] if priority == 2]
        gaps = [after - before for before, after in itertools.pairwise(low_at)]
        say(f"{options.urgent} high ones behind {backlog} low ones")
        waits = asyncio.run(_behind(stage, options, 3 * backlog))
        used = stage.starts
        return Priorities(
            count=total,
            missing=total + WARM_UP - used.started,
            duplicates=used.duplicates,
            early=0,
            cpu_us_per_task=0.0,
            high_p50_ms=quantiles(waits).p50_ms,
            high_max_ms=quantiles(waits).max_ms,
            high_percent=round(100 * shares[0] / counted, 1),
            medium_percent=round(100 * shares[1] / counted, 1),
            low_percent=round(100 * shares[2] / counted, 1),
            low_starved_ms=round(max(gaps, default=0) / 1e6, 1),
        )


async def _behind(stage: ClusterStage, options: PriorityOptions, first: int) -> list[int]:
    """How long high tasks wait, in nanoseconds, while a backlog of low ones is worked off."""
    urgent = range(first, first + options.urgent)
    low = asyncio.create_task(
        _submit_all(stage, first + options.urgent, first + options.urgent + options.backlog, priority="low")
    )
    await low
    begun = dict.fromkeys(urgent, 0)
    high = stage.noop.options(priority="high")
    for index in urgent:
        begun[index] = time.perf_counter_ns()
        await high.asubmit(index, stage.blob)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(stage.starts.wait_for, first + options.urgent + options.backlog, 10 * WAIT_S)
    return [stage.starts.first_ns[index] - at for index, at in begun.items() if stage.starts.first_ns[index]]


# --- tenants ----------------------------------------------------------------------------------------------------------


class TenantOptions(ClusterOptions, frozen=True, kw_only=True):
    """Who submits how much."""

    projectors: Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")] = 0
    tenants: Annotated[int, Meta(ge=2, le=1_000, description="tenants, one of which floods")] = 10
    rate: Annotated[float, Meta(gt=0, le=1_000, description="submissions a second of each of the others")] = 10.0
    bulk: Annotated[int, Meta(ge=1, le=1_000, description="tasks in one call of the one that floods")] = 10
    skew: Annotated[float, Meta(ge=1, le=1_000, description="times as many of the one")] = 100.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long")] = 30.0


class Tenants(Figures, frozen=True, kw_only=True):
    """From submission to start, of the tenants that do not flood."""

    p50_alone_ms: float
    p99_alone_ms: float
    p50_shared_ms: float
    p99_shared_ms: float
    p99_ratio: float
    flood_p99_ms: float


def _measure_tenants(options: TenantOptions, folder: Path, say: Say) -> Tenants:
    quiet = round((options.tenants - 1) * options.rate * options.seconds)
    flood = round(options.skew * options.rate * options.seconds)
    total = 2 * quiet + flood
    with running(options, folder, total + WARM_UP) as stage:
        _warm_up(stage, total)
        say(f"{options.tenants - 1} tenants alone")
        alone = asyncio.run(_of_tenants(stage, options, 0, quiet))
        stage.starts.wait_for(quiet, WAIT_S)
        say("and with one more that floods")
        shared, flooded = asyncio.run(_with_flood(stage, options, quiet, flood))
        stage.starts.wait_for(total + WARM_UP, 4 * WAIT_S)
        cpu_s = sum(stage.processor_s().values())
        before, after = _waits(stage.starts, alone), _waits(stage.starts, shared)
        return Tenants(
            count=total,
            missing=total + WARM_UP - stage.starts.started,
            duplicates=stage.starts.duplicates,
            early=0,
            cpu_us_per_task=round(cpu_s / total * 1e6, 1),
            p50_alone_ms=quantiles(before).p50_ms,
            p99_alone_ms=quantiles(before).p99_ms,
            p50_shared_ms=quantiles(after).p50_ms,
            p99_shared_ms=quantiles(after).p99_ms,
            p99_ratio=round(quantiles(after).p99_ms / quantiles(before).p99_ms, 2),
            flood_p99_ms=quantiles(_waits(stage.starts, flooded)).p99_ms,
        )


def _waits(starts: SharedStarts, begun: Mapping[int, int]) -> list[int]:
    return [starts.first_ns[index] - at for index, at in begun.items() if starts.first_ns[index]]


async def _of_tenants(stage: ClusterStage, options: TenantOptions, first: int, count: int) -> dict[int, int]:
    """Submit of the quiet tenants in turn; when each submission began."""
    begun: dict[int, int] = {}
    others = [stage.noop.options(metadata={"tenant_id": f"tenant-{number}"}) for number in range(options.tenants - 1)]

    async def one(number: int, _intended_ns: int) -> None:
        index = first + number
        begun[index] = time.perf_counter_ns()
        await others[number % len(others)].asubmit(index, stage.blob)

    await open_loop(count, options.rate * len(others), one)
    return begun


async def _with_flood(
    stage: ClusterStage, options: TenantOptions, quiet: int, flood: int
) -> tuple[dict[int, int], dict[int, int]]:
    flooded: dict[int, int] = {}
    noop = stage.noop.options(metadata={"tenant_id": "flood"})
    begin = 2 * quiet
    at_once = options.bulk

    async def many(number: int, _intended_ns: int) -> None:
        indexes = range(begin + number * at_once, min(begin + (number + 1) * at_once, begin + flood))
        flooded.update(dict.fromkeys(indexes, time.perf_counter_ns()))
        await noop.asubmit_many([{"index": index, "blob": stage.blob} for index in indexes])

    bulks = -(-flood // at_once)
    _, shared = await asyncio.gather(
        open_loop(bulks, options.skew * options.rate / at_once, many), _of_tenants(stage, options, quiet, quiet)
    )
    return shared, flooded


# --- overload ---------------------------------------------------------------------------------------------------------


class OverloadOptions(ClusterOptions, frozen=True, kw_only=True):
    """How much too much."""

    projectors: Annotated[int, Meta(ge=0, le=16, description="projector processes; 0: the view stays empty")] = 0
    tenants: Annotated[int, Meta(ge=1, le=1_000, description="tenants, each with what a tenant may by default")] = 4
    rate: Annotated[float, Meta(gt=0, le=100_000, description="submissions a second that can be sustained")] = 4_000.0
    factor: Annotated[float, Meta(ge=1, le=100, description="times as many are submitted")] = 3.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long")] = 60.0


class Overload(Figures, frozen=True, kw_only=True):
    """`recovery_s`: from the end of the load until tasks start as fast as before it; latencies in milliseconds."""

    accepted: int
    refused: int
    errors: int
    lost: int
    accepted_per_s: float
    accepted_per_s_last: float
    before_p99_ms: float
    recovery_s: float
    rss_mb_max: float


class _Tally:
    def __init__(self, total: int) -> None:
        self.accepted = bytearray(total)
        self.refused = self.errors = 0
        self.accepted_in: Counter[int] = Counter()  # by second


def _measure_overload(options: OverloadOptions, folder: Path, say: Say) -> Overload:
    count = round(options.rate * options.factor * options.seconds)
    probes = 1_000
    total = count + 2 * probes
    with running(options, folder, total + WARM_UP, is_open=False) as stage:
        _warm_up(stage, total)
        say(f"{options.factor:g} times {options.rate:g}/s for {options.seconds:g} s, of {options.tenants} tenants")
        before = asyncio.run(_probe(stage, count, probes // 2))
        before_p99_ms = quantiles(before.values()).p99_ms
        tally = _Tally(total)
        rss: list[float] = []
        asyncio.run(_flood(stage, options, count, tally, rss))
        ended_s = time.perf_counter()
        recovery_s = _recovery_s(stage, count + probes, before_p99_ms, ended_s)
        accepted = sum(tally.accepted)
        wait_until(lambda: _lost(stage, tally) == 0, 4 * WAIT_S, every_s=0.5)
        seconds = round(options.seconds)
        last = [tally.accepted_in[second] for second in range(seconds // 2, seconds)]
        return Overload(
            count=count,
            missing=_lost(stage, tally),
            duplicates=stage.starts.duplicates,
            early=0,
            cpu_us_per_task=0.0,
            accepted=accepted,
            refused=tally.refused,
            errors=tally.errors,
            lost=_lost(stage, tally),
            accepted_per_s=round(accepted / options.seconds, 1),
            accepted_per_s_last=round(sum(last) / max(1, len(last)), 1),
            before_p99_ms=before_p99_ms,
            recovery_s=recovery_s,
            rss_mb_max=max(rss, default=0.0),
        )


def _lost(stage: ClusterStage, tally: _Tally) -> int:
    return sum(is_in and not stage.starts.first_ns[index] for index, is_in in enumerate(tally.accepted))


async def _flood(stage: ClusterStage, options: OverloadOptions, count: int, tally: _Tally, rss: list[float]) -> None:
    tenants = [stage.noop.options(metadata={"tenant_id": f"tenant-{n}"}) for n in range(options.tenants)]
    at_once, begun_s = 100, time.perf_counter()
    schedulers = [process.pid for process in stage.processes if process.name == "scheduler"]

    async def many(number: int, _intended_ns: int) -> None:
        indexes = range(number * at_once, min((number + 1) * at_once, count))
        calls = [{"index": index, "blob": stage.blob} for index in indexes]
        answers = await _answers(stage, tenants[number % len(tenants)], calls)
        second = int(time.perf_counter() - begun_s)
        for index, kind in zip(indexes, answers, strict=True):
            if kind is None:
                tally.accepted[index] = 1
                tally.accepted_in[second] += 1
            elif kind in (RefusalKind.TOO_MANY, RefusalKind.OVERLOADED, RefusalKind.UNAVAILABLE):
                tally.refused += 1
            else:
                tally.errors += 1
        if number % 100 == 0:
            rss.append(sum(rss_mb(pid) for pid in schedulers))

    await open_loop(-(-count // at_once), options.rate * options.factor / at_once, many)


async def _answers(stage: ClusterStage, submitter: Any, calls: Sequence[dict[str, Any]]) -> list[RefusalKind | None]:
    """How each was answered: None if it was accepted."""
    fields = submitter._fields
    payloads = [stage.noop.handler.payload((), call) for call in calls]
    results = await stage.backend.prepare(fields).submit_many(payloads)
    return [getattr(result, "kind", None) for result in results]


async def _probe(stage: ClusterStage, first: int, count: int) -> dict[int, int]:
    """Submit at a low rate; how long each waited for its start, in nanoseconds."""
    begun = array("q", bytes(8 * count))
    noop = stage.noop.options(metadata={"tenant_id": "probe"})

    async def one(number: int, _intended_ns: int) -> None:
        begun[number] = time.perf_counter_ns()
        try:
            await noop.asubmit(first + number, stage.blob)
        except NotSubmitted:
            begun[number] = 0

    await open_loop(count, 50.0, one)
    await asyncio.sleep(0.5)
    starts = stage.starts.first_ns
    return {number: starts[first + number] - at for number, at in enumerate(begun) if at and starts[first + number]}


def _recovery_s(stage: ClusterStage, first: int, before_p99_ms: float, ended_s: float) -> float:
    """From the end of the load until half a second of probes starts within twice what it took before."""
    for number in range(40):
        waits = asyncio.run(_probe(stage, first + number * 25, 25))
        if len(waits) == 25 and quantiles(waits.values()).max_ms <= 2 * before_p99_ms:
            return round(time.perf_counter() - ended_s - 0.5, 1)
    raise NothingMeasured("tasks did not start as fast as before within 40 looks")


BENCHMARKS = (
    Benchmark("limits", "rates and concurrency: exact, used, and what they cost", LimitOptions, _measure_limits),
    Benchmark("priority", "shares of the priorities, and urgent tasks", PriorityOptions, _measure_priorities),
    Benchmark("tenants", "what a tenant that floods does to the others", TenantOptions, _measure_tenants),
    Benchmark("overload", "more than can be done", OverloadOptions, _measure_overload),
)
