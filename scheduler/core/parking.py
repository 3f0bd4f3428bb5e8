"""Which tasks wait in the wheel instead of memory, and what makes a record there void.

Between the append of a record and its acknowledgement the task is in both; after a crash it may be in both again. So a
record counts only if nothing newer is known of its task: no later version in memory, no end, no marker.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scheduler.core.wheel import Place, Wheel
from schemas.messages import ParkMarker, Status, Task

PARKED_FROM = frozenset({Status.SCHEDULED, Status.RETRYING})  # those that only wait for an instant


class ToPark(NamedTuple):
    """A record to be written, and where."""

    place: Place
    task: Task
    due_at: int


class Parking:
    """What a shard knows of its tasks in the wheel: nothing but markers, and who is on the way in or out."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.markers: dict[str, ParkMarker] = {}
        # Read from a slot, without an event since: the log alone does not tell of them. A checkpoint may; but whoever
        # is loading the shard just now may have begun with an earlier one.
        self.unrecorded: set[str] = set()
        self._candidates: deque[tuple[str, int, int]] = deque()  # id, version, due
        self._marked_until: list[tuple[int, str]] = []  # a heap

    def offer(self, task: Task, due_at: int) -> None:
        """A task that is due far ahead, and whose events are acknowledged: it is to leave memory."""
        self._candidates.append((task.task_id, task.version, due_at))

    def take(self, tasks: Mapping[str, Task], limit: int) -> list[ToPark]:
        """Up to `limit` records to be written now."""
        taken: list[ToPark] = []
        while self._candidates and len(taken) < limit:
            task_id, version, due_at = self._candidates.popleft()
            task, place = tasks.get(task_id), self.wheel.place_for(due_at)
            if task is not None and task.version == version and place is not None:
                taken.append(ToPark(place, task, due_at))
        return taken

    def put_back(self, records: Sequence[ToPark]) -> None:
        """Records that were not written: when they are taken again another slot may be the right one."""
        self._candidates.extendleft(
            (record.task.task_id, record.task.version, record.due_at) for record in reversed(records)
        )

    def has_more(self) -> bool:
        """Whether `take` would find something."""
        return bool(self._candidates)

    # --- markers -------------------------------------------------------------------------------------------------

    def mark(self, task_id: str, version: int, due_at: int | None) -> bool:
        """Records of versions below `version` are void, wherever they lie that were due at `due_at`.

        Even of a task in memory: an earlier owner may have parked it, or this one's record may be on its way. Whether a
        marker is needed, and so was left.
        """
        old = self.markers.get(task_id)
        if due_at is None or (old is None and self.wheel.was_opened(due_at)):
            return False
        marker = ParkMarker(task_id=task_id, version=version, due_at=max(due_at, old.due_at if old else due_at))
        self.restore(marker)
        return True

    def restore(self, marker: ParkMarker) -> None:
        """Take a marker from a checkpoint."""
        self.markers[marker.task_id] = marker
        heapq.heappush(self._marked_until, (marker.due_at, marker.task_id))

    def expire(self) -> list[str]:
        """Drop the markers that no record can meet any more; whose they were. The slots decide that, not the clock."""
        gone: list[str] = []
        while self._marked_until and self.wheel.was_opened(self._marked_until[0][0]):
            due_at, task_id = heapq.heappop(self._marked_until)
            marker = self.markers.get(task_id)
            if marker is not None and marker.due_at == due_at:
                del self.markers[task_id]
                gone.append(task_id)
        return gone

    def is_void(self, task: Task) -> bool:
        """Whether a record was cancelled or replaced after it was written."""
        marker = self.markers.get(task.task_id)
        return marker is not None and task.version < marker.version

    def is_parked_as(self, shown: Task, due_at: int | None) -> bool:
        """Whether a task that is not in memory is in the wheel just as it is shown: else a trace would be here."""
        is_waiting = shown.status in PARKED_FROM and due_at is not None
        return is_waiting and not self.wheel.was_opened(due_at or 0) and not self.is_void(shown)
