"""What waits for its time in a process, and how late the last ones were: for operators, from any thread.

All of it is read from copies: the shards' thread goes on meanwhile. Counts of the wheel are about right, since a record
there may be void.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from scheduler.core.parking import PARKED_FROM
from scheduler.core.wheel import Wheel
from scheduler.host import Phase, ShardHost
from scheduler.instants import format_instant
from scheduler.lateness import Lateness
from scheduler.runtime import SchedulerRuntime
from schemas.messages import Task


class WindowView(msgspec.Struct, frozen=True, kw_only=True):
    """About how many tasks are due within a window of time. `level` is that of the wheel; None: they are in memory."""

    level: int | None
    begins_at: str
    ends_at: str
    tasks: int


class LatenessView(msgspec.Struct, frozen=True, kw_only=True):
    """How late the last ones were, in milliseconds: at most 1,000 of a process. None: there were none."""

    count: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


class TimersView(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for its time in this process, by window, and how late the last ones were.

    `overdue` tasks are due and not released yet. `next_release_at` is of those in memory, `next_slot_at` when the next
    slot of the wheel is to be read. `fires` is of schedules without jitter.
    """

    read_at: str
    shards: int
    waiting: int
    overdue: int
    next_release_at: str | None
    next_slot_at: str | None
    windows: tuple[WindowView, ...]
    releases: LatenessView
    schedules: int
    fires: LatenessView


def timers_of(runtime: SchedulerRuntime, now: int) -> TimersView:
    """Of the shards that are loaded in this process, at `now` in microseconds."""
    hosts = [host for host in list(runtime.hosts.values()) if host.phase is Phase.ACTIVE]
    windows: Counter[tuple[int | None, int, int]] = Counter()
    due: list[int] = []
    for host in hosts:
        # What waits for an instant is never packed.
        waiting = [task for task in host.shard.state.tasks.unpacked() if task.status in PARKED_FROM]
        due += [task.next_run_at for task in waiting if task.next_run_at is not None]
        _count_memory(windows, host.shard.parking.wheel, waiting)
        _count_wheel(windows, host.shard.parking.wheel)
    slots_at = [host.shard.parking.wheel.next_at() for host in hosts]
    return TimersView(
        read_at=format_instant(now),
        shards=len(hosts),
        waiting=sum(windows.values()),
        overdue=sum(at <= now for at in due),
        next_release_at=_instant(min(due, default=None)),
        next_slot_at=_instant(min(slots_at, default=None)),
        windows=_views(windows),
        releases=_lateness(runtime.lateness.releases),
        schedules=sum(len(host.shard.state.schedules) for host in hosts),
        fires=_lateness(runtime.lateness.fires),
    )


def waiting_by_level(hosts: Iterable[ShardHost]) -> dict[int | None, int]:
    """About how many tasks wait in each level of the wheel, and (None) in memory."""
    levels: Counter[int | None] = Counter({None: 0})
    for host in hosts:
        statuses = host.shard.statuses.copy()
        levels[None] += sum(statuses[status] for status in PARKED_FROM)
        levels.update(dict.fromkeys(host.shard.parking.wheel.shape.levels, 0))
        for level, _, count in host.shard.parking.wheel.waiting():
            levels[level] += count
    return levels


def sum_of_timers(views: Sequence[TimersView]) -> TimersView:
    """Several processes as one. Quantiles cannot be added: those of the worst process stand for all."""
    windows: Counter[tuple[int | None, str, str]] = Counter()
    for view in views:
        for one in view.windows:
            windows[one.level, one.begins_at, one.ends_at] += one.tasks
    return TimersView(
        read_at=max(view.read_at for view in views),
        shards=sum(view.shards for view in views),
        waiting=sum(view.waiting for view in views),
        overdue=sum(view.overdue for view in views),
        next_release_at=min((view.next_release_at for view in views if view.next_release_at), default=None),
        next_slot_at=min((view.next_slot_at for view in views if view.next_slot_at), default=None),
        windows=tuple(
            WindowView(level=level, begins_at=begin, ends_at=end, tasks=count)
            for (level, begin, end), count in sorted(windows.items(), key=lambda item: (_rank(item[0][0]), item[0][1]))
        ),
        releases=_worst([view.releases for view in views]),
        schedules=sum(view.schedules for view in views),
        fires=_worst([view.fires for view in views]),
    )


def _count_memory(windows: Counter[tuple[int | None, int, int]], wheel: Wheel, waiting: Iterable[Task]) -> None:
    """By the windows in which they would lie: those of the finest level, or of what is about to be parked."""
    widths = wheel.shape.widths_us
    for task in waiting:
        if task.next_run_at is not None:
            place = wheel.place_for(task.next_run_at)
            width = widths[0 if place is None else place.level]
            begin = task.next_run_at // width * width if place is None else place.window * width
            windows[None, begin, begin + width] += 1


def _count_wheel(windows: Counter[tuple[int | None, int, int]], wheel: Wheel) -> None:
    for level, begin, count in wheel.waiting():
        windows[level, begin, begin + wheel.shape.widths_us[level]] += count


def _views(windows: Counter[tuple[int | None, int, int]]) -> tuple[WindowView, ...]:
    found = sorted(windows.items(), key=lambda item: (_rank(item[0][0]), item[0][1]))
    return tuple(
        WindowView(level=level, begins_at=format_instant(begin), ends_at=format_instant(end), tasks=count)
        for (level, begin, end), count in found
    )


def _rank(level: int | None) -> int:
    return -1 if level is None else level


def _instant(at: int | None) -> str | None:
    return None if at is None else format_instant(at)


def _lateness(lateness: Lateness) -> LatenessView:
    """By nearest rank."""
    ranked = sorted(lateness.last_us())
    if not ranked:
        return LatenessView(count=0)
    p50, p99 = (ranked[max(0, math.ceil(share * len(ranked)) - 1)] / 1_000 for share in (0.5, 0.99))
    return LatenessView(count=len(ranked), p50_ms=p50, p99_ms=p99, max_ms=ranked[-1] / 1_000)


def _worst(views: Sequence[LatenessView]) -> LatenessView:
    def most(values: Iterable[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    return LatenessView(
        count=sum(view.count for view in views),
        p50_ms=most(view.p50_ms for view in views),
        p99_ms=most(view.p99_ms for view in views),
        max_ms=most(view.max_ms for view in views),
    )
