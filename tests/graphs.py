"""How a node of a workflow ends, told from what became of all its parents: the reference for the join rules."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.core.graph import End, Node
from schemas.messages import JoinRule

FAILURES = (End.FAILED, End.UPSTREAM_FAILED)


def wanted_of(node: Node, parents: Sequence[End]) -> End | None:
    """How a node ends that is not run; None: it is run."""
    failed, succeeded = any(end in FAILURES for end in parents), list(parents).count(End.SUCCEEDED)
    runs = {
        JoinRule.ALL_SUCCEEDED: succeeded == len(parents),
        JoinRule.NONE_FAILED: not failed,
        JoinRule.NONE_FAILED_ONE_SUCCEEDED: not failed and succeeded > 0,
        JoinRule.ONE_SUCCEEDED: succeeded > 0,
        JoinRule.AT_LEAST: succeeded >= node.at_least,
        JoinRule.ONE_FAILED: failed,
        JoinRule.ALL_DONE: True,
    }
    if not parents or runs[node.join]:
        return None
    return End.UPSTREAM_FAILED if failed and node.join is not JoinRule.ONE_FAILED else End.SKIPPED
