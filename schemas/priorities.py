"""How much each priority gets of what is short: windows in a shard, slots in a worker. Pure."""

from __future__ import annotations

from schemas.messages import Priority

WEIGHTS = {Priority.HIGH: 70, Priority.MEDIUM: 25, Priority.LOW: 5}


class WeightedChoice:
    """Smooth weighted round robin: over any run of choices each candidate gets its share; none starves.

    The method of nginx's upstream balancer (2012): credits grow by weight, the richest is taken and pays the total.
    """

    def __init__(self) -> None:
        self._credits = dict.fromkeys(WEIGHTS, 0)

    def choose(self, candidates: list[Priority]) -> Priority:
        """One of `candidates` (not empty)."""
        if len(candidates) == 1:
            return candidates[0]
        credits = self._credits
        for candidate in candidates:
            credits[candidate] += WEIGHTS[candidate]
        best = max(candidates, key=credits.__getitem__)
        credits[best] -= sum(WEIGHTS[candidate] for candidate in candidates)
        return best
