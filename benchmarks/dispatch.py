"""Who goes next, and what holds back: measured alike on every engine.

Who opens the engine is told how many tasks there will be. Modules for each engine say how it is opened.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Protocol

from msgspec import Meta

from benchmarks.contract import Figures, NothingMeasured, Say, quantiles
from benchmarks.load import closed_loop, open_loop, wait_until
from benchmarks.stage import TASK_TYPE, WAIT_S, Noop
from scheduler.refusals import RefusalKind
from schemas.limits import BULK_MAX
from tidewheel.backend import LocalBackend
from tidewheel.errors import NotSubmitted

BULKS_AT_ONCE = 4
WARM_UP = 200  # tasks before what is timed: topics of the queue are made, processes have met each other
SETTLE_S = 3.0  # after a policy: until all schedulers have it
PRIORITIES = ("high", "medium", "low")

Backlog = Annotated[int, Meta(ge=100, le=10_000_000, description="tasks of each priority that wait")]
Urgent = Annotated[int, Meta(ge=1, le=1_000, description="high ones, one by one behind a backlog of low ones")]
TenantCount = Annotated[int, Meta(ge=2, le=1_000, description="tenants, one of which floods")]
TenantRate = Annotated[float, Meta(gt=0, le=1_000, description="submissions a second of each of the others")]
Bulk = Annotated[int, Meta(ge=1, le=1_000, description="tasks in one call of the one that floods")]
Skew = Annotated[float, Meta(ge=1, le=1_000, description="times as many of the one")]
Seconds = Annotated[float, Meta(gt=0, le=3_600, description="how long")]
Flooding = Annotated[int, Meta(ge=1, le=1_000, description="tenants, each with what a tenant may by default")]
Sustained = Annotated[float, Meta(gt=0, le=100_000, description="submissions a second that can be sustained")]
Factor = Annotated[float, Meta(ge=1, le=100, description="times as many are submitted")]
LimitRate = Annotated[int, Meta(ge=1, le=5_000, description="starts a second that the limit allows")]
Tasks = Annotated[int, Meta(ge=1, le=10_000_000, description="for the throughput, with and without limits")]


class Starting(Protocol):
    """The starts of tasks: when the first of each was, by its index (0: never), in nanoseconds."""

    @property
    def first_ns(self) -> Sequence[int]:
        """By index."""

    @property
    def started(self) -> int:
        """How many tasks."""

    @property
    def duplicates(self) -> int:
        """Starts beyond the first ones."""


class Running(Protocol):
    """A running engine with its task type."""

    @property
    def noop(self) -> Noop:
        """The task type."""

    @property
    def starts(self) -> Starting:
        """Its starts."""

    @property
    def backend(self) -> LocalBackend:
        """What operators can do."""

    @property
    def blob(self) -> str:
        """The payload."""

    def cpu_s(self) -> float:
        """Processor time of all processes so far."""

    def scheduler_rss_mb(self) -> float:
        """Memory of what schedules."""


Opening = Callable[[int], AbstractContextManager[Running]]  # with room for the starts of so many tasks


async def _submit_all(stage: Running, first: int, end: int, **options: Any) -> None:
    submitter = stage.noop.options(**options)

    async def submit(start: int) -> None:
        indexes = range(start, min(start + BULK_MAX, end))
        await submitter.asubmit_many([{"index": index, "blob": stage.blob} for index in indexes])

    await closed_loop(range(first, end, BULK_MAX), BULKS_AT_ONCE, submit)


def submit(stage: Running, first: int, end: int, **options: Any) -> None:
    """Submit the tasks from `first` up to `end` in bulk, and wait for their acceptance."""
    asyncio.run(_submit_all(stage, first, end, **options))


def started(stage: Running, end: int, timeout_s: float) -> bool:
    """Wait until all tasks below the index `end` have started; whether they have."""
    return wait_until(lambda: 0 not in stage.starts.first_ns[:end], timeout_s, every_s=0.05)


def _warm_up(stage: Running, first: int) -> None:
    """A few tasks of each priority."""
    for number, priority in enumerate(PRIORITIES):
        begin, end = (first + WARM_UP * part // len(PRIORITIES) for part in (number, number + 1))
        submit(stage, begin, end, priority=priority)
    if not wait_until(lambda: all(stage.starts.first_ns[first : first + WARM_UP]), WAIT_S):
        raise NothingMeasured("the tasks of the warm-up did not start in time")
    time.sleep(1.0)


# --- limits -----------------------------------------------------------------------------------------------------------


def measure_rate(opening: Opening, rate: int, seconds: float) -> tuple[float, int, int]:
    """The share of the rate that was used, the starts beyond it, and how many tasks there were."""
    wanted = round(rate * seconds * 1.2)
    with opening(wanted) as stage:
        limit = stage.backend.limits.set_limit("rate", {"count": rate, "period_seconds": 1.0}).run()
        time.sleep(SETTLE_S)
        submit(stage, 0, wanted)
        time.sleep(seconds)
        starts = sorted(at for at in stage.starts.first_ns if at)
    if len(starts) < 2:
        raise NothingMeasured("fewer than two tasks were started under the rate")
    burst = limit.burst or 0
    took_s = (starts[-1] - starts[0]) / 1e9
    return (
        round((len(starts) - burst) / (rate * took_s), 4),
        beyond(starts, rate, burst),
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


def throughput_ratio(plain: Opening, limited: Opening, tasks: int) -> tuple[float, float, int, float]:
    """Tasks a second without limits and with two that hold nobody back; how many were missing then, and their cost."""
    plain_per_s, _, _ = _throughput(plain, tasks, {})
    declared = {
        "rate": {"count": 1_000_000, "period_seconds": 1.0, "where": {"task_type": TASK_TYPE}},
        "at-once": {"count": 5_000, "key": "{tenant_id}"},
    }
    limited_per_s, missing, cpu_us = _throughput(limited, tasks, declared)
    return plain_per_s, limited_per_s, missing, cpu_us


def _throughput(opening: Opening, tasks: int, limits: Mapping[str, Mapping[str, Any]]) -> tuple[float, int, float]:
    warm_up = min(5_000, tasks)
    total = warm_up + tasks
    with opening(total) as stage:
        for name, fields in limits.items():
            stage.backend.limits.set_limit(name, fields).run()
        time.sleep(SETTLE_S)
        submit(stage, 0, warm_up)
        if not wait_until(lambda: stage.starts.started >= warm_up, WAIT_S):
            raise NothingMeasured("the tasks of the warm-up did not start in time")
        time.sleep(1.0)
        cpu_s = stage.cpu_s()
        begun_s = time.perf_counter()
        submit(stage, warm_up, total)
        is_done = started(stage, total, 4 * WAIT_S)
        took_s = (max(stage.starts.first_ns) / 1e9) - begun_s
        cpu_us = round((stage.cpu_s() - cpu_s) / tasks * 1e6, 1)
        missing = 0 if is_done else total - stage.starts.started
        return tasks / took_s, missing, cpu_us


# --- priorities -------------------------------------------------------------------------------------------------------


class Priorities(Figures, frozen=True, kw_only=True):
    """`high_…` from the submission of a high task to its start behind the low ones; shares in percent of the starts."""

    high_p50_ms: float
    high_max_ms: float
    high_percent: float
    medium_percent: float
    low_percent: float
    low_starved_ms: float


def measure_priorities(opening: Opening, backlog: int, urgent: int, say: Say) -> Priorities:
    """Shares while all three wait, then high ones behind low ones."""
    total = 3 * backlog + urgent + backlog
    with opening(total + WARM_UP) as stage:
        _warm_up(stage, total)
        say(f"{backlog} tasks of each priority")
        queues = stage.backend.queues
        queues.pause("default").run()
        time.sleep(SETTLE_S)
        for number, priority in enumerate(PRIORITIES):
            submit(stage, number * backlog, (number + 1) * backlog, priority=priority)
        queues.resume("default").run()
        started(stage, 3 * backlog, 10 * WAIT_S)
        order = sorted((stage.starts.first_ns[index], index // backlog) for index in range(3 * backlog))
        # As long as all three wait: the high ones, 70 of 100, end first.
        saturated = [priority for at, priority in order[: backlog * 100 // 70 * 9 // 10] if at]
        shares = Counter(saturated[len(saturated) // 10 :])
        counted = shares.total()
        low_at = [at for at, priority in order[: len(saturated)] if priority == 2]
        gaps = [after - before for before, after in itertools.pairwise(low_at)]
        say(f"{urgent} high ones behind {backlog} low ones")
        waits = asyncio.run(_behind(stage, backlog, urgent, 3 * backlog))
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


async def _behind(stage: Running, backlog: int, count: int, first: int) -> list[int]:
    """How long high tasks wait, in nanoseconds, while a backlog of low ones is worked off."""
    urgent = range(first, first + count)
    low = asyncio.create_task(_submit_all(stage, first + count, first + count + backlog, priority="low"))
    await low
    begun = dict.fromkeys(urgent, 0)
    high = stage.noop.options(priority="high")
    for index in urgent:
        begun[index] = time.perf_counter_ns()
        await high.asubmit(index, stage.blob)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(started, stage, first + count + backlog, 10 * WAIT_S)
    return [stage.starts.first_ns[index] - at for index, at in begun.items() if stage.starts.first_ns[index]]


# --- tenants ----------------------------------------------------------------------------------------------------------


class TenantLoad(Protocol):
    """Who submits how much."""

    @property
    def tenants(self) -> int:
        """Tenants, one of which floods."""

    @property
    def rate(self) -> float:
        """Submissions a second of each of the others."""

    @property
    def bulk(self) -> int:
        """Tasks in one call of the one that floods."""

    @property
    def skew(self) -> float:
        """Times as many of the one."""

    @property
    def seconds(self) -> float:
        """How long."""


class Tenants(Figures, frozen=True, kw_only=True):
    """From submission to start, of the tenants that do not flood."""

    p50_alone_ms: float
    p99_alone_ms: float
    p50_shared_ms: float
    p99_shared_ms: float
    p99_ratio: float
    flood_p99_ms: float


def measure_tenants(opening: Opening, options: TenantLoad, say: Say) -> Tenants:
    """How long the quiet ones wait, alone and beside a flood."""
    quiet = round((options.tenants - 1) * options.rate * options.seconds)
    flood = round(options.skew * options.rate * options.seconds)
    total = 2 * quiet + flood
    with opening(total + WARM_UP) as stage:
        _warm_up(stage, total)
        say(f"{options.tenants - 1} tenants alone")
        alone = asyncio.run(_of_tenants(stage, options, 0, quiet))
        started(stage, quiet, WAIT_S)
        say("and with one more that floods")
        shared, flooded = asyncio.run(_with_flood(stage, options, quiet, flood))
        started(stage, total + WARM_UP, 4 * WAIT_S)
        cpu_s = stage.cpu_s()
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


def _waits(starts: Starting, begun: Mapping[int, int]) -> list[int]:
    return [starts.first_ns[index] - at for index, at in begun.items() if starts.first_ns[index]]


async def _of_tenants(stage: Running, options: TenantLoad, first: int, count: int) -> dict[int, int]:
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
    stage: Running, options: TenantLoad, quiet: int, flood: int
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


class Overloading(Protocol):
    """How much too much."""

    @property
    def tenants(self) -> int:
        """Tenants, each with what a tenant may by default."""

    @property
    def rate(self) -> float:
        """Submissions a second that can be sustained."""

    @property
    def factor(self) -> float:
        """Times as many are submitted."""

    @property
    def seconds(self) -> float:
        """How long."""


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


def measure_overload(opening: Opening, options: Overloading, say: Say) -> Overload:
    """What is accepted, refused and lost; and when it is over."""
    count = round(options.rate * options.factor * options.seconds)
    probes = 1_000
    total = count + 2 * probes
    with opening(total + WARM_UP) as stage:
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


def _lost(stage: Running, tally: _Tally) -> int:
    return sum(is_in and not stage.starts.first_ns[index] for index, is_in in enumerate(tally.accepted))


async def _flood(stage: Running, options: Overloading, count: int, tally: _Tally, rss: list[float]) -> None:
    tenants = [stage.noop.options(metadata={"tenant_id": f"tenant-{n}"}) for n in range(options.tenants)]
    at_once, begun_s = 100, time.perf_counter()

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
            rss.append(stage.scheduler_rss_mb())

    await open_loop(-(-count // at_once), options.rate * options.factor / at_once, many)


async def _answers(stage: Running, submitter: Any, calls: Sequence[dict[str, Any]]) -> list[RefusalKind | None]:
    """How each was answered: None if it was accepted."""
    fields = submitter._fields
    payloads = [stage.noop.handler.payload((), call) for call in calls]
    results = await stage.backend.prepare(fields).submit_many(payloads)
    return [getattr(result, "kind", None) for result in results]


async def _probe(stage: Running, first: int, count: int) -> dict[int, int]:
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


def _recovery_s(stage: Running, first: int, before_p99_ms: float, ended_s: float) -> float:
    """From the end of the load until half a second of probes starts within twice what it took before."""
    for number in range(40):
        waits = asyncio.run(_probe(stage, first + number * 25, 25))
        if len(waits) == 25 and quantiles(waits.values()).max_ms <= 2 * before_p99_ms:
            return round(time.perf_counter() - ended_s - 0.5, 1)
    raise NothingMeasured("tasks did not start as fast as before within 40 looks")
