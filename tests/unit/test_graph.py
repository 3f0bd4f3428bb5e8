"""Which graphs can run, and what becomes of each node, in whatever order others end (C23, C25, C26)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from scheduler.core.graph import End, GraphProblem, Move, Node, Progress, check, numbered
from schemas.messages import JoinRule as Join
from tests.graphs import wanted_of

S, F, X, U = End.SUCCEEDED, End.FAILED, End.SKIPPED, End.UPSTREAM_FAILED
RUN, FAIL, SKIP = Move.RUN, Move.FAIL, Move.SKIP


def graph(**needs: str) -> list[Node]:
    """Nodes by name, each with the names that it needs."""
    names = list(needs)
    return [Node(*pair) for pair in zip(names, numbered(names, [text.split() for text in needs.values()]), strict=True)]


def problem(names: Sequence[str], needs: Sequence[Sequence[str]]) -> GraphProblem:
    with pytest.raises(GraphProblem) as caught:
        check([Node(*pair) for pair in zip(names, numbered(names, needs), strict=True)])
    return caught.value


# --- C23 --------------------------------------------------------------------------------------------------------------


def test_c23_graphs_that_cannot_run_are_refused_with_the_names() -> None:
    cycle = problem("abc", ["c", "a", "b"])
    assert cycle.problem in {f"these wait for each other: {' -> '.join(path)}" for path in ("abca", "bcab", "cabc")}
    assert problem("a", ["a"]).problem == "these wait for each other: a -> a"
    unknown = problem("ab", ["", ["zz"]])
    assert (unknown.node, unknown.field, unknown.problem) == (1, "dependencies", "'b' needs 'zz', which is not there")
    taken = problem("aa", ["a", ""])
    assert (taken.node, taken.problem) == (1, "'a' is the name of task 0 and of task 1")
    assert problem("", []).problem == "there is no task"


def test_a_cycle_is_told_without_what_leads_to_it() -> None:
    told = problem("abcde", ["", "a", ["b", "d"], "c", "d"]).problem
    assert told in {"these wait for each other: c -> d -> c", "these wait for each other: d -> c -> d"}


def test_a_parent_that_is_listed_twice_counts_once() -> None:
    nodes = graph(a="", b="a a")
    assert nodes[1].needs == (0,)
    assert list(Progress(nodes).ended(0, S)) == [(1, RUN)]


def test_c23_large_graphs_are_checked_without_recursion_and_each_edge_once() -> None:
    chain = [Node(str(number), (number - 1,) if number else ()) for number in range(10_000)]
    layers = [
        Node(f"{layer}-{place}", tuple(range((layer - 1) * 100, layer * 100)) if layer else ())
        for layer in range(100)
        for place in range(100)
    ]
    join = [*(Node(str(number)) for number in range(27)), Node("join", tuple(range(27)))]
    begun_s = time.process_time()
    for nodes in (chain, layers, join):
        check(nodes)
    print("seconds", time.process_time() - begun_s)  # noqa: T201
    closed = [chain[0]._replace(needs=(9_999,)), *chain[1:]]
    with pytest.raises(GraphProblem, match=r"… \(10000 tasks\)"):
        check(closed)


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(GraphProblem, match="there are 10,001 tasks; at most 10,000 are allowed"):
        check([Node(str(number)) for number in range(10_001)])


@pytest.mark.parametrize("at_least", [0, 3])
def test_a_number_that_cannot_come_about_is_refused(at_least: int) -> None:
    with pytest.raises(GraphProblem, match=f"'c' asks for {at_least}; allowed is from 1 to its 2 dependencies"):
        check([Node("a"), Node("b"), Node("c", (0, 1), Join.AT_LEAST, at_least)])
    with pytest.raises(GraphProblem, match="waits for a failure"):
        check([Node("a", (), Join.ONE_FAILED)])


# --- C25 --------------------------------------------------------------------------------------------------------------

TABLE = {  # of two parents, in any order
    Join.ALL_SUCCEEDED: {"SS": RUN, "SF": FAIL, "SX": SKIP, "FF": FAIL, "FX": FAIL, "XX": SKIP},
    Join.NONE_FAILED: {"SS": RUN, "SF": FAIL, "SX": RUN, "FF": FAIL, "FX": FAIL, "XX": RUN},
    Join.NONE_FAILED_ONE_SUCCEEDED: {"SS": RUN, "SF": FAIL, "SX": RUN, "FF": FAIL, "FX": FAIL, "XX": SKIP},
    Join.ONE_SUCCEEDED: {"SS": RUN, "SF": RUN, "SX": RUN, "FF": FAIL, "FX": FAIL, "XX": SKIP},
    Join.ONE_FAILED: {"SS": SKIP, "SF": RUN, "SX": SKIP, "FF": RUN, "FX": RUN, "XX": SKIP},
    Join.ALL_DONE: {"SS": RUN, "SF": RUN, "SX": RUN, "FF": RUN, "FX": RUN, "XX": RUN},
}
ENDS = {"S": S, "F": F, "X": X}


@pytest.mark.parametrize(
    ("join", "pair", "move"), [(join, *row) for join, rows in TABLE.items() for row in rows.items()]
)
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("failure", [F, U])
def test_c25_the_table_holds_in_both_orders(join: Join, pair: str, move: Move, is_turned: bool, failure: End) -> None:
    progress = Progress([Node("b"), Node("c"), Node("d", (0, 1), join)])
    ends = [failure if one == "F" else ENDS[one] for one in pair]
    moves: list[tuple[int, Move]] = []
    for number in (1, 0) if is_turned else (0, 1):
        moves += progress.ended(number, ends[number])
    assert moves == [(2, move)]
    if move is RUN:
        list(progress.ended(2, S))
    assert progress.is_over()


def test_n_of_m_runs_at_the_nth_and_fails_once_there_cannot_be_so_many() -> None:
    nodes = [*(Node(str(number)) for number in range(4)), Node("join", (0, 1, 2, 3), Join.AT_LEAST, 2)]
    progress = Progress(nodes)
    assert [list(progress.ended(number, end)) for number, end in enumerate((F, S, S, F))] == [[], [], [(4, RUN)], []]
    progress = Progress(nodes)
    assert [list(progress.ended(number, end)) for number, end in enumerate((F, X, X, S))] == [[], [], [(4, FAIL)], []]
    progress = Progress(nodes)
    assert [list(progress.ended(number, end)) for number, end in enumerate((X, X, X, S))] == [[], [], [], [(4, SKIP)]]


def test_a_failure_goes_down_to_all_that_ask_for_success_and_no_further() -> None:
    nodes = graph(a="", b="a", c="b", d="c", other="", handler="c", last="d")
    nodes[5] = nodes[5]._replace(join=Join.ONE_FAILED)
    progress = Progress(nodes)
    assert list(progress.begin()) == [0, 4]
    assert dict(progress.ended(0, F)) == {1: FAIL, 2: FAIL, 3: FAIL, 5: RUN, 6: FAIL}
    assert not progress.is_over()
    list(progress.ended(4, S))
    list(progress.ended(5, S))
    assert progress.is_over() and progress.has_failed()


def test_a_failure_that_something_was_done_about_is_none_of_the_workflow() -> None:
    progress = Progress([Node("a"), Node("handler", (0,), Join.ONE_FAILED)])
    assert list(progress.ended(0, F)) == [(1, RUN)]
    list(progress.ended(1, S))
    assert progress.is_over() and not progress.has_failed()


# --- C26 --------------------------------------------------------------------------------------------------------------


def test_c26_a_join_is_moved_once_whoever_ends_twice() -> None:
    nodes = [*(Node(str(number)) for number in range(100)), Node("join", tuple(range(100)))]
    rng = Random(7)
    for _ in range(100):
        progress, ends = Progress(nodes), [*range(100), *rng.choices(range(100), k=20)]
        rng.shuffle(ends)
        moves = [move for number in ends for move in progress.ended(number, S)]
        assert moves == [(100, RUN)]


def test_random_graphs_end_as_the_rules_say_in_any_order() -> None:
    """Against a reference that decides each node once all its parents have ended."""
    seed = Random().getrandbits(32)
    print("seed", seed)  # noqa: T201
    rng = Random(seed)
    for _ in range(300):
        nodes = list(_random(rng))
        check(nodes)
        wanted = {number: rng.choice((S, S, F, X)) for number in range(len(nodes))}
        expected = reference(nodes, wanted)
        assert played(nodes, wanted, rng) == expected


def _random(rng: Random) -> Iterable[Node]:
    for number in range(rng.randrange(1, 14)):
        needs = tuple(rng.sample(range(number), rng.randrange(min(number, 4) + 1)))
        join = rng.choice([one for one in Join if one is not Join.UNKNOWN]) if needs else Join.ALL_SUCCEEDED
        yield Node(str(number), needs, join, rng.randrange(1, len(needs) + 1) if join is Join.AT_LEAST else 0)


def played(nodes: Sequence[Node], wanted: dict[int, End], rng: Random) -> dict[int, End]:
    progress = Progress(nodes)
    running = list(progress.begin())
    while running:
        number = running.pop(rng.randrange(len(running)))
        running += [child for child, move in progress.ended(number, wanted[number]) if move is RUN]
    assert progress.is_over()
    return dict(progress.ends)


def reference(nodes: Sequence[Node], wanted: dict[int, End]) -> dict[int, End]:
    ends: dict[int, End] = {}
    for number, node in enumerate(nodes):
        ends[number] = wanted_of(node, [ends[parent] for parent in node.needs]) or wanted[number]
    return ends


def test_all_orders_of_a_diamond_come_to_the_same() -> None:
    nodes = graph(a="", b="a", c="a", d="b c")
    for ends in itertools.product((S, F, X), repeat=4):
        wanted = dict(enumerate(ends))
        assert len({tuple(sorted(played(nodes, wanted, Random(seed)).items())) for seed in range(8)}) == 1
