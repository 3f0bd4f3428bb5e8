"""How much each priority gets of what is short: windows in a shard, slots in a worker. Pure."""

from __future__ import annotations

from typing import NamedTuple

from schemas.messages import Priority

PRIORITIES = (Priority.HIGH, Priority.MEDIUM, Priority.LOW)
WEIGHT_MAX = 1_000


class Weights(NamedTuple):
    """Of a hundred choices while all three wait, so many of each; any numbers from 1 to WEIGHT_MAX will do."""

    high: int = 70
    medium: int = 25
    low: int = 5

    def problem(self) -> str | None:
        """What is not allowed of them."""
        for name, weight in self._asdict().items():
            if not 1 <= weight <= WEIGHT_MAX:
                return f"{name} {weight!r} is not allowed; from 1 to {WEIGHT_MAX}"
        return None


DEFAULT_WEIGHTS = Weights()


class WeightedChoice:
    """Smooth weighted round robin: over any run of choices each candidate gets its share; none starves.

    The method of nginx's upstream balancer (2012): credits grow by weight, the richest is taken and pays the total.
    """

    def __init__(self, weights: Weights = DEFAULT_WEIGHTS) -> None:
        self._weights = dict(zip(PRIORITIES, weights, strict=True))
        self._credits = dict.fromkeys(PRIORITIES, 0)

    def choose(self, candidates: list[Priority]) -> Priority:
        """One of `candidates` (not empty)."""
        if len(candidates) == 1:
            return candidates[0]
        credits, weights = self._credits, self._weights
        for candidate in candidates:
            credits[candidate] += weights[candidate]
        best = max(candidates, key=credits.__getitem__)
        credits[best] -= sum(weights[candidate] for candidate in candidates)
        return best
