"""One shard in virtual time: the test is its clients, its workers and its clock."""

from __future__ import annotations

from typing import Any

from scheduler.core.desk import Effects, Source
from scheduler.core.shard import Shard
from schemas.messages import (
    AttemptFailed,
    AttemptStarted,
    AttemptSucceeded,
    CancelTask,
    ErrorKind,
    Event,
    Report,
    Request,
    RunningAttempt,
    SubmitTask,
    Task,
    TaskError,
    TaskSpec,
    WorkerHeartbeat,
)
from schemas.topics import TASK_REPORTS, TASK_REQUESTS

START = 1_780_315_200_000_000
ERROR = TaskError(kind=ErrorKind.RAISED, type="ConnectionError", message="refused")


def open_slots(shard: Shard, now: int) -> None:
    """Let the wheel go on; nothing is parked, since no log is there."""
    while (place := shard.next_to_open(now)) is not None:
        shard.parking.wheel.has_opened(place)


class ShardStage:
    """All events are acknowledged at once; `events` has them all."""

    def __init__(self, shard: Shard, now: int = START) -> None:
        self.shard, self.now = shard, now
        self.events: list[Event] = []
        self._offsets = {TASK_REQUESTS: 0, TASK_REPORTS: 0}
        shard.on_loaded(now, -1)

    def advance(self, ms: int) -> None:
        """Let time pass; nothing is done about it yet."""
        self.now += ms * 1_000

    def let_time_work(self) -> None:
        """What the clock causes by now, all reports having been read."""
        self.shard.drained_at = self.now
        open_slots(self.shard, self.now)
        while (effects := self.shard.fire_timers(self.now)).events:
            self._acknowledge(effects)
        self.shard.forget_ended(self.now)
        self.shard.expire_markers()

    def request(self, request: Request) -> Effects:
        """Decide a request."""
        return self._handle(TASK_REQUESTS, request)

    def tell(self, report: Report) -> Effects:
        """Decide a report."""
        return self._handle(TASK_REPORTS, report)

    def _handle(self, topic: str, message: Request | Report) -> Effects:
        source = Source(topic, self._offsets[topic])
        self._offsets[topic] += 1
        effects = self.shard.handle(message, source, self.now)
        self._acknowledge(effects)
        return effects

    def _acknowledge(self, effects: Effects) -> None:
        self.events += effects.events
        self.shard.acknowledged(effects.events, len(self.events) - 1, self.now)

    def submit(self, task_id: str, **spec: Any) -> Effects:
        """Submit a task."""
        submission = TaskSpec(task_type="t", **spec)
        return self.request(
            SubmitTask(request_id="r", task_id=task_id, spec=submission, submitted_at=self.now, reply_to=0)
        )

    def cancel(self, task_id: str) -> Effects:
        """Cancel a task."""
        return self.request(CancelTask(request_id="r", task_id=task_id, reply_to=0))

    def task(self, task_id: str) -> Task:
        """A live task."""
        return self.shard.state.tasks[task_id]

    def start(self, task_id: str, worker_id: str = "w", started_at: int | None = None) -> int:
        """Start the next attempt; its number."""
        task = self.task(task_id)
        attempt = task.attempt + 1
        self.tell(
            AttemptStarted(
                task_id=task_id,
                task_version=task.version,
                attempt=attempt,
                worker_id=worker_id,
                started_at=self.now if started_at is None else started_at,
            )
        )
        return attempt

    def succeed(self, task_id: str, worker_id: str = "w") -> None:
        """End the running attempt."""
        self.tell(
            AttemptSucceeded(
                task_id=task_id, attempt=self.task(task_id).attempt, worker_id=worker_id, finished_at=self.now
            )
        )

    def fail(self, task_id: str, worker_id: str = "w") -> None:
        """Let the running attempt fail."""
        self.tell(
            AttemptFailed(
                task_id=task_id,
                attempt=self.task(task_id).attempt,
                worker_id=worker_id,
                finished_at=self.now,
                error=ERROR,
            )
        )

    def heartbeat(self, worker_id: str, *task_ids: str) -> Effects:
        """A worker vouches for the running attempts of tasks."""
        running = tuple(RunningAttempt(task_id=i, attempt=self.task(i).attempt) for i in task_ids)
        return self.tell(WorkerHeartbeat(worker_id=worker_id, sent_at=self.now, free_slots=1, running=running))
