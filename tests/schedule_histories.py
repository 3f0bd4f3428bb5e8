"""Histories of schedules: events in an order that could have happened, with the schedules that they lead to."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from scheduler.core.schedule import ScheduleBody, evolve_schedule
from schemas.messages import (
    DueRun,
    Event,
    FireCause,
    Schedule,
    ScheduleBackfilled,
    ScheduleCreated,
    ScheduleDeleted,
    ScheduleFired,
    ScheduleFlagged,
    SchedulePaused,
    ScheduleResumed,
    ScheduleSkipped,
    ScheduleSpec,
    ScheduleUpdated,
    SkipReason,
    TaskSpec,
)
from tests.histories import START


def spec(rng: Random) -> ScheduleSpec:
    """What some schedule does."""
    task = TaskSpec(task_type="mail", tenant_id=rng.choice(["x", "y"]))
    return ScheduleSpec(name=rng.choice("abc"), task=task, every_ms=60_000, declared_by=rng.choice([None, "app"]))


def schedule_history(
    rng: Random, length: int, prefix: str = "s", schedules: int = 6
) -> tuple[list[Event], dict[str, Schedule]]:
    """So many events of a few schedules, which are created, deleted and created again."""
    live: dict[str, Schedule] = {}
    events = []
    for number in range(length):
        at = START + number * 1_000
        schedule_id = f"{prefix}{rng.randrange(schedules)}"
        before = live.get(schedule_id)
        body = ScheduleCreated(spec=spec(rng), next_fire_at=at, tzdata="1") if before is None else _next(rng, at)
        event = Event(
            entity_id=schedule_id,
            tenant_id="x",
            version=before.version + 1 if before else 1,
            epoch=1,
            at=at,
            body=body,
        )
        after = evolve_schedule(before, event)
        if after is None:
            del live[schedule_id]
        else:
            live[schedule_id] = replace(after, due=(), running=())
        events.append(event)
    return events, live


def _next(rng: Random, at: int) -> ScheduleBody:
    bodies: list[ScheduleBody] = [
        ScheduleUpdated(spec=spec(rng), considered_at=at, next_fire_at=at + 1, tzdata="2"),
        SchedulePaused(reason="because"),
        ScheduleResumed(next_fire_at=at + 2, tzdata="3"),
        ScheduleDeleted(),
        ScheduleFired(nominal_at=at, task_id="t", cause=rng.choice([FireCause.TIME, FireCause.TRIGGER]), missed=2),
        ScheduleBackfilled(runs=(DueRun(task_id="t", nominal_at=at),)),
        ScheduleSkipped(nominal_at=at, reason=SkipReason.OVERLAP, missed=1),
        ScheduleFlagged(problem="no"),
    ]
    return rng.choice(bodies)
