"""The rules of the surface for limits: what may be declared, and what is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import Field

from scheduler.core.limit_keys import LimitProblem, limit_of, name_of
from scheduler.instants import format_instant
from scheduler.operations import Operation, Performer, Steps, at_once, refusing_errors
from scheduler.ports import Clock
from scheduler.queue_service import Board, check_name, said
from scheduler.queue_stats import LimitAmount
from scheduler.refusals import Refusal, RefusalKind, Refused, invalid
from scheduler.submission import Body, Duration, ms_of, validated
from schemas.messages import LimitPolicy, LimitStrategy

T = TypeVar("T")

KEYS_SHOWN = 20


class LimitDeclaration(Body):
    """A limit: how many attempts may start in a period, or run at a time."""

    count: int = Field(description="So many starts in a period; without one, so many attempts at a time.")
    period_seconds: Duration | None = Field(None, description="The period; absent: how many may run at a time.")
    burst: int | None = Field(
        None, description="How many may start at once after a rest; absent: what comes in a tenth of a second, or one."
    )
    key: str | None = Field(
        None,
        description="By what it counts: a template, each rendering of which has its own limit; absent: all together. "
        "Fields are task_type, queue, tenant_id, priority and metadata.<name>.",
        examples=["{tenant_id}/{metadata.region}"],
    )
    where: dict[str, str] | None = Field(
        None,
        description="Which tasks it concerns: fields, and the values they must have; absent: all.",
        examples=[{"queue": "mail"}],
    )
    strategy: Literal["wait", "cancel_oldest", "reject"] | None = Field(
        None,
        description="What is done with one more than may run at a time: it waits, the oldest is cancelled, or it is.",
    )


class LimitKeyView(msgspec.Struct, frozen=True, kw_only=True):
    """One rendering of a limit's template: how many tasks wait for it, and how many attempts hold something of it."""

    key: str
    waiting: int
    held: int


class LimitView(msgspec.Struct, frozen=True, kw_only=True):
    """A limit as it holds. `burst` null: of concurrency. Instants are RFC 3339 text in UTC.

    `waiting` tasks wait for it, `held` attempts hold a permit, or a token of which it is not known yet that it is used;
    both as of a second ago, of up to a hundred keys of each shard. `keys` are those for which most wait, 20 at most.
    """

    name: str
    count: int
    period_seconds: float | None
    burst: int | None
    key: str
    where: Mapping[str, str]
    strategy: LimitStrategy
    set_at: str
    waiting: int
    held: int
    keys: Sequence[LimitKeyView]


class LimitList(msgspec.Struct, frozen=True, kw_only=True):
    """All limits, by name."""

    limits: Sequence[LimitView]


class LimitService:
    """What can be asked of limits."""

    def __init__(self, performer: Performer, board: Board, *, clock: Clock) -> None:
        self._performer, self._board, self._clock = performer, board, clock

    def limit(self, name: str) -> Operation[LimitView]:
        """How a limit stands."""
        return self._operation(at_once(lambda: self._view(self._known(name))))

    def limits(self) -> Operation[LimitList]:
        """All limits."""
        return self._operation(at_once(self._limits))

    def set_limit(self, name: str, declaration: LimitDeclaration) -> Operation[LimitView]:
        """Let a limit hold from now on, also for what waits already. The same one again changes nothing."""
        return self._operation(self._set(name, declaration))

    def remove_limit(self, name: str) -> Operation[None]:
        """Let a limit hold no more."""
        return self._operation(self._remove(name))

    def _operation(self, steps: Steps[T]) -> Operation[T]:
        return Operation(self._performer, refusing_errors(steps))

    def _known(self, name: str) -> LimitPolicy:
        check_name("name", name)
        found = self._board.policies.limit(name)
        if found is None:
            raise Refused(Refusal(RefusalKind.NOT_FOUND, f"there is no limit {name}"))
        return found

    def _set(self, name: str, declaration: LimitDeclaration) -> Steps[LimitView]:
        wanted = declared_limit(name, declaration, self._clock.now_us())
        before = self._board.policies.limit(name)
        if before is None or msgspec.structs.replace(before, set_at=wanted.set_at) != wanted:
            yield from said(self._board, wanted)
        return self._view(self._known(name))

    def _limits(self) -> LimitList:
        amounts = self._amounts()
        return LimitList(limits=[_view(one, amounts.get(one.name, ())) for one in self._board.policies.limits()])

    def _view(self, policy: LimitPolicy) -> LimitView:
        return _view(policy, self._amounts().get(policy.name, ()))

    def _amounts(self) -> Mapping[str, Sequence[LimitAmount]]:
        found: dict[str, list[LimitAmount]] = {}
        for one in self._board.amounts().limits:
            found.setdefault(name_of(one.key), []).append(one)
        return found

    def _remove(self, name: str) -> Steps[None]:
        found = self._known(name)
        gone = msgspec.structs.replace(found, is_removed=True, set_at=self._clock.now_us())
        yield from said(self._board, gone)


def declaration_of(fields: Mapping[str, Any]) -> LimitDeclaration:
    """The declaration with these fields. Refused: something of it is not allowed."""
    return validated(LimitDeclaration, fields)


def declared_limit(name: str, declaration: LimitDeclaration, now: int) -> LimitPolicy:
    """The policy of a declaration. Refused: something of it is not allowed, with the field and what is."""
    policy = LimitPolicy(
        name=name,
        set_at=now,
        count=declaration.count,
        key=declaration.key or "",
        where=declaration.where or {},
        period_ms=ms_of(declaration.period_seconds),
        burst=declaration.burst,
        strategy=LimitStrategy(declaration.strategy or "wait"),
    )
    try:
        limit_of(policy)
    except LimitProblem as problem:
        field = {"period_ms": "period_seconds"}.get(problem.field, problem.field)
        raise invalid(field, problem.problem, problem.allowed) from problem
    return policy


def _view(policy: LimitPolicy, amounts: Sequence[LimitAmount]) -> LimitView:
    rule = limit_of(policy).rule
    ranked = sorted(amounts, key=lambda one: (-one.waiting, -one.held, one.key))
    return LimitView(
        name=policy.name,
        count=policy.count,
        period_seconds=None if policy.period_ms is None else policy.period_ms / 1_000,
        burst=getattr(rule, "burst", None),
        key=policy.key,
        where=policy.where,
        strategy=policy.strategy,
        set_at=format_instant(policy.set_at),
        waiting=sum(one.waiting for one in amounts),
        held=sum(one.held for one in amounts),
        keys=[
            LimitKeyView(key=one.key.partition("/")[2], waiting=one.waiting, held=one.held)
            for one in ranked[:KEYS_SHOWN]
        ],
    )
