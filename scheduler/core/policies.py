"""What operators say of queues, tenants and limits, as decisions see it. It may change at any time, under what waits.

No fold of a task depends on it: what was decided by a policy is in the event, so a replay under another one gives the
same tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from scheduler.core.limit_keys import Limit, LimitProblem, Rate, Rule, limit_of, name_of
from schemas.messages import LimitPolicy, Policy, QueuePolicy, TaskSpec, TenantPolicy

WEIGHT_MAX = 1_000  # of a tenant: more would let one with the weight 1 wait for too long
POLICIES_MAX = 10_000  # queues, tenants and limits of which something is said: all of it is in each process's memory
LIMITS_MAX = 100  # each task is held against all of them


class Policies:
    """What holds now. Changed by one thread; read by any."""

    def __init__(self) -> None:
        # Changes of what is let go at all: the queue that was paused or resumed; None: limits.
        self.gate_changes: list[str | None] = []
        self._queues: dict[str, QueuePolicy] = {}
        self._tenants: dict[str, TenantPolicy] = {}
        self._limits: dict[str, LimitPolicy] = {}
        self._usable: tuple[Limit, ...] = ()  # permits before tokens, else by name: all shards take them in one order
        self._rules: dict[str, Rule] = {}

    def problem_of(self, policy: Policy) -> str | None:
        """Why a policy could not be put, if it could not."""
        match policy:
            case QueuePolicy():
                return self._room_problem(self._queues, policy.queue)
            case TenantPolicy():
                return self._room_problem(self._tenants, policy.tenant_id)
            case LimitPolicy():
                return self._limit_problem(policy)

    def _room_problem(self, about: Mapping[str, Policy], name: str) -> str | None:
        known = len(self._queues) + len(self._tenants) + len(self._limits)
        is_full = name not in about and known >= POLICIES_MAX
        return f"there are {POLICIES_MAX} policies already" if is_full else None

    def _limit_problem(self, policy: LimitPolicy) -> str | None:
        if policy.is_removed:
            return None
        if policy.name not in self._limits and len(self._limits) >= LIMITS_MAX:
            return f"there are {LIMITS_MAX} limits already"
        try:
            limit_of(policy)
        except LimitProblem as error:
            return str(error)
        return self._room_problem(self._limits, policy.name)

    def put(self, policy: Policy) -> str | None:
        """Let it hold from now on. Why it cannot: there are too many already, or it is none that can be."""
        if problem := self.problem_of(policy):
            return problem
        match policy:
            case QueuePolicy():
                if self.is_paused(policy.queue) != policy.is_paused:
                    self.gate_changes.append(policy.queue)
                self._queues[policy.queue] = policy
            case TenantPolicy():
                self._tenants[policy.tenant_id] = policy
            case LimitPolicy():
                self._put_limit(policy)
        return None

    def _put_limit(self, policy: LimitPolicy) -> None:
        if policy.is_removed:
            self._limits.pop(policy.name, None)
        else:
            self._limits[policy.name] = policy
        found = [limit_of(one) for one in self._limits.values()]
        self._usable = tuple(sorted(found, key=lambda limit: (isinstance(limit.rule, Rate), limit.name)))
        self._rules = {limit.name: limit.rule for limit in found}
        self.gate_changes.append(None)

    def queue(self, queue: str) -> QueuePolicy:
        """What holds for a queue."""
        return self._queues.get(queue) or QueuePolicy(queue=queue, set_at=0)

    def tenant(self, tenant_id: str) -> TenantPolicy:
        """What holds for a tenant."""
        return self._tenants.get(tenant_id) or TenantPolicy(tenant_id=tenant_id, set_at=0)

    def limit(self, name: str) -> LimitPolicy | None:
        """A limit, if there is one of this name."""
        return self._limits.get(name)

    def queues(self) -> Sequence[QueuePolicy]:
        """All queues of which something was said."""
        return list(self._queues.values())

    def tenants(self) -> Sequence[TenantPolicy]:
        """All tenants of which something was said."""
        return list(self._tenants.values())

    def limits(self) -> Sequence[LimitPolicy]:
        """All limits, by name."""
        return sorted(self._limits.values(), key=lambda policy: policy.name)

    def is_paused(self, queue: str) -> bool:
        """Whether tasks of a queue wait for now."""
        policy = self._queues.get(queue)
        return policy is not None and policy.is_paused

    def weight_of(self, tenant_id: str) -> int:
        """A tenant's share; whoever wrote nonsense to the topic gets the nearest that is allowed."""
        policy = self._tenants.get(tenant_id)
        return 1 if policy is None else min(WEIGHT_MAX, max(1, policy.weight))

    def rule_of(self, key: str) -> Rule | None:
        """What holds for a key of a limit; None: there is no such limit any more."""
        return self._rules.get(name_of(key))

    def keys_of(self, spec: TaskSpec) -> tuple[str, ...]:
        """The keys under which a task is limited, in the order in which all must be had."""
        return tuple(self._keys(spec)) if self._usable else ()

    def _keys(self, spec: TaskSpec) -> Iterator[str]:
        for limit in self._usable:
            key = limit.key_of(spec)
            if key is not None:
                yield key
