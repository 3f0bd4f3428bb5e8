"""What the service is told of tasks that live in the memory of shards (`scheduler.service.LiveTasks`)."""

from __future__ import annotations

from scheduler.runtime import SchedulerRuntime
from schemas.messages import EndedTask, Schedule, Task


class ShardsHere:
    """What the shards of this process have in memory."""

    def __init__(self, runtime: SchedulerRuntime) -> None:
        self._runtime = runtime

    def get(self, task_id: str) -> Task | EndedTask | None:
        """The task, what is remembered of its end, or None."""
        return self._runtime.live(task_id)

    def schedule(self, schedule_id: str) -> Schedule | None:
        """The schedule, or None if there is none. Raises LookupError: its shard is not here."""
        return self._runtime.live_schedule(schedule_id)


class NoShards:
    """Of a process without shards: readers see what the view has."""

    def get(self, task_id: str) -> Task | EndedTask | None:
        """None."""
        return None

    def schedule(self, schedule_id: str) -> Schedule | None:
        """Raises LookupError."""
        raise LookupError(schedule_id)
