"""What the home of a limit's key knows: who holds a grant, how full the bucket is, who asks. Pure.

A limit is about attempts. A **rate** lends a token to an attempt, and takes it for used when it hears of the start; a
**concurrency** lends a permit until it hears of the end. Held, used and given back are facts of the home's log:
`grant` and `give_back` fold them. Who asks is not: whoever still wants something asks again.

**Why the bucket is exact.** Let attempts start at s_i, and the home hear of it at c_i >= s_i. What is held and not yet
heard of counts as taken when a grant is decided, and refills from c_i on, not from the grant. Take any interval that
begins with a start at s_a and has the length T, and the last start s_b in it, granted at g_b <= s_b. At s_a the level
was at most the burst, and none of a..b was taken off it before, since c_i >= s_i >= s_a. At g_b all of them are taken off,
or held. So b - a + 1 <= burst + rate * (g_b - s_a) <= burst + rate * T, however long messages are under way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from scheduler.core.fairness import FairQueue, equal_weights
from schemas.messages import Priority
from schemas.priorities import WEIGHTS

_ALL = tuple(WEIGHTS)


class Rate(NamedTuple):
    """So many starts in a period, and so many at once after a rest."""

    count: int
    period_us: int
    burst: int


class Concurrency(NamedTuple):
    """So many attempts at a time."""

    count: int


Rule = Rate | Concurrency
RuleOf = Callable[[str], Rule | None]  # of a key; None: there is no such limit any more, so that all may go


class Wish(NamedTuple):
    """An attempt that waits for a grant."""

    attempt: str
    priority: Priority


class Grant(NamedTuple):
    """Attempts of a shard that may go, as far as one key is concerned."""

    key: str
    shard: int
    attempts: tuple[str, ...]


class Held(NamedTuple):
    """A key as checkpoints keep it. `level` is in tokens times `period_us`, at the instant `at`; 0 of a concurrency."""

    key: str
    holders: dict[str, int]  # the shard of each attempt
    level: int
    period_us: int
    at: int


class _Bucket:
    """How many tokens there are, in units of which a token has `period_us`: whole numbers, without rounding."""

    __slots__ = ("at", "level", "period_us")

    def __init__(self, rate: Rate, now: int) -> None:
        self.period_us = rate.period_us
        self.level = rate.burst * rate.period_us
        self.at = now

    def fill(self, rate: Rate, now: int) -> int:
        """Add what came since; how many units there are. A clock that went back adds nothing."""
        if rate.period_us != self.period_us:  # the limit was changed
            self.level = self.level * rate.period_us // self.period_us
            self.period_us = rate.period_us
        if now > self.at:
            self.level += (now - self.at) * rate.count
            self.at = now
        self.level = min(self.level, rate.burst * rate.period_us)
        return self.level


class _Key:
    """One key of a limit."""

    __slots__ = ("bucket", "holders", "wishes", "wishes_of")

    def __init__(self) -> None:
        self.holders: dict[str, int] = {}  # oldest first
        self.bucket: _Bucket | None = None
        self.wishes = FairQueue()
        self.wishes_of: dict[int, tuple[Wish, ...]] = {}

    def is_idle(self) -> bool:
        return not self.holders and not self.wishes and self.bucket is None


class Limiter:
    """All keys that have their home in a shard."""

    def __init__(self, rule_of: RuleOf) -> None:
        self._rule_of = rule_of
        self._keys: dict[str, _Key] = {}
        self._open: set[str] = set()  # keys to be looked at
        self._due: list[tuple[int, str]] = []  # a heap: when a token will be there

    # --- facts ---------------------------------------------------------------------------------------------------

    def grant(self, grant: Grant, now: int) -> None:
        """Attempts hold a grant from now on."""
        key = self._key(grant.key)
        rule = self._rule_of(grant.key)
        if isinstance(rule, Rate) and key.bucket is None:
            key.bucket = _Bucket(rule, now)
        for attempt in grant.attempts:
            key.holders[attempt] = grant.shard
            key.wishes.remove(attempt)

    def give_back(self, name: str, attempts: Iterable[str], now: int, *, is_used: bool) -> list[str]:
        """Attempts hold none any more; which of them did. With `is_used` they have started."""
        key = self._keys.get(name)
        if key is None:
            return []
        gone = [attempt for attempt in attempts if key.holders.pop(attempt, None) is not None]
        rule = self._rule_of(name)
        if is_used and isinstance(rule, Rate) and key.bucket is not None:
            key.bucket.fill(rule, now)
            key.bucket.level -= len(gone) * rule.period_us
        self._open.add(name)
        return gone

    # --- wishes ---------------------------------------------------------------------------------------------------

    def ask(self, name: str, shard: int, wishes: Sequence[Wish]) -> list[str]:
        """What a shard wants of a key now, in its order, instead of what it wanted before; what it has already."""
        key = self._key(name)
        for wish in key.wishes_of.pop(shard, ()):
            key.wishes.remove(wish.attempt)
        wanted = tuple({wish.attempt: wish for wish in wishes if wish.attempt not in key.holders}.values())
        for wish in wanted:
            key.wishes.put(wish.attempt, wish.priority, str(shard), 0)
        if wanted:
            key.wishes_of[shard] = wanted
        self._open.add(name)
        return [wish.attempt for wish in wishes if wish.attempt in key.holders]

    def decide(self, now: int) -> list[Grant]:
        """What can be granted now. It is not yet: fold it with `grant` before the next call."""
        while self._due and self._due[0][0] <= now:
            self._open.add(heapq.heappop(self._due)[1])
        grants: list[Grant] = []
        names, self._open = sorted(self._open), set()
        for name in names:
            if (key := self._keys.get(name)) is not None:
                grants += self._decide(name, key, now)
                if key.is_idle():
                    del self._keys[name]
        return grants

    def next_at(self) -> int | None:
        """When `decide` may find something without any news."""
        if self._open:
            return 0
        return self._due[0][0] if self._due else None

    def _decide(self, name: str, key: _Key, now: int) -> Iterator[Grant]:
        room = self._room(name, key, now)
        granted: dict[int, list[str]] = {}
        while room > 0 and (chosen := key.wishes.pop(_ALL, equal_weights)) is not None:
            granted.setdefault(int(chosen.tenant_id), []).append(chosen.task_id)
            room -= 1
        return (Grant(name, shard, tuple(attempts)) for shard, attempts in granted.items())

    def _room(self, name: str, key: _Key, now: int) -> int:
        rule, held = self._rule_of(name), len(key.holders)
        if rule is None:
            key.bucket = None
            return len(key.wishes)
        if isinstance(rule, Concurrency):
            key.bucket = None  # it may have been a rate before
            return max(0, rule.count - held)
        if key.bucket is None:
            return max(0, rule.burst - held)
        level = key.bucket.fill(rule, now)
        if level == rule.burst * rule.period_us and not held:
            key.bucket = None  # as if there had been none
        room = max(0, level // rule.period_us - held)
        missing = (held + room + 1) * rule.period_us - level
        is_filling = held + room < rule.burst  # else the next token comes when one that is held is used, or given back
        if len(key.wishes) > room and is_filling:
            heapq.heappush(self._due, (now + -(-missing // rule.count), name))
        return room

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def held(self, name: str) -> Held | None:
        """A key as a checkpoint is to keep it; None: it is as if nobody had ever asked."""
        key = self._keys.get(name)
        if key is None or (not key.holders and key.bucket is None):
            return None
        bucket = key.bucket
        level, period_us, at = (bucket.level, bucket.period_us, bucket.at) if bucket else (0, 0, 0)
        return Held(name, dict(key.holders), level, period_us, at)

    def restore(self, held: Held) -> None:
        """Take a key from a checkpoint."""
        key = self._key(held.key)
        key.holders = dict(held.holders)
        if held.period_us:
            key.bucket = _Bucket(Rate(0, held.period_us, 0), held.at)
            key.bucket.level = held.level

    def holders(self, shard: int) -> Iterator[tuple[str, list[str]]]:
        """What a shard holds, by key."""
        for name, key in self._keys.items():
            attempts = [attempt for attempt, of in key.holders.items() if of == shard]
            if attempts:
                yield name, attempts

    def _key(self, name: str) -> _Key:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key()
        return key
