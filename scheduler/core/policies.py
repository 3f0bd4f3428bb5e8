"""What operators say of queues and tenants, as decisions see it. It may change at any time, under what waits already.

No fold depends on it: what was decided by a policy is in the event, so a replay under another one gives the same state.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.messages import Policy, QueuePolicy, TenantPolicy

WEIGHT_MAX = 1_000  # of a tenant: more would let one with the weight 1 wait for too long
POLICIES_MAX = 10_000  # queues and tenants of which something is said: all of it is in the memory of each process


class Policies:
    """What holds now. Changed by one thread; read by any."""

    def __init__(self) -> None:
        self._queues: dict[str, QueuePolicy] = {}
        self._tenants: dict[str, TenantPolicy] = {}

    def put(self, policy: Policy) -> bool:
        """Let it hold from now on. False: there are too many already, and none of this queue or tenant."""
        about = self._queues if isinstance(policy, QueuePolicy) else self._tenants
        name = policy.queue if isinstance(policy, QueuePolicy) else policy.tenant_id
        if name not in about and len(self._queues) + len(self._tenants) >= POLICIES_MAX:
            return False
        about[name] = policy  # type: ignore[assignment]  # of the kind that belongs there
        return True

    def queue(self, queue: str) -> QueuePolicy:
        """What holds for a queue."""
        return self._queues.get(queue) or QueuePolicy(queue=queue, set_at=0)

    def tenant(self, tenant_id: str) -> TenantPolicy:
        """What holds for a tenant."""
        return self._tenants.get(tenant_id) or TenantPolicy(tenant_id=tenant_id, set_at=0)

    def queues(self) -> Sequence[QueuePolicy]:
        """All queues of which something was said."""
        return list(self._queues.values())

    def tenants(self) -> Sequence[TenantPolicy]:
        """All tenants of which something was said."""
        return list(self._tenants.values())

    def is_paused(self, queue: str) -> bool:
        """Whether tasks of a queue wait for now."""
        policy = self._queues.get(queue)
        return policy is not None and policy.is_paused

    def weight_of(self, tenant_id: str) -> int:
        """A tenant's share; whoever wrote nonsense to the topic gets the nearest that is allowed."""
        policy = self._tenants.get(tenant_id)
        return 1 if policy is None else min(WEIGHT_MAX, max(1, policy.weight))
