"""Which waiting task is the next: priorities by their weights, within one tenants by theirs, of a tenant the oldest.

Tenants share by stride scheduling (Waldspurger and Weihl, 1995): each has a pass; the lowest is served, and grows by
what is inversely proportional to the tenant's weight. Over any run of choices among tenants that all have work, each
gets its share to within one. Who was idle begins at the pass of who is served now: idleness earns nothing, and costs
nothing, as only tenants with work are kept.

A million tasks may wait, so that each costs little: its place in one table, and eight bytes in the order of its line.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from schemas.messages import Priority
from schemas.priorities import DEFAULT_WEIGHTS, PRIORITIES, WeightedChoice, Weights

Name = TypeVar("Name", bound=Hashable)
WeightOf = Callable[[str], int]  # of a tenant, from 1 on

_STRIDE = 1 << 20  # of a tenant with the weight 1: large, so that no weight that people write is rounded to nothing


def equal_weights(_tenant_id: str) -> int:
    """All tenants get the same."""
    return 1


class Line(Generic[Name]):
    """The waiting tasks of one tenant and priority in one queue, in their order.

    Those that are here are those whose place is this line: who leaves is only taken out of the order when it is met
    there. Who comes back before that has its old turn.
    """

    __slots__ = ("_order", "_places", "count", "priority", "queue", "tenant_id")

    def __init__(self, queue: FairQueue[Name], places: Places[Name], priority: Priority, tenant_id: str) -> None:
        self.queue, self.priority, self.tenant_id = queue, priority, tenant_id
        self.count = 0
        self._places = places
        self._order: deque[str] = deque()

    def put(self, task_id: str, *, is_first: bool) -> None:
        """A task that is not here waits, behind all others or before them."""
        self._places[task_id] = self
        self.count += 1
        self._order.appendleft(task_id) if is_first else self._order.append(task_id)
        if len(self._order) > 2 * self.count + 64:
            self._order = deque(dict.fromkeys(one for one in self._order if self._places.get(one) is self))

    def first(self) -> str:
        """The task that is to go first; there must be one."""
        while self._places.get(self._order[0]) is not self:
            self._order.popleft()
        return self._order[0]

    def remove(self, task_id: str) -> None:
        """A task that is here does not wait any more."""
        del self._places[task_id]
        self.count -= 1


Places = dict[str, Line[Name]]  # of tasks, by id


class _Tenants(Generic[Name]):
    """The lines of one priority in which somebody waits, by tenant."""

    __slots__ = ("_lines", "_pass", "_passes", "_serial", "_turn", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lines: dict[str, Line[Name]] = {}
        self._passes: dict[str, int] = {}
        self._turn: list[tuple[int, int, str]] = []  # a heap: pass, order of arrival, tenant; one for each of `_passes`
        self._pass = 0  # of who was served last
        self._serial = 0

    def line(self, tenant_id: str) -> Line[Name] | None:
        """Where tasks of a tenant wait, if there are any."""
        return self._lines.get(tenant_id)

    def admit(self, line: Line[Name]) -> None:
        """The first task of a tenant is to wait."""
        self._lines[line.tenant_id] = line
        if line.tenant_id not in self._passes:  # else it was served a moment ago: it must not begin anew
            self._enter(line.tenant_id, self._pass)

    def remove(self, line: Line[Name], task_id: str) -> None:
        """A task does not wait any more."""
        line.remove(task_id)
        self.count -= 1
        if not line.count:
            self._leave(line.tenant_id)

    def pop(self, weight_of: WeightOf) -> tuple[str, str]:
        """Take out the task whose turn it is; it and its tenant."""
        if len(self._lines) == 1:
            return self._pop_alone(weight_of)
        while True:
            at, _, tenant_id = heapq.heappop(self._turn)
            del self._passes[tenant_id]
            line = self._lines.get(tenant_id)
            if line is not None:
                break
        task_id = line.first()
        self._pass = at
        self._enter(tenant_id, at + _STRIDE // weight_of(tenant_id))
        self.remove(line, task_id)
        return task_id, tenant_id

    def _pop_alone(self, weight_of: WeightOf) -> tuple[str, str]:
        """Of the only tenant: its pass need not grow, but is to be behind that of who comes next."""
        (line,) = self._lines.values()
        task_id, tenant_id = line.first(), line.tenant_id
        if len(self._passes) > 1 or self._passes[tenant_id] <= self._pass:
            self._turn.clear()
            self._passes.clear()
            self._enter(tenant_id, self._pass + _STRIDE // weight_of(tenant_id))
        self.remove(line, task_id)
        return task_id, tenant_id

    def lines(self) -> Iterator[Line[Name]]:
        """Of each tenant with work. Safe from any thread."""
        return iter(list(self._lines.values()))

    def _leave(self, tenant_id: str) -> None:
        del self._lines[tenant_id]
        if not self._lines:  # nobody competes
            self._turn.clear()
            self._passes.clear()

    def _enter(self, tenant_id: str, at: int) -> None:
        self._serial += 1
        self._passes[tenant_id] = at
        heapq.heappush(self._turn, (at, self._serial, tenant_id))


class Waiting(NamedTuple):
    """A task that was taken out of a queue."""

    task_id: str
    priority: Priority
    tenant_id: str


class FairQueue(Generic[Name]):
    """Waiting tasks. All operations take O(log tenants)."""

    def __init__(self, name: Name, places: Places[Name], weights: Weights = DEFAULT_WEIGHTS) -> None:
        """`places` is shared by queues of which a task waits in one at most."""
        self.name = name
        self._places = places
        self._by_priority: dict[Priority, _Tenants[Name]] = {priority: _Tenants() for priority in PRIORITIES}
        self._choice = WeightedChoice(weights)

    def __len__(self) -> int:
        return sum(tenants.count for tenants in self._by_priority.values())

    def put(self, task_id: str, priority: Priority, tenant_id: str, *, is_first: bool = False) -> None:
        """A task that is not here waits: behind all others of its priority and tenant, or before them."""
        tenants = self._by_priority[priority]
        line = tenants.line(tenant_id)
        if line is None:
            line = Line(self, self._places, priority, tenant_id)
            tenants.admit(line)
        line.put(task_id, is_first=is_first)
        tenants.count += 1

    def remove(self, task_id: str) -> None:
        """A task does not wait any more; nothing happens if it did not wait here."""
        line = self._places.get(task_id)
        if line is not None and line.queue is self:
            self._by_priority[line.priority].remove(line, task_id)

    def pop(self, allowed: Collection[Priority], weight_of: WeightOf) -> Waiting | None:
        """Take out the task that is to go next, of these priorities; None: there is none."""
        candidates = [priority for priority in allowed if self._by_priority[priority].count]
        if not candidates:
            return None
        priority = self._choice.choose(candidates)
        task_id, tenant_id = self._by_priority[priority].pop(weight_of)
        return Waiting(task_id, priority, tenant_id)

    def priorities(self) -> list[Priority]:
        """Those of which something waits."""
        return [priority for priority, tenants in self._by_priority.items() if tenants.count]

    def lines(self) -> Iterator[Line[Name]]:
        """Each line in which somebody waits. Safe from any thread."""
        for tenants in self._by_priority.values():
            yield from tenants.lines()
