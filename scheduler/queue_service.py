"""The rules of the surface for queues and tenants: what operators may say of them, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from pydantic import Field

from scheduler.core.policies import WEIGHT_MAX, Policies
from scheduler.instants import format_instant
from scheduler.operations import Operation, Performer, Steps, at_once, read, refusing_errors
from scheduler.ports import Clock
from scheduler.queue_stats import Amount, Amounts
from scheduler.refusals import Refusal, RefusalKind, Refused, invalid
from scheduler.submission import Body, Duration, MaxAttempts, PriorityName, check_reason, ms_of
from schemas.ids import NAME_RULE, is_name
from schemas.messages import Policy, Priority, QueuePolicy, TenantPolicy

T = TypeVar("T")

RATE_MAX = 1_000_000  # submissions a second
PendingMax = Annotated[int, Field(ge=1, le=1_000_000_000)]


ALERT_PENDING = 100_000  # waiting tasks of a queue from which on somebody is to look


class QueueDefaults(Body):
    """What holds for submissions to a queue that do not say it. Producers that write to the topic say everything."""

    priority: PriorityName | None = None
    timeout_seconds: Duration | None = Field(None, description="Of one attempt.")
    total_timeout_seconds: Duration | None = Field(None, description="Of the whole task, from its due time.")
    max_attempts: MaxAttempts | None = None


class QueueChange(Body):
    """What an operator changes of a queue. What is absent stays; null stands for what the settings say."""

    is_drained: bool | None = Field(None, description="Whether it takes no new tasks; those that it has go on.")
    pending_max: PendingMax | None = Field(None, description="How many of its tasks may wait.")
    defaults: QueueDefaults | None = Field(None, description="Those that are absent stay; null: none at all.")


class TenantChange(Body):
    """What an operator changes of a tenant. What is absent stays; null stands for the default."""

    weight: Annotated[int, Field(ge=1, le=WEIGHT_MAX)] | None = Field(None, description="Its share; 1 by default.")
    submits_per_s: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = Field(
        None, description="How many tasks it may submit in a second, over ten seconds."
    )
    pending_max: PendingMax | None = Field(None, description="How many of its tasks may wait.")


class PriorityView(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of one priority. `oldest_at`: since when the task that waits longest might have started.

    `waited_ms`: how long those had waited that started in the last second, in the mean; null: none did.
    """

    priority: Priority
    pending: int
    running: int
    started_per_s: float
    waited_ms: float | None
    oldest_at: str | None


