"""The fold of schedules' events into what readers see of schedules. Pure.

Where an event leads is what `core.schedule.evolve_schedule` says. The runs of a schedule are tasks of their own, so
`due` and `running` stay empty here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from scheduler.core.schedule import evolve_schedule
from scheduler.ports import ScheduleChange
from schemas.messages import Event, Schedule, ScheduleCreated


class Gone(NamedTuple):
    """What must be remembered of a schedule that was deleted, so that its events are known when they come again."""

    version: int
    created_at: int
    updated_at: int


class ScheduleFold(NamedTuple):
    """What events did to schedules, and which of them cannot follow, each with the reason."""

    changes: list[ScheduleChange]
    refused: list[tuple[Event, str]]


def schedule_changes_of(events: Iterable[Event], known: dict[str, Schedule | Gone]) -> ScheduleFold:
    """One change for each schedule of which there is news. Brings `known` up to date.

    The events are valid ones of schedules in the order of the log; `known` has their schedules as the view has them.
    An event that its schedule has had already is dropped: a producer may append one twice.
    """
    changes: dict[str, ScheduleChange] = {}
    refused: list[tuple[Event, str]] = []
    for event in events:
        schedule_id = event.entity_id
        before = known.get(schedule_id)
        if event.version < 1 or not _is_news(event, before):
            continue
        try:
            after = evolve_schedule(before if isinstance(before, Schedule) else None, event)
        except ValueError as error:  # its beginning is not in the log any more, or no writer of ours
            refused.append((event, str(error)))
            continue
        if after is None:
            created_at = event.at if before is None else before.created_at
            known[schedule_id] = Gone(event.version, created_at, event.at)
        else:
            after = known[schedule_id] = replace(after, due=(), running=())
        changes[schedule_id] = ScheduleChange(schedule_id, after)
    return ScheduleFold(list(changes.values()), refused)


def _is_news(event: Event, before: Schedule | Gone | None) -> bool:
    if before is None or event.version > before.version:
        return True
    if not isinstance(event.body, ScheduleCreated):
        return False
    # An id may be used again after a deletion. The same creation twice has the same time; the clocks of two owners may
    # differ, so that a new one may seem to be older than the deletion before it.
    return event.at > before.updated_at or (isinstance(before, Gone) and event.at != before.created_at)
