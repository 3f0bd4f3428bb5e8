"""What is let in of new tasks: how fast a tenant may submit, and how much of a tenant or of a queue may wait. Pure.

A shard has its part of each bound, and tasks are spread over shards by their ids: of many submissions each shard sees
about as many. A process that takes submissions holds tenants to their whole rate before they cost anything.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from scheduler.core.policies import Policies
from schemas.messages import Outcome, Task, TaskSpec, TenantPolicy

BURST_S = 10  # a tenant that was quiet may submit what comes in so many seconds at once
TENANTS_MAX = 10_000  # whose buckets are kept; full ones are forgotten then
_SECOND_US = 1_000_000


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for tenants and queues of which nothing else is said, in the whole cluster. None: no bound."""

    tenant_submits_per_s: int | None = None
    tenant_pending_max: int | None = None
    queue_pending_max: int | None = 10_000_000
    takes_any_queue: bool = True  # else only those of which an operator has said something


class NotAdmitted(NamedTuple):
    """Why a task is not let in; later it may be."""

    outcome: Outcome
    detail: str


class SubmitRates:
    """How fast tenants may submit: a bucket for each, of which this one has a part."""

    def __init__(self, settings: AdmissionSettings, parts: int = 1) -> None:
        self._settings, self._parts = settings, parts
        # Chance gives some parts more than others: they are not to refuse what is allowed as a whole.
        self._burst_us = BURST_S * _SECOND_US if parts == 1 else BURST_S * _SECOND_US * 5 // 4
        self._buckets: dict[str, tuple[int, int]] = {}  # what is used, in microseconds of the rate, and when it was so

    def refusal(self, tenant: TenantPolicy, now: int) -> NotAdmitted | None:
        """Count one submission, unless the tenant has had too many."""
        tenant_id, rate = tenant.tenant_id, tenant.submits_per_s or self._settings.tenant_submits_per_s
        if rate is None:
            return None
        cost = self._parts * _SECOND_US // rate
        used, at = self._buckets.get(tenant_id, (0, now))
        used = max(0, used - max(0, now - at))
        if used + cost > max(cost, self._burst_us):
            self._buckets[tenant_id] = used, now
            bounds = f"{rate:,} tasks/s, and {rate * BURST_S:,} at once"
            return NotAdmitted(Outcome.TOO_MANY, f"tenant {tenant_id} submits more than {bounds}")
        if len(self._buckets) >= TENANTS_MAX and tenant_id not in self._buckets:
            self._buckets = {one: (used, at) for one, (used, at) in self._buckets.items() if used > now - at}
        self._buckets[tenant_id] = used + cost, now
        return None


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

    def refusal(self, spec: TaskSpec, now: int) -> NotAdmitted | None:
        """Why a new task is not let in; None: it is, and counts for its tenant's rate."""
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
        return self._rates.refusal(tenant, now)

    def _is_beyond(self, pending: int, pending_max: int | None) -> bool:
        return pending_max is not None and pending >= -(-pending_max // self._shards)

    def pending(self) -> int:
        """How many tasks are counted."""
        return self._of_queue.total()
