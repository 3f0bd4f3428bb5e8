"""What is let in of new tasks: how fast a tenant may submit, and how much of a tenant or of a queue may wait. Pure.

A shard has its part of each bound, with some slack: tasks are spread over shards by their ids, so that each sees about
as many. A small bound is kept only roughly by that. A process that takes submissions holds tenants to their whole rate
before they cost anything. A rate is that of submitting: what waited for a scheduler was not submitted in a burst.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import msgspec

from scheduler.core.policies import Policies
from schemas.messages import Outcome, Priority, Task, TaskSpec, TenantPolicy

BURST_S = 10  # a tenant that was quiet may submit what comes in so many seconds at once
TENANTS_MAX = 10_000  # whose buckets are kept; full ones are forgotten then
NO_TENANT = TaskSpec(task_type="").tenant_id  # of tasks that name none
_SECOND_US = 1_000_000
_REORDERED_US = 60 * _SECOND_US  # so far submissions of several producers may be apart


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for tenants and queues of which nothing else is said, in the whole cluster. None: no bound."""

    tenant_submits_per_s: int | None = None
    tenant_pending_max: int | None = None
    queue_pending_max: int | None = 10_000_000
    queue_overflow_at: int | None = 1_000_000  # from so many waiting ones on, those of low priority wait outside memory
    takes_any_queue: bool = True  # else only those of which an operator has said something


class NotAdmitted(NamedTuple):
    """Why a task is not let in; later it may be."""

    outcome: Outcome
    detail: str


class SubmitRates:
    """How fast tenants may submit: a bucket for each, of which this one has a part."""

    def __init__(self, settings: AdmissionSettings, parts: int = 1) -> None:
        self._settings, self._parts = settings, parts
        self._buckets: dict[str, tuple[int, int]] = {}  # what is used, in microseconds of the rate, and when it was so

    def refusal(self, tenant: TenantPolicy, at: int) -> NotAdmitted | None:
        """Count one submission that was made `at`, unless the tenant has had too many."""
        tenant_id, rate = tenant.tenant_id, tenant.submits_per_s or self._default_of(tenant)
        if rate is None:
            return None
        cost = self._parts * _SECOND_US // rate
        used, last_at = self._buckets.get(tenant_id, (0, at))
        used = max(0, used - max(0, at - last_at))
        at = max(at, last_at) if at > last_at - _REORDERED_US else at  # else the clock was set back
        if used + cost > self._burst_us(cost):
            self._buckets[tenant_id] = used, at
            bounds = f"{rate:,} tasks/s, and {rate * BURST_S:,} at once"
            return NotAdmitted(Outcome.TOO_MANY, f"tenant {tenant_id} submits more than {bounds}")
        if len(self._buckets) >= TENANTS_MAX and tenant_id not in self._buckets:
            self._buckets = {one: (used, then) for one, (used, then) in self._buckets.items() if used > at - then}
        self._buckets[tenant_id] = used + cost, at
        return None

    def _default_of(self, tenant: TenantPolicy) -> int | None:
        # Who names no tenant is nobody in particular, and may be all there is.
        return None if tenant.tenant_id == NO_TENANT else self._settings.tenant_submits_per_s

    def _burst_us(self, cost: int) -> int:
        """What may come at once. Chance gives some parts more than others: none is to refuse what is allowed in all."""
        return BURST_S * _SECOND_US + (0 if self._parts == 1 else _slack(BURST_S * _SECOND_US // cost) * cost)


def _slack(part: int) -> int:
    """How much more than its part a shard may have: three standard deviations of what chance gives it."""
    return 3 * math.isqrt(part) + 3


class Admission:
    """What one shard lets in. `enters` and `leaves` tell what waits there."""

    def __init__(self, settings: AdmissionSettings, policies: Policies, shards: int) -> None:
        self._settings, self._policies, self._shards = settings, policies, shards
        self._rates = SubmitRates(settings, shards)
        self._of_queue: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()

    def enters(self, task: Task) -> None:
        """A task is pending from now on."""
        self._of_queue[task.spec.queue] += 1
        self._of_tenant[task.spec.tenant_id] += 1

    def leaves(self, task: Task) -> None:
        """A task is pending no more."""
        for counts, name in ((self._of_queue, task.spec.queue), (self._of_tenant, task.spec.tenant_id)):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]

    def refusal(self, spec: TaskSpec, at: int) -> NotAdmitted | None:
        """Why a new task that was submitted `at` is not let in; None: it is, and counts for its tenant's rate."""
        queue, tenant_id, settings = spec.queue, spec.tenant_id, self._settings
        policy = self._policies.queue(queue)
        if policy.is_drained:
            return NotAdmitted(Outcome.OVERLOADED, f"queue {queue} takes no new tasks: it is drained")
        if not settings.takes_any_queue and not policy.set_at:
            return NotAdmitted(Outcome.INVALID, f"queue {queue} is not known: tidewheel queues set makes it so")
        pending_max = policy.pending_max or settings.queue_pending_max
        if self._is_beyond(self._of_queue[queue], pending_max):
            return NotAdmitted(Outcome.OVERLOADED, f"queue {queue} has its bound of {pending_max:,} waiting tasks")
        tenant = self._policies.tenant(tenant_id)
        pending_max = tenant.pending_max or settings.tenant_pending_max
        if self._is_beyond(self._of_tenant[tenant_id], pending_max):
            return NotAdmitted(Outcome.TOO_MANY, f"tenant {tenant_id} has its bound of {pending_max:,} waiting tasks")
        return self._rates.refusal(tenant, at)

    def overflows(self, spec: TaskSpec) -> bool:
        """Whether a task is to wait elsewhere, since so many do in its queue and it is of low priority."""
        is_low = spec.priority is Priority.LOW
        return is_low and self._is_beyond(self._of_queue[spec.queue], self._settings.queue_overflow_at)

    def _is_beyond(self, pending: int, pending_max: int | None) -> bool:
        if pending_max is None:
            return False
        part = -(-pending_max // self._shards)
        return pending >= part + (0 if self._shards == 1 else _slack(part))

    def pending(self) -> int:
        """How many tasks are counted."""
        return self._of_queue.total()
