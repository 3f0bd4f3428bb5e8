"""Which waiting task is the next: priorities by their weights, within one tenants by theirs, of a tenant the oldest.

Tenants share by stride scheduling (Waldspurger and Weihl, 1995): each has a pass; the lowest is served, and grows by
what is inversely proportional to the tenant's weight. Over any run of choices among tenants that all have work, each
gets its share to within one. Who was idle begins at the pass of who is served now: idleness earns nothing, and costs
nothing, as only tenants with work are kept.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from schemas.messages import Priority
from schemas.priorities import WEIGHTS, WeightedChoice

WeightOf = Callable[[str], int]  # of a tenant, from 1 on

_STRIDE = 1 << 20  # of a tenant with the weight 1: large, so that no weight that people write is rounded to nothing


def equal_weights(_tenant_id: str) -> int:
    """All tenants get the same."""
    return 1


class _Tenant:
    """The waiting tasks of one tenant in one priority, in their order, each with its size."""

    __slots__ = ("priority", "tasks", "tenant_id")

    def __init__(self, priority: Priority, tenant_id: str) -> None:
        self.priority, self.tenant_id = priority, tenant_id
        self.tasks: OrderedDict[str, int] = OrderedDict()


class _Tenants:
    """The tenants of one priority that have waiting tasks."""

    __slots__ = ("_pass", "_passes", "_priority", "_serial", "_turn", "_waiting", "count")

    def __init__(self, priority: Priority) -> None:
        self.count = 0
        self._priority = priority
        self._waiting: dict[str, _Tenant] = {}
        self._passes: dict[str, int] = {}
        self._turn: list[tuple[int, int, str]] = []  # a heap: pass, order of arrival, tenant; one for each of `_passes`
        self._pass = 0  # of who was served last
        self._serial = 0

    def put(self, tenant_id: str, task_id: str, size: int, *, is_first: bool) -> _Tenant:
        tenant = self._waiting.get(tenant_id)
        if tenant is None:
            tenant = self._waiting[tenant_id] = _Tenant(self._priority, tenant_id)
            if tenant_id not in self._passes:  # else it was served a moment ago: it must not begin anew
                self._enter(tenant_id, self._pass)
        tenant.tasks[task_id] = size
        if is_first:
            tenant.tasks.move_to_end(task_id, last=False)
        self.count += 1
        return tenant

    def remove(self, tenant: _Tenant, task_id: str) -> None:
        del tenant.tasks[task_id]
        self.count -= 1
        if not tenant.tasks:
            self._leave(tenant.tenant_id)

    def pop(self, weight_of: WeightOf) -> tuple[str, str, int]:
        while True:
            at, _, tenant_id = heapq.heappop(self._turn)
            del self._passes[tenant_id]
            tenant = self._waiting.get(tenant_id)
            if tenant is not None:
                break
        task_id, size = tenant.tasks.popitem(last=False)
        self.count -= 1
        self._pass = at
        self._enter(tenant_id, at + _STRIDE // weight_of(tenant_id))
        if not tenant.tasks:
            self._leave(tenant_id)
        return task_id, tenant_id, size

    def tenants(self) -> Iterator[tuple[str, int]]:
        """Each tenant with work, and how much. Safe from any thread."""
        return ((tenant_id, len(tenant.tasks)) for tenant_id, tenant in list(self._waiting.items()))

    def oldest(self) -> Iterator[tuple[str, str]]:
        """Each tenant with work, and its task that is to go first."""
        return ((tenant_id, next(iter(tenant.tasks))) for tenant_id, tenant in self._waiting.items())

    def _leave(self, tenant_id: str) -> None:
        del self._waiting[tenant_id]
        if not self._waiting:  # nobody competes
            self._turn.clear()
            self._passes.clear()

    def _enter(self, tenant_id: str, at: int) -> None:
        self._serial += 1
        self._passes[tenant_id] = at
        heapq.heappush(self._turn, (at, self._serial, tenant_id))


class Waiting(NamedTuple):
    """A task that was taken out of a queue, and its size."""

    task_id: str
    priority: Priority
    tenant_id: str
    size: int


class FairQueue:
    """Waiting tasks, each with its size. All operations take O(log tenants)."""

    def __init__(self) -> None:
        self._by_priority = {priority: _Tenants(priority) for priority in WEIGHTS}
        self._choice = WeightedChoice()
        self._places: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._places

    def put(self, task_id: str, priority: Priority, tenant_id: str, size: int, *, is_first: bool = False) -> None:
        """A task that is not here waits: behind all others of its priority and tenant, or before them."""
        self._places[task_id] = self._by_priority[priority].put(tenant_id, task_id, size, is_first=is_first)

    def remove(self, task_id: str) -> None:
        """A task does not wait any more; nothing happens if it did not."""
        tenant = self._places.pop(task_id, None)
        if tenant is not None:
            self._by_priority[tenant.priority].remove(tenant, task_id)

    def pop(self, allowed: Collection[Priority], weight_of: WeightOf) -> Waiting | None:
        """Take out the task that is to go next, of these priorities; None: there is none."""
        candidates = [priority for priority in allowed if self._by_priority[priority].count]
        if not candidates:
            return None
        priority = self._choice.choose(candidates)
        task_id, tenant_id, size = self._by_priority[priority].pop(weight_of)
        del self._places[task_id]
        return Waiting(task_id, priority, tenant_id, size)

    def priorities(self) -> list[Priority]:
        """Those of which something waits."""
        return [priority for priority, tenants in self._by_priority.items() if tenants.count]

    def depth(self) -> Iterator[tuple[Priority, str, int]]:
        """How many tasks wait, by priority and tenant. Safe from any thread."""
        for priority, tenants in self._by_priority.items():
            for tenant_id, count in tenants.tenants():
                yield priority, tenant_id, count

    def oldest(self) -> Iterator[tuple[Priority, str, str]]:
        """The task that is to go first, by priority and tenant."""
        for priority, tenants in self._by_priority.items():
            for tenant_id, task_id in tenants.oldest():
                yield priority, tenant_id, task_id