class QueueDefaultsView(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for submissions that do not say it themselves; null: what holds everywhere."""

    priority: Priority | None
    timeout_seconds: float | None
    total_timeout_seconds: float | None
    max_attempts: int | None


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: what waits and runs, and what operators said of it. Instants are RFC 3339 text in UTC.

    The counts are a second old at most, or ten while nothing happens. `throttled` of the pending ones wait for a limit.
    `due_soon` wait for an instant within the next minute. `backlog` is what workers are needed for: the other pending
    ones, those that run, and those due soon. `waited_ms`: how long those had waited that started in the last second, in
    the mean; null: none did. `set_at` is when an operator said the last word; null: nobody did. `pending_max` is what
    may wait; null: what the settings of the schedulers say. `is_crowded`: 100,000 wait, or more. `is_drained`: it takes
    no new tasks.
    """

    queue: str
    is_paused: bool
    pause_reason: str | None
    is_drained: bool
    pending_max: int | None
    is_crowded: bool
    set_at: str | None
    pending: int
    throttled: int
    due_soon: int
    running: int
    backlog: int
    started_per_s: float
    waited_ms: float | None
    oldest_at: str | None
    priorities: Sequence[PriorityView]
    defaults: QueueDefaultsView


class QueueList(msgspec.Struct, frozen=True, kw_only=True):
    """The queues that have something or of which something was said, by name. Counts are of `shards_heard` shards."""

    queues: Sequence[QueueView]
    shards_heard: int
    shards: int


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant. `weight` is its share of the starts among tenants that wait in the same queue and priority.

    `submits_per_s` and `pending_max` bound what it submits and what waits of it; null: what the settings say.
    """

    tenant_id: str
    weight: int
    submits_per_s: int | None
    pending_max: int | None
    set_at: str | None
    pending: int
    running: int
    started_per_s: float
    waited_ms: float | None


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """The tenants that have something or of which something was said, by id. Counts are of `shards_heard` shards."""

    tenants: Sequence[TenantView]
    shards_heard: int
    shards: int


class Board(Protocol):
    """Where policies are read and written, and the shards listened to (`scheduler.gateway.Gateway`)."""

    @property
    def policies(self) -> Policies:
        """What holds. Raises Retriable."""

    def amounts(self) -> Amounts:
        """What waits and runs in all shards. Raises Retriable."""

    def say(self, policy: Policy) -> None:
        """Write a policy; wait until it holds here. Raises Retriable and Undecided."""


class QueueService:
    """What can be asked of queues and tenants.

    A policy is written as a whole. Two operators who change different things of the same queue at the same time, by way
    of different processes, may undo each other's: what holds in the end is what both are shown.
    """

    def __init__(self, performer: Performer, board: Board, *, clock: Clock) -> None:
        self._performer, self._board, self._clock = performer, board, clock

    def queue(self, queue: str) -> Operation[QueueView]:
        """What waits and runs in a queue, and whether it is paused."""
        return self._operation(at_once(lambda: self._queue(queue)))

    def queues(self) -> Operation[QueueList]:
        """All queues that have something, or of which something was said."""
        return self._operation(at_once(self._queues))

    def pause(self, queue: str, *, reason: str | None = None) -> Operation[QueueView]:
        """Let tasks of a queue wait from now on; those that run go on. Twice gives the same answer."""
        return self._operation(self._set_paused(queue, reason, is_paused=True))

    def resume(self, queue: str) -> Operation[QueueView]:
        """Let tasks of a queue go out again."""
        return self._operation(self._set_paused(queue, None, is_paused=False))

    def tenant(self, tenant_id: str) -> Operation[TenantView]:
        """What waits and runs of a tenant, and its share."""
        return self._operation(at_once(lambda: self._tenant(tenant_id)))

    def tenants(self) -> Operation[TenantList]:
        """All tenants that have something, or of which something was said."""
        return self._operation(at_once(self._tenants))

    def set_queue(self, queue: str, change: QueueChange) -> Operation[QueueView]:
        """Let other bounds hold for a queue."""
        return self._operation(self._set_queue(queue, change))

    def set_tenant(self, tenant_id: str, change: TenantChange) -> Operation[TenantView]:
        """Let a tenant have another share, also of what waits already, or other bounds."""
        return self._operation(self._set_tenant(tenant_id, change))

    def _operation(self, steps: Steps[T]) -> Operation[T]:
        return Operation(self._performer, refusing_errors(steps))

    def _queue(self, queue: str) -> QueueView:
        check_name("queue", queue)
        found = [one for one in self._board.amounts().found if one.queue == queue]
        return _queue_view(self._board.policies.queue(queue), found)

    def _queues(self) -> QueueList:
        amounts, policies = self._board.amounts(), self._board.policies
        by_queue: dict[str, list[Amount]] = {one.queue: [] for one in policies.queues()}
        for amount in amounts.found:
            by_queue.setdefault(amount.queue, []).append(amount)
        views = [_queue_view(policies.queue(name), found) for name, found in sorted(by_queue.items())]
        return QueueList(queues=views, shards_heard=amounts.heard, shards=amounts.shards)

    def _set_paused(self, queue: str, reason: str | None, *, is_paused: bool) -> Steps[QueueView]:
        check_name("queue", queue)
        check_reason(reason)
        before = self._board.policies.queue(queue)
        if (before.is_paused, before.pause_reason) != (is_paused, reason):
            fields = {"is_paused": is_paused, "pause_reason": reason, "set_at": self._clock.now_us()}
            after: QueuePolicy = msgspec.structs.replace(before, **fields)
            yield from said(self._board, after)
        return self._queue(queue)

    def _tenant(self, tenant_id: str) -> TenantView:
        check_name("tenant_id", tenant_id)
        found = [one for one in self._board.amounts().found if one.tenant_id == tenant_id]
        return _tenant_view(self._board.policies.tenant(tenant_id), found)

    def _tenants(self) -> TenantList:
        amounts, policies = self._board.amounts(), self._board.policies
        by_tenant: dict[str, list[Amount]] = {one.tenant_id: [] for one in policies.tenants()}
        for amount in amounts.found:
            if amount.tenant_id:
                by_tenant.setdefault(amount.tenant_id, []).append(amount)
        views = [_tenant_view(policies.tenant(name), found) for name, found in sorted(by_tenant.items())]
        return TenantList(tenants=views, shards_heard=amounts.heard, shards=amounts.shards)

    def _set_queue(self, queue: str, change: QueueChange) -> Steps[QueueView]:
        check_name("queue", queue)
        given = _given(change)
        if given.get("is_drained", False) is None:
            given["is_drained"] = False
        if "defaults" in given:
            given |= _default_fields(given.pop("defaults"))
        before = self._board.policies.queue(queue)
        after: QueuePolicy = msgspec.structs.replace(before, **given)
        if after != before or not before.set_at:  # to say anything of a queue makes it known
            yield from said(self._board, msgspec.structs.replace(after, set_at=self._clock.now_us()))
        return self._queue(queue)

    def _set_tenant(self, tenant_id: str, change: TenantChange) -> Steps[TenantView]:
        check_name("tenant_id", tenant_id)
        given = _given(change)
        if given.get("weight", 0) is None:
            given["weight"] = 1
        before = self._board.policies.tenant(tenant_id)
        after: TenantPolicy = msgspec.structs.replace(before, **given)
        if after != before:
            yield from said(self._board, msgspec.structs.replace(after, set_at=self._clock.now_us()))
        return self._tenant(tenant_id)


def said(board: Board, policy: Policy) -> Steps[None]:
    """Write a policy. Raises Refused: there is no room for it."""
    try:
        yield from read(lambda: board.say(policy))
    except ValueError as error:
        raise Refused(Refusal(RefusalKind.CONFLICT, str(error))) from error


def _given(change: Body) -> dict[str, Any]:
    return {name: getattr(change, name) for name in change.model_fields_set}


def _default_fields(defaults: QueueDefaults | None) -> dict[str, Any]:
    given = QueueDefaults.model_fields if defaults is None else defaults.model_fields_set
    defaults = defaults or QueueDefaults.model_validate({})
    fields: dict[str, tuple[str, Any]] = {
        "priority": ("priority", defaults.priority),
        "timeout_seconds": ("timeout_ms", ms_of(defaults.timeout_seconds)),
        "total_timeout_seconds": ("total_timeout_ms", ms_of(defaults.total_timeout_seconds)),
        "max_attempts": ("max_attempts", defaults.max_attempts),
    }
    return dict(fields[name] for name in given)


def check_name(field: str, name: str) -> None:
    """Raises Refused: it is none."""
    if not is_name(name):
        raise invalid(field, "is not accepted", NAME_RULE)


def _queue_view(policy: QueuePolicy, found: Sequence[Amount]) -> QueueView:
    pending, running = _pending(found), _running(found)
    throttled, due_soon = sum(one.throttled for one in found), sum(one.due_soon for one in found)
    return QueueView(
        queue=policy.queue,
        is_paused=policy.is_paused,
        pause_reason=policy.pause_reason,
        is_drained=policy.is_drained,
        pending_max=policy.pending_max,
        is_crowded=pending >= ALERT_PENDING,
        set_at=_instant(policy.set_at),
        pending=pending,
        throttled=throttled,
        due_soon=due_soon,
        running=running,
        backlog=pending - throttled + running + due_soon,
        started_per_s=_started_per_s(found),
        waited_ms=_waited_ms(found),
        oldest_at=_oldest_at(found),
        priorities=[_priority_view(priority, found) for priority in Priority],
        defaults=QueueDefaultsView(
            priority=policy.priority,
            timeout_seconds=_seconds(policy.timeout_ms),
            total_timeout_seconds=_seconds(policy.total_timeout_ms),
            max_attempts=policy.max_attempts,
        ),
    )


def _priority_view(priority: Priority, amounts: Sequence[Amount]) -> PriorityView:
    found = [one for one in amounts if one.priority is priority]
    return PriorityView(
        priority=priority,
        pending=_pending(found),
        running=_running(found),
        started_per_s=_started_per_s(found),
        waited_ms=_waited_ms(found),
        oldest_at=_oldest_at(found),
    )


def _tenant_view(policy: TenantPolicy, found: Sequence[Amount]) -> TenantView:
    return TenantView(
        tenant_id=policy.tenant_id,
        weight=policy.weight,
        submits_per_s=policy.submits_per_s,
        pending_max=policy.pending_max,
        set_at=_instant(policy.set_at),
        pending=_pending(found),
        running=_running(found),
        started_per_s=_started_per_s(found),
        waited_ms=_waited_ms(found),
    )


def _pending(found: Sequence[Amount]) -> int:
    return sum(one.pending for one in found)


def _running(found: Sequence[Amount]) -> int:
    return sum(one.running for one in found)


def _started_per_s(found: Sequence[Amount]) -> float:
    return round(sum(one.started_per_s for one in found), 1)


def _waited_ms(found: Sequence[Amount]) -> float | None:
    started = sum(one.started_per_s for one in found)
    return round(sum(one.waited_us_per_s for one in found) / started / 1_000, 1) if started else None


def _oldest_at(found: Sequence[Amount]) -> str | None:
    return _instant(min((one.oldest_at for one in found if one.oldest_at is not None), default=0))


def _instant(at: int) -> str | None:
    return format_instant(at) if at else None


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000
