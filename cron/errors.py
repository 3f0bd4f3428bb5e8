"""The one way in which a schedule is refused."""

from __future__ import annotations


class InvalidSchedule(ValueError):
    """A part of a schedule is wrong: which, why, and what is allowed instead.

    `position` is the place in the expression's text, from 0, where the wrong part begins; None for other parts.
    """

    def __init__(self, field: str, problem: str, allowed: str | None = None, *, position: int | None = None) -> None:
        place = "" if position is None else f" (at character {position + 1})"
        hint = "" if allowed is None else f"; allowed: {allowed}"
        super().__init__(f"{field}{place} {problem}{hint}")
        self.field = field
        self.problem = problem
        self.allowed = allowed
        self.position = position
