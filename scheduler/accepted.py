"""Tasks that were accepted here a moment ago, as they began: the view of a cluster may know nothing of them yet."""

from __future__ import annotations

import threading
from collections import OrderedDict

from schemas.messages import Reply, Status, SubmitTask, Task

ACCEPTED_MAX = 10_000  # tasks; at 1,000 a second of one API process the view may be ten seconds behind
ACCEPTED_BYTES_MAX = 32 * 1024 * 1024  # of their payloads


class Accepted:
    """Remembers the newest; safe between threads."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, task_id: str) -> Task | None:
        """The task as it began; None if it is not remembered."""
        return self._tasks.get(task_id)

    def note(self, request: SubmitTask, reply: Reply) -> None:
        """Remember a task that was accepted just now, and forget the oldest beyond the bounds."""
        created_at = reply.created_at or reply.decided_at
        task = Task(
            task_id=reply.task_id,
            spec=request.spec,
            status=reply.status or Status.SUBMITTED,
            version=1,
            created_at=created_at,
            updated_at=created_at,
            next_run_at=reply.scheduled_at or created_at,
            fingerprint=request.fingerprint,
            traceparent=request.traceparent,
        )
        with self._lock:
            self._tasks[task.task_id] = task
            self._bytes += len(task.spec.payload)
            while len(self._tasks) > ACCEPTED_MAX or self._bytes > ACCEPTED_BYTES_MAX:
                _, oldest = self._tasks.popitem(last=False)
                self._bytes -= len(oldest.spec.payload)
