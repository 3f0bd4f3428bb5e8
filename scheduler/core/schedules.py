"""The schedules of one shard, in as little memory as they need: packed, and unpacked when something happens to one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import cast

from scheduler.core.timers import Timers
from schemas.codec import Codec
from schemas.messages import Event, Schedule, ScheduleCreated

# An event that was appended twice comes again within what a producer had in flight, which is less than so many records.
DOUBLED_WITHIN = 10_000
_CODEC = Codec.builtin()  # its bytes are a quarter of MessagePack, which has the names of all fields


class Schedules:
    """Schedules by id, and when each must be looked at.

    An id may be used again as soon as its schedule is deleted. Versions then go on from the deletion: events that were
    appended twice would otherwise be the next ones of the new schedule. Owners forget that, which does no harm, since
    nothing that was appended before a takeover comes again after it.
    """

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        self._deleted: OrderedDict[str, tuple[int, int]] = OrderedDict()  # epoch, version of deletions, oldest first
        self._timers = Timers()

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, schedule_id: str) -> bool:
        return schedule_id in self._packed

    def __iter__(self) -> Iterator[Schedule]:
        return map(_unpacked, list(self._packed.values()))

    def get(self, schedule_id: str) -> Schedule | None:
        """The schedule, if there is one. Safe from any thread."""
        packed = self._packed.get(schedule_id)
        return None if packed is None else _unpacked(packed)

    def kept(self, schedule_id: str) -> bytes | None:
        """The schedule as the bytes of its record by the built-in schema, if there is one."""
        return self._packed.get(schedule_id)

    def put(self, schedule: Schedule) -> None:
        """Keep the schedule as it is now."""
        self._packed[schedule.schedule_id] = _CODEC.encode(schedule)

    def drop(self, deletion: Event) -> None:
        """Forget a schedule, but for the version of its end."""
        schedule_id = deletion.entity_id
        self._packed.pop(schedule_id, None)
        self._timers.cancel(schedule_id)
        self._deleted[schedule_id] = deletion.epoch, deletion.version
        self._deleted.move_to_end(schedule_id)
        if len(self._deleted) > DOUBLED_WITHIN:
            self._deleted.popitem(last=False)

    def first_version(self, schedule_id: str) -> int:
        """The version that a schedule begins with under an id that is free."""
        return 1 + self._deleted.get(schedule_id, (0, 0))[1]

    def is_next(self, event: Event) -> bool:
        """Whether an event is the next of its schedule. One that is not is void, or was folded already."""
        if (known := self.get(event.entity_id)) is not None:
            return event.version == known.version + 1
        if not isinstance(event.body, ScheduleCreated):
            return False
        epoch, version = self._deleted.get(event.entity_id, (-1, 0))
        return event.epoch > epoch or event.version == version + 1

    def look_again_at(self, schedule_id: str, at: int | None) -> None:
        """Let it be looked at, at an instant; None: not before something happens to it."""
        if at is None:
            self._timers.cancel(schedule_id)
        else:
            self._timers.set(schedule_id, at)

    def pop_due(self, now: int, limit: int) -> list[str]:
        """Those to be looked at by now."""
        return self._timers.pop_due(now, limit)

    def next_at(self) -> int | None:
        """When one must be looked at."""
        return self._timers.next_at()


def _unpacked(packed: bytes) -> Schedule:
    return cast(Schedule, _CODEC.decode(packed))
