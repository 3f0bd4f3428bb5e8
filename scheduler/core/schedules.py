"""The schedules of one shard, in as little memory as they need: packed, and unpacked when something happens to one."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from scheduler.core.timers import Timers
from schemas.messages import Schedule

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Schedule).decode


class Schedules:
    """Schedules by id, and when each must be looked at."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        self._timers = Timers()

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, schedule_id: str) -> bool:
        return schedule_id in self._packed

    def __iter__(self) -> Iterator[Schedule]:
        return map(_unpack, list(self._packed.values()))

    def get(self, schedule_id: str) -> Schedule | None:
        """The schedule, if there is one. Safe from any thread."""
        packed = self._packed.get(schedule_id)
        return None if packed is None else _unpack(packed)

    def put(self, schedule: Schedule) -> None:
        """Keep the schedule as it is now."""
        self._packed[schedule.schedule_id] = _pack(schedule)

    def drop(self, schedule_id: str) -> None:
        """Forget a schedule; nothing happens if there is none."""
        self._packed.pop(schedule_id, None)
        self._timers.cancel(schedule_id)

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
