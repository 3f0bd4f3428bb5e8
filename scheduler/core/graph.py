"""The graph of a workflow: which graphs can run, and which nodes may go, are skipped or fail as others end. Pure.

Nodes are numbered in the order in which they were given. Every node has a **join rule**: what must have become of its
parents before it runs. A rule is decided as early as the order in which parents end cannot matter any more: what is
decided after some of them would have been decided after all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from typing import NamedTuple

from schemas.messages import JoinRule as Join

NODES_MAX = 10_000  # of a graph that is submitted at once
CYCLE_SHOWN = 20  # names of a cycle that are told


class End(StrEnum):
    """What became of a node."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # its attempts are used up, it failed for good, or it was cancelled
    UPSTREAM_FAILED = "upstream_failed"  # it was not run, since its rule asks for what a failure made impossible
    SKIPPED = "skipped"  # it was not run, since it was not wanted


class Move(Enum):
    """What is to be done with a node now."""

    RUN = "run"
    FAIL = "fail"
    SKIP = "skip"


class Node(NamedTuple):
    """A node: its name, the numbers of its parents, each once, and when it runs. `at_least` is for that rule."""

    name: str
    needs: Sequence[int] = ()
    join: Join = Join.ALL_SUCCEEDED
    at_least: int = 0


class GraphProblem(ValueError):
    """Why a graph cannot run. `node` is the number of the node where it shows, if it is about one."""

    def __init__(self, node: int | None, field: str, problem: str) -> None:
        super().__init__(problem)
        self.node, self.field, self.problem = node, field, problem


