"""How a worker is set up, and what it tells of itself."""

from __future__ import annotations

import os

import msgspec

from schemas.ids import NAME_RULE, is_name
from schemas.limits import DURATION_MS_MAX
from schemas.priorities import Weights

SLOTS_MAX = 10_000  # attempts in one heartbeat must fit into a record


def _threads() -> int:
    return min(32, 4 * (os.cpu_count() or 1))


def _processes() -> int:
    return os.cpu_count() or 1


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one worker. ValueError names the field that is not allowed.

    `slots` bounds how many attempts run at once in total; `threads` and `processes` bound their kind within it.
    `app` (`module:attribute`) is needed by handlers that run in processes, which import it.
    """

    worker_id: str
    queues: tuple[str, ...] = ("default",)
    slots: int = 100
    threads: int = msgspec.field(default_factory=_threads)
    processes: int = msgspec.field(default_factory=_processes)
    app: str | None = None
    grace_ms: int = 30_000  # from `stop` until running attempts are stopped and given back
    kill_grace_ms: int = 500  # from the order to stop until an attempt is given up or its process killed
    heartbeat_ms: int = 2_000
    # How long a report waits for company. The start and the end of a short task then are one append, one turn of the
    # shard and one commit; nobody waits for them but the view.
    linger_ms: int = 2
    give_back_after_ms: int = 100  # a record that finds no slot for so long goes back to its shard
    acknowledge_ms: int = 5_000  # how long the last reports are waited for at the end
    abandoned_max: int = msgspec.field(default_factory=_threads)  # attempts that can't be ended, before it stops taking

    weights: Weights = Weights()  # of priorities, for what waits here

    def __post_init__(self) -> None:
        if not is_name(self.worker_id):
            raise ValueError(f"worker_id: {self.worker_id!r} is not allowed; it must be {NAME_RULE}")
        if not self.queues or len(set(self.queues)) != len(self.queues):
            raise ValueError(f"queues: {self.queues!r} is not allowed; at least one, each once")
        for queue in self.queues:
            if not is_name(queue):
                raise ValueError(f"queues: {queue!r} is not allowed; it must be {NAME_RULE}")
        for field in ("slots", "threads", "processes"):
            _check(field, getattr(self, field), 1, SLOTS_MAX)
        for field in ("heartbeat_ms", "give_back_after_ms", "acknowledge_ms"):
            _check(field, getattr(self, field), 1, DURATION_MS_MAX)
        for field in ("linger_ms", "grace_ms", "kill_grace_ms"):
            _check(field, getattr(self, field), 0, DURATION_MS_MAX)
        _check("abandoned_max", self.abandoned_max, 0, SLOTS_MAX)
        if problem := self.weights.problem():
            raise ValueError(f"weights: {problem}")


class WorkerStats(msgspec.Struct):
    """What a worker counts, from its start on; and, in the first lines, how it stands now."""

    slots: int = 0
    running: int = 0
    waiting: int = 0
    abandoned: int = 0
    is_healthy: bool = True
    started: int = 0
    succeeded: int = 0
    failed: int = 0
    snoozed: int = 0
    cancelled: int = 0
    crashed: int = 0
    returned: int = 0
    revoked: int = 0
    duplicates: int = 0
    undecodable: int = 0
    superseded: int = 0  # signals of an owner that another one has followed


def _check(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field}: {value!r} is not allowed; from {low} to {high}")
