"""Schedules on Kafka: what a million of them takes, and whether any fire is lost or doubled when schedulers die.

`schedules` makes them by topic; all but some fire on other days, those all in one minute, and `spread_s` counts from
that minute until the last of their runs was started. `next_per_s` is how many next fire times of the same schedules one
core computes, in this process. `cron_loss` kills schedulers at the top of a second while schedules fire each second;
what was lost or doubled is read from the raw events.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from benchmarks.cluster import ClusterOptions, ClusterStage, Process, running
from benchmarks.cluster_audit import Audit, events_of, settled
from benchmarks.cluster_timers import WARM_UP, schedulers, timers_of_process, warm_up
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say, Seed, quantiles
from benchmarks.load import wait_until
from benchmarks.machine import processor_s_of, rss_mb, rss_mb_max
from benchmarks.producer import Named, Order, requests_of, sending, wait_for, write
from benchmarks.stage import WAIT_S
from scheduler.core.schedule import recurrence_of
from schemas.codec import Codec
from schemas.messages import (
    ControlSchedule,
    CreateSchedule,
    ScheduleAction,
    ScheduleFired,
    ScheduleSpec,
    TaskSubmitted,
)

LOADS_PER_S_MIN = 500  # slower than that something is broken
FIRE_LEAD_S = 10.0  # before the minute, and for those that fire in it to be made
SECOND_US, MINUTE_US = 1_000_000, 60_000_000
COMPUTE_S = 2.0
SETTLE_S = 3.0  # of fires before the next kill
EVERY_SECOND = "* * * * * *"

_codec = Codec.builtin()


class SchedulesOptions(ClusterOptions, frozen=True, kw_only=True):
    """How many, and how many of them fire at once."""

    count: Annotated[int, Meta(ge=1, le=10_000_000, description="schedules")] = 1_000_000
    fires: Annotated[int, Meta(ge=1, le=1_000_000, description="that fire in the same minute")] = 10_000
    seed: Seed = 1


class Schedules(Figures, frozen=True, kw_only=True):
    """Memory of the scheduler in MB, before and after. `spread_s`: until the last start; `fire_…_ms` of each start.

    `load_per_s`: schedules made a second, from the first request to the last event. `next_per_s`: of processor time.
    """

    load_s: float
    load_per_s: float
    empty_rss_mb: float
    rss_mb: float
    rss_mb_max: float
    restart_s: float
    restart_rss_mb: float
    next_per_s: float
    spread_s: float
    fire_p50_ms: float
    fire_p99_ms: float


def _measure_schedules(options: SchedulesOptions, folder: Path, say: Say) -> Schedules:
    fires = min(options.fires, options.count)
    with running(options, folder, fires + 1 + WARM_UP) as stage:
        warm_up(stage, fires + 1)
        (scheduler,) = schedulers(stage)
        empty_mb, cpu_begun_s = rss_mb(scheduler.pid), processor_s_of(scheduler.pid)
        others = _others(stage, options.count - fires, fires, options.seed)
        load_s = _load(stage, others) if others.count else 0.0
        cpu_s = processor_s_of(scheduler.pid) - cpu_begun_s
        loaded_mb, most_mb = rss_mb(scheduler.pid), rss_mb_max(scheduler.pid)
        say(f"{others.count} schedules in {load_s:.0f} s, {loaded_mb:.0f} MB")
        restart_s = _restart(stage, scheduler, options)
        (scheduler,) = schedulers(stage)
        at_us = _minute_for(fires)
        when = datetime.fromtimestamp(at_us / SECOND_US, UTC)
        _load(stage, msgspec.structs.replace(_firing(stage, fires, options.seed), expression=_expression(when)))
        say(f"{fires} of them fire in {at_us / 1e6 - time.time():.0f} s")
        due_ns = at_us * 1_000 + time.perf_counter_ns() - time.time_ns()
        stage.starts.wait_for(fires, max(0.0, at_us / 1e6 - time.time()) + WAIT_S)
        late = [start - due_ns for start in stage.starts.first_ns[:fires] if start]
        late_by = quantiles(late)
        return Schedules(
            count=options.count,
            missing=fires - len(late),
            duplicates=stage.starts.duplicates,
            early=sum(one < 0 for one in late) + int(stage.starts.first_ns[fires] != 0),
            cpu_us_per_task=round(cpu_s / max(1, others.count) * 1e6, 1),
            load_s=round(load_s, 1),
            load_per_s=round(others.count / load_s, 1) if load_s else 0.0,
            empty_rss_mb=empty_mb,
            rss_mb=loaded_mb,
            rss_mb_max=most_mb,
            restart_s=restart_s,
            restart_rss_mb=rss_mb(scheduler.pid),
            next_per_s=_next_per_s(others),
            spread_s=round(late_by.max_ms / 1_000, 3),
            fire_p50_ms=late_by.p50_ms,
            fire_p99_ms=late_by.p99_ms,
        )


def _others(stage: ClusterStage, count: int, index: int, seed: int) -> Order:
    """Schedules of all minutes, on weekdays of which none is near, in whatever zone."""
    today = datetime.now(UTC).isoweekday()
    weekdays = tuple((today + days) % 7 for days in (2, 3, 4, 5))
    return Order(kind="schedules", count=count, index=index, blob=stage.blob, weekdays=weekdays, seed=seed)


def _firing(stage: ClusterStage, count: int, seed: int) -> Order:
    return Order(kind="schedules", count=count, blob=stage.blob, seed=seed + 1)


def _load(stage: ClusterStage, order: Order) -> float:
    """Make schedules; seconds until the events of all are there."""
    limit_s = WAIT_S + order.count / LOADS_PER_S_MIN
    with stage.log() as log:
        wanted = sum(stage.end_offsets(log)) + order.count
        with sending(stage, order) as producer:
            wait_until(lambda: sum(stage.end_offsets(log)) > wanted - order.count, WAIT_S)  # its interpreter has begun
            begun_s = time.perf_counter()
            is_done = wait_until(lambda: sum(stage.end_offsets(log)) >= wanted, limit_s, every_s=0.05)
            took_s = time.perf_counter() - begun_s
            wait_for(producer, WAIT_S)
    if not is_done:
        raise NothingMeasured(f"{order.count} schedules were not made within {limit_s:.0f} s")
    return took_s


def _minute_for(fires: int) -> int:
    """The next full minute before which so many schedules can be made, in microseconds."""
    ready_us = time.time_ns() // 1_000 + round((FIRE_LEAD_S + fires / LOADS_PER_S_MIN) * SECOND_US)
    return (ready_us // MINUTE_US + 1) * MINUTE_US


def _expression(when: datetime) -> str:
    return f"{when.minute} {when.hour} {when.day} {when.month} *"


def _restart(stage: ClusterStage, victim: Process, options: SchedulesOptions) -> float:
    """From SIGKILL until another scheduler has all of them loaded, in seconds."""
    begun_s = time.perf_counter()
    victim.kill()
    stage.processes.remove(victim)
    process = stage.start("scheduler")
    if not wait_until(lambda: timers_of_process(process).shards == options.shards, WAIT_S, every_s=0.02):
        raise NothingMeasured(f"{WAIT_S:.0f} s after a kill not all shards are loaded")
    return round(time.perf_counter() - begun_s, 3)


def _next_per_s(order: Order) -> float:
    """Next fire times of these schedules on one core, by processor time; each is parsed once before."""
    specs: list[ScheduleSpec] = []
    for _, value in requests_of(msgspec.structs.replace(order, count=min(max(1, order.count), 10_000))):
        request = _codec.decode(value)
        assert isinstance(request, CreateSchedule)
        specs.append(request.spec)
        recurrence_of(request.spec)
    instant, count = time.time_ns() // 1_000, 0
    begun_s = time.process_time()
    while time.process_time() - begun_s < COMPUTE_S:
        for spec in specs:
            recurrence_of(spec).next_after(instant)
        count += len(specs)
        instant += 86_400 * SECOND_US
    return round(count / (time.process_time() - begun_s), 1)


# --- kill -9 ----------------------------------------------------------------------------------------------------------


class CronLossOptions(ClusterOptions, frozen=True, kw_only=True):
    """How often, and how much fires then."""

    schedulers: Annotated[int, Meta(ge=2, le=16, description="scheduler processes")] = 2
    rounds: Annotated[int, Meta(ge=1, le=1_000, description="kill -9 of a scheduler at the top of a second")] = 20
    count: Annotated[int, Meta(ge=1, le=1_000, description="schedules, each of which fires every second")] = 20


class CronLoss(Figures, frozen=True, kw_only=True):
    """`count` fires were decided. `lost` nominal times have no fire, or a fire without its task; `doubled` have two.

    `missing` runs were never started, `decided_twice` tasks were submitted twice, `void` events had no shard.
    """

    lost: int
    doubled: int
    decided_twice: int
    void: int
    recovery_s_max: float
    worst_drift_s: float


def _measure_cron_loss(options: CronLossOptions, folder: Path, say: Say) -> CronLoss:
    order = Order(kind="schedules", count=options.count, index=0, expression=EVERY_SECOND)
    with running(options, folder, 1) as stage:
        names = [name.decode() for name, _ in requests_of(order)]
        cpu_begun_s = stage.processor_s()
        _load(stage, order)
        recoveries_s = []
        for number in range(options.rounds):
            victim = schedulers(stage)[0]
            _at_the_top_of_a_second(number)
            recoveries_s.append(_replace(stage, victim, options.shards))
            say(f"round {number + 1} of {options.rounds}: {recoveries_s[-1]:.1f} s")
            time.sleep(SETTLE_S)
        write(_pauses(names), stage.kafka)
        say("reading the topics")
        cpu_s = stage.processor_s().get("scheduler", 0.0) - cpu_begun_s.get("scheduler", 0.0)
        found = settled(stage, {})
        fires = _Fires(stage)
        return CronLoss(
            count=len(fires.submitted),
            missing=found.missing(fires.submitted),
            duplicates=found.again(),
            early=found.early + fires.early,
            cpu_us_per_task=round(max(0.0, cpu_s) / max(1, len(fires.submitted)) * 1e6, 1),
            lost=fires.lost(names) + _unsuccessful(found, fires.submitted),
            doubled=fires.doubled(),
            decided_twice=found.decided_twice + sum(count > 1 for count in fires.submitted.values()),
            void=found.void,
            recovery_s_max=max(recoveries_s),
            worst_drift_s=round(fires.worst_drift_us / 1e6, 3),
        )


def _unsuccessful(found: Audit, submitted: Iterable[str]) -> int:
    return found.lost(list(submitted))


def _at_the_top_of_a_second(number: int) -> None:
    """Sleep until a few milliseconds around it, in each round others: before, while and after the fires are written."""
    offset_s = (number % 10 - 2) * 0.002
    time.sleep((1.0 + offset_s - time.time() % 1.0) % 1.0)


def _replace(stage: ClusterStage, victim: Process, shards: int) -> float:
    """From SIGKILL of one scheduler until all shards are loaded in the others and a new one, in seconds."""
    begun_s = time.perf_counter()
    victim.kill()
    stage.processes.remove(victim)
    stage.start("scheduler")

    def has_all() -> bool:
        return sum(timers_of_process(process).shards for process in schedulers(stage)) >= shards

    if not wait_until(has_all, WAIT_S, every_s=0.05):
        raise NothingMeasured(f"{WAIT_S:.0f} s after a kill not all shards are loaded")
    return round(time.perf_counter() - begun_s, 3)


def _pauses(names: Iterable[str]) -> Iterator[Named]:
    for name in names:
        request = ControlSchedule(request_id="", schedule_id=name, action=ScheduleAction.PAUSE)
        yield Named(name.encode(), _codec.encode(request))


class _Fires:
    """What the valid events say of schedules."""

    def __init__(self, stage: ClusterStage) -> None:
        self.nominal: dict[str, Counter[int]] = {}
        self.submitted: Counter[str] = Counter()
        self.early = self.worst_drift_us = 0
        self._decided: set[str] = set()
        for _, event, is_valid in events_of(stage):
            body = event.body
            if not is_valid:
                continue
            if isinstance(body, ScheduleFired):
                self.nominal.setdefault(event.entity_id, Counter())[body.nominal_at] += 1
                self._decided.add(body.task_id)
                self.early += event.at < body.nominal_at
                self.worst_drift_us = max(self.worst_drift_us, event.at - body.nominal_at)
            elif isinstance(body, TaskSubmitted):
                self.submitted[event.entity_id] += 1

    def lost(self, names: Iterable[str]) -> int:
        """Nominal times between the first and the last fire without one, and fires without a task."""
        gaps = sum(_gaps(self.nominal.get(name, Counter())) for name in names)
        return gaps + len(self._decided - self.submitted.keys())

    def doubled(self) -> int:
        """Nominal times that were decided twice."""
        return sum(count > 1 for fired in self.nominal.values() for count in fired.values())


def _gaps(fired: Counter[int]) -> int:
    """Seconds without a fire; one that never fired lost all, which counts as one."""
    if not fired:
        return 1
    return (max(fired) - min(fired)) // SECOND_US + 1 - len(fired)


BENCHMARKS = (
    Benchmark("schedules", "a million schedules, many of which fire at once", SchedulesOptions, _measure_schedules),
    Benchmark("cron_loss", "kill -9 of schedulers while schedules fire", CronLossOptions, _measure_cron_loss),
)