def numbered(names: Sequence[str], needs: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """The parents of each node by number, each once, in their order. Raises GraphProblem: one is unknown or taken."""
    numbers: dict[str, int] = {}
    for number, name in enumerate(names):
        if name in numbers:
            raise GraphProblem(number, "name", f"{name!r} is the name of task {numbers[name]} and of task {number}")
        numbers[name] = number
    found = []
    for number, parents in enumerate(needs):
        for parent in parents:
            if parent not in numbers:
                raise GraphProblem(number, "dependencies", f"{names[number]!r} needs {parent!r}, which is not there")
        found.append(tuple(dict.fromkeys(numbers[parent] for parent in parents)))
    return found


def check(nodes: Sequence[Node]) -> None:
    """Raises GraphProblem if the graph cannot run: it is empty or too large, or has a cycle or a rule without sense."""
    if not nodes:
        raise GraphProblem(None, "tasks", "there is no task")
    if len(nodes) > NODES_MAX:
        raise GraphProblem(None, "tasks", f"there are {len(nodes):,} tasks; at most {NODES_MAX:,} are allowed")
    for number, node in enumerate(nodes):
        if node.join is Join.AT_LEAST and not 1 <= node.at_least <= len(node.needs):
            allowed = f"from 1 to its {len(node.needs)} dependencies"
            raise GraphProblem(number, "at_least", f"{node.name!r} asks for {node.at_least}; allowed is {allowed}")
        if node.join is Join.ONE_FAILED and not node.needs:
            raise GraphProblem(number, "join", f"{node.name!r} waits for a failure, and has no dependencies")
    if cycle := _cycle(nodes):
        names = " -> ".join(nodes[number].name for number in cycle[:CYCLE_SHOWN])
        more = f" -> … ({len(cycle) - 1} tasks)" if len(cycle) > CYCLE_SHOWN else ""
        raise GraphProblem(cycle[0], "dependencies", f"these wait for each other: {names}{more}")


def children_of(nodes: Sequence[Node]) -> list[list[int]]:
    """The numbers of those that need each node."""
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for parent in node.needs:
            children[parent].append(number)
    return children


def _cycle(nodes: Sequence[Node]) -> list[int]:
    """Nodes each of which is needed by the next, the first again at the end; empty: there is no cycle."""
    left = [len(node.needs) for node in nodes]
    children = children_of(nodes)
    free = deque(number for number, count in enumerate(left) if not count)
    while free:
        for child in children[free.popleft()]:
            left[child] -= 1
            if not left[child]:
                free.append(child)
    stuck = next((number for number, count in enumerate(left) if count), None)
    if stuck is None:
        return []
    # Each that is left has a parent that is left: whoever goes up comes to a node for the second time.
    seen: dict[int, int] = {}
    path: list[int] = []
    while stuck not in seen:
        seen[stuck] = len(path)
        path.append(stuck)
        stuck = next(parent for parent in nodes[stuck].needs if left[parent])
    cycle = path[seen[stuck] :]
    return [*reversed(cycle), cycle[-1]]


class _Parents:
    """What became of the parents of one node, so far."""

    __slots__ = ("failed", "left", "succeeded")

    def __init__(self, left: int) -> None:
        self.left, self.succeeded, self.failed = left, 0, 0

    def note(self, end: End) -> None:
        self.left -= 1
        self.succeeded += end is End.SUCCEEDED
        self.failed += end in (End.FAILED, End.UPSTREAM_FAILED)


def _move(node: Node, parents: _Parents) -> Move | None:
    """What is to be done with a node whose parents stand like this; None: that is not decided yet."""
    is_over, has_failure = not parents.left, parents.failed > 0
    if not node.needs:
        return Move.RUN
    match node.join:
        case Join.ALL_DONE:
            return Move.RUN if is_over else None
        case Join.ONE_FAILED:
            return Move.RUN if has_failure else Move.SKIP if is_over else None
        case Join.ONE_SUCCEEDED | Join.AT_LEAST:
            wanted = 1 if node.join is Join.ONE_SUCCEEDED else node.at_least
            if parents.succeeded >= wanted:
                return Move.RUN
            if parents.succeeded + parents.left >= wanted:
                return None
            return Move.FAIL if has_failure else Move.SKIP if is_over else None
    if has_failure:
        return Move.FAIL
    if not is_over:
        return None
    is_wanted = {
        Join.ALL_SUCCEEDED: parents.succeeded == len(node.needs),
        Join.NONE_FAILED: True,
        Join.NONE_FAILED_ONE_SUCCEEDED: parents.succeeded > 0,
    }
    return Move.RUN if is_wanted[node.join] else Move.SKIP


class Progress:
    """What became of the nodes of a graph so far. Each node is moved once, whatever comes in which order, or twice."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        """`nodes` have passed `check`."""
        self._nodes = nodes
        self._children = children_of(nodes)
        self._parents = [_Parents(len(node.needs)) for node in nodes]
        self._ends: dict[int, End] = {}
        self._moved: set[int] = set()
        self._to_note: deque[int] = deque()

    def begin(self) -> Iterator[int]:
        """The nodes that need no others: they are to run."""
        for number, node in enumerate(self._nodes):
            if not node.needs:
                self._moved.add(number)
                yield number

    def resume(self, moved: Iterable[int]) -> Iterator[int]:
        """After a load: these nodes were moved before. Of those that need no others the rest is to run."""
        self._moved.update(moved)
        return (number for number, node in enumerate(self._nodes) if not node.needs and number not in self._moved)

    def ended(self, number: int, end: End) -> Iterator[tuple[int, Move]]:
        """A node has ended: which nodes are moved by that, and how. Those that are not to run have ended as well."""
        self._end(number, end)
        while self._to_note:
            parent = self._to_note.popleft()
            for child in self._children[parent]:
                self._parents[child].note(self._ends[parent])
                move = None if child in self._moved else _move(self._nodes[child], self._parents[child])
                if move is None:
                    continue
                self._moved.add(child)
                if move is not Move.RUN:
                    self._end(child, End.UPSTREAM_FAILED if move is Move.FAIL else End.SKIPPED)
                yield child, move

    def _end(self, number: int, end: End) -> None:
        if number not in self._ends:
            self._ends[number] = end
            self._to_note.append(number)

    @property
    def ends(self) -> Mapping[int, End]:
        """What became of those that have ended, by number."""
        return self._ends

    def is_over(self) -> bool:
        """Whether all nodes have ended."""
        return len(self._ends) == len(self._nodes)

    def has_failed(self) -> bool:
        """Whether a last node, one that no other needs, failed or could not run since something before it had."""
        failures = (End.FAILED, End.UPSTREAM_FAILED)
        return any(end in failures and not self._children[number] for number, end in self._ends.items())
