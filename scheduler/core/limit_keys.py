"""What a limit is about: which tasks it concerns, and under which key each of them counts. Pure.

A limit says `where` it holds (fields and the values they must have) and by what it counts: a template such as
`{tenant_id}/{metadata.region}`, of which each rendering has its own limit. A task without one of the fields is not
concerned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from string import Formatter
from typing import NamedTuple

from schemas.ids import NAME_RULE, is_name, murmur2
from schemas.messages import LimitPolicy, LimitStrategy, TaskSpec

COUNT_MAX = 1_000_000
HELD_MAX = 5_000  # permits, or tokens at once: all that is held of a key is one record of a checkpoint
PERIOD_MS_MAX = 31 * 86_400_000
KEYS_CACHED = 100_000  # of which the home need not be computed again
KEY_MAX = 200  # characters of a rendered key; a longer one is replaced by its digest
TEMPLATE_MAX = 256
FIELDS_RULE = "task_type, queue, tenant_id, priority and metadata.<name>"
BURST_SHARE = 10  # a rate without a burst has what comes in a tenth of a second, at least one and at most HELD_MAX

Field = Callable[[TaskSpec], str | None]


class Rate(NamedTuple):
    """So many starts in a period, and so many at once after a rest."""

    tokens: int
    period_us: int
    burst: int


class Concurrency(NamedTuple):
    """So many attempts at a time, and what is done when one more comes."""

    permits: int
    strategy: LimitStrategy = LimitStrategy.WAIT


Rule = Rate | Concurrency


class Limit(NamedTuple):
    """A limit, ready for use."""

    name: str
    rule: Rule
    where: Sequence[tuple[Field, str]]
    key: Sequence[tuple[str, Field | None]]  # literal text, and the field behind it

    def key_of(self, spec: TaskSpec) -> str | None:
        """Under which key a task counts; None: the limit does not concern it."""
        if any(field(spec) != value for field, value in self.where):
            return None
        parts: list[str] = []
        for text, field in self.key:
            parts.append(text)
            if field is not None:
                value = field(spec)
                if value is None:
                    return None
                parts.append(value)
        rendered = "".join(parts)
        if len(rendered) > KEY_MAX:
            rendered = hashlib.sha256(rendered.encode()).hexdigest()
        return f"{self.name}/{rendered}"


class LimitProblem(ValueError):
    """What of a limit is not allowed: the field, and why."""

    def __init__(self, field: str, problem: str, allowed: str) -> None:
        super().__init__(f"{field} {problem}; allowed: {allowed}")
        self.field, self.problem, self.allowed = field, problem, allowed


def name_of(key: str) -> str:
    """The limit that a key belongs to."""
    return key.partition("/")[0]


@lru_cache(KEYS_CACHED)
def home_of(key: str, shards: int) -> int:
    """The shard that decides on a key."""
    return (murmur2(key.encode()) & 0x7FFF_FFFF) % shards


def limit_of(policy: LimitPolicy) -> Limit:
    """Make a policy usable. Raises LimitProblem."""
    if not is_name(policy.name):
        raise LimitProblem("name", "is not accepted", NAME_RULE)
    return Limit(policy.name, _rule_of(policy), _where_of(policy.where), _template_of(policy.key))


def _rule_of(policy: LimitPolicy) -> Rule:
    _check_range("count", policy.count, 1, HELD_MAX if policy.period_ms is None else COUNT_MAX)
    if policy.period_ms is None:
        if policy.burst is not None:
            raise LimitProblem("burst", "is for rates", "none without period_ms")
        if policy.strategy is LimitStrategy.UNKNOWN:
            raise LimitProblem("strategy", "is not known here", ", ".join(STRATEGIES))
        return Concurrency(policy.count, policy.strategy)
    _check_range("period_ms", policy.period_ms, 1, PERIOD_MS_MAX)
    if policy.strategy is not LimitStrategy.WAIT:
        raise LimitProblem("strategy", "is for limits of concurrency", "wait, with period_ms")
    burst = policy.burst
    if burst is None:
        burst = min(HELD_MAX, max(1, policy.count * 1_000 // (policy.period_ms * BURST_SHARE)))
    _check_range("burst", burst, 1, HELD_MAX)
    return Rate(policy.count, policy.period_ms * 1_000, burst)


STRATEGIES = tuple(one.value for one in LimitStrategy if one is not LimitStrategy.UNKNOWN)


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LimitProblem(field, f"is {value}", f"{low:,} to {high:,}")


def _where_of(where: Mapping[str, str]) -> Sequence[tuple[Field, str]]:
    return tuple((_field_of("where", name), value) for name, value in where.items())


def _template_of(template: str) -> Sequence[tuple[str, Field | None]]:
    if len(template) > TEMPLATE_MAX:
        raise LimitProblem("key", f"has {len(template)} characters", f"at most {TEMPLATE_MAX}")
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise LimitProblem("key", f"cannot be read: {error}", "text with {fields} in it") from None
    found: list[tuple[str, Field | None]] = []
    for text, name, spec, conversion in parts:
        if spec or conversion:
            raise LimitProblem("key", "has a format", "text with {fields} in it")
        found.append((text, None if name is None else _field_of("key", name)))
    return tuple(found)


def _field_of(where: str, name: str) -> Field:
    kind, _, rest = name.partition(".")
    if kind == "metadata" and rest:
        return lambda spec: spec.metadata.get(rest)
    found = _FIELDS.get(name)
    if found is None:
        raise LimitProblem(where, f"names the field {name!r}", FIELDS_RULE)
    return found


_FIELDS: Mapping[str, Field] = {
    "task_type": lambda spec: spec.task_type,
    "queue": lambda spec: spec.queue,
    "tenant_id": lambda spec: spec.tenant_id,
    "priority": lambda spec: spec.priority.value,
}
