"""Submissions of which one stands for several: while a task waits or lives, within a time, or the last after a rest.

All that share a key share the root of their ids, and so a shard: the one that came last under a root is looked up
there, and how it stands decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from scheduler.core.decisions import Decision, problem_of
from scheduler.core.task import WAITING, deadline_of
from schemas.ids import unique_root, unique_root_of
from schemas.limits import DURATION_MS_MAX
from schemas.messages import EndedTask, Outcome, Status, SubmitTask, Task, TaskUpdated, Uniqueness, UniqueScope

KEY_MAX = 255
OTHERS_MAX = 16  # tasks under one root that are looked at: those that ended are remembered for a while
THERE_IS_ONE = "another task stands for it"


class Uniques:
    """The tasks under each root, oldest first. Derived from the tasks and what is remembered of those that ended."""

    def __init__(self) -> None:
        self._by_root: dict[str, dict[str, None]] = {}

    def note(self, task_id: str) -> None:
        """A task was submitted, or is run again; those without a root are none of these."""
        root = unique_root(task_id)
        if root is not None:
            self._by_root.setdefault(root, {})[task_id] = None

    def derive(self, known: Iterable[tuple[int, str]]) -> None:
        """Take all that is known, in any order: when each was created, and its id."""
        for _, task_id in sorted(known):
            self.note(task_id)

    def latest(self, task_id: str) -> Sequence[str]:
        """The tasks under the root of this one, the latest first; of many those that came last."""
        root = unique_root(task_id)
        tasks = self._by_root.get(root) if root is not None else None
        return () if tasks is None else tuple(itertools.islice(reversed(tasks), OTHERS_MAX))

    def forget(self, task_id: str) -> None:
        """Nothing is known of a task any more."""
        root = unique_root(task_id)
        tasks = self._by_root.get(root) if root is not None else None
        if root is not None and tasks is not None:
            tasks.pop(task_id, None)
            if not tasks:
                del self._by_root[root]

    def __len__(self) -> int:
        return sum(map(len, self._by_root.values()))


class Standing(NamedTuple):
    """The task that stands for a submission, and what is decided of it."""

    known: Task | EndedTask
    decision: Decision


def standing(known: Task | EndedTask | None, request: SubmitTask, now: int) -> Standing | None:
    """What the task that came last under the key has to say of another submission; None: it is a task of its own."""
    unique = request.spec.unique
    if unique is None or known is None:
        return None
    if unique.scope is UniqueScope.DEBOUNCE:
        return _debounced(known, request, unique, now)
    if not _stands(known, unique, now):
        return None
    return Standing(known, Decision(None, Outcome.DUPLICATE, THERE_IS_ONE))


def _stands(known: Task | EndedTask, unique: Uniqueness, now: int) -> bool:
    match unique.scope:
        case UniqueScope.WAITING:
            return known.status in WAITING
        case UniqueScope.LIVE:
            return isinstance(known, Task)
        case UniqueScope.WINDOW:
            return known.created_at + unique.window_ms * 1_000 > now
    return False


def _debounced(known: Task | EndedTask, request: SubmitTask, unique: Uniqueness, now: int) -> Standing | None:
    """The last one within the quiet time wins: the task that waits takes its content, and waits anew."""
    is_waiting = isinstance(known, Task) and known.status is Status.SCHEDULED and known.attempt == 0
    if not isinstance(known, Task) or not is_waiting:
        return None
    if problem := problem_of(request, now):
        return Standing(known, Decision(None, Outcome.INVALID, problem))
    due_at = quiet_until(unique, known.created_at, now)
    body = TaskUpdated(
        spec=replace(request.spec, scheduled_at=due_at),
        status=Status.SCHEDULED,
        next_run_at=due_at,
        deadline_at=deadline_of(request.spec.total_timeout_ms, due_at),
    )
    return Standing(known, Decision(body, Outcome.DUPLICATE, THERE_IS_ONE))


def quiet_until(unique: Uniqueness, created_at: int, now: int) -> int:
    """When a debounced task is due: after the quiet time, but no later than its bound after the first submission."""
    due_at = now + unique.window_ms * 1_000
    return due_at if unique.max_ms is None else max(now, min(due_at, created_at + unique.max_ms * 1_000))


def rested(request: SubmitTask, now: int) -> SubmitTask:
    """The submission, due no earlier than after its quiet time if it is debounced."""
    spec = request.spec
    if spec.unique is None or spec.unique.scope is not UniqueScope.DEBOUNCE:
        return request
    due_at = max(spec.scheduled_at or 0, quiet_until(spec.unique, now, now))
    return replace(request, spec=replace(spec, scheduled_at=due_at))


def unique_problem(request: SubmitTask) -> str | None:
    """What is wrong with the uniqueness of a submission; never, if the API made it."""
    unique, spec = request.spec.unique, request.spec
    if unique is None:
        return None
    if unique.scope is UniqueScope.UNKNOWN:
        return "unique.scope is not known here"
    if not 1 <= len(unique.key) <= KEY_MAX:
        return f"unique.key must have 1 to {KEY_MAX} characters"
    if unique_root(request.task_id or "") != unique_root_of(spec.tenant_id, unique.key):
        return "task_id must begin with the root of its tenant and unique.key, and a dot"
    has_window = unique.scope in (UniqueScope.WINDOW, UniqueScope.DEBOUNCE)
    if has_window and not 1 <= unique.window_ms <= DURATION_MS_MAX:
        return f"unique.window_ms must be from 1 to {DURATION_MS_MAX}"
    if unique.max_ms is not None and not unique.window_ms <= unique.max_ms <= DURATION_MS_MAX:
        return f"unique.max_ms must be from window_ms to {DURATION_MS_MAX}"
    return None
