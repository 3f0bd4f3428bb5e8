"""What the home of a limit's key knows: who holds a grant, how full the bucket is, who asks. Pure.

A limit is about attempts. A **rate** lends a token to an attempt, and takes it for used when it hears of the start; a
**concurrency** lends a permit until it hears of the end. Held, used and given back are facts of the home's log, which
`fold` takes in. Who asks is not: whoever still wants something asks again.

**Why the bucket is exact.** Let attempts start at s_i, and the home hear of it at c_i >= s_i. What is held and not yet
heard of counts as taken when a grant is decided, and refills from c_i on, not from the grant. Take any interval that
begins with a start at s_a and has the length T, and the last start s_b in it, granted at g_b <= s_b. At s_a the level
was at most the burst, and none of a..b was taken off it before, since c_i >= s_i >= s_a. At g_b all of them are taken
off, or held. So b - a + 1 <= burst + rate * (g_b - s_a) <= burst + rate * T, however long messages are under way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from scheduler.core.fairness import FairQueue, equal_weights
from scheduler.core.limit_keys import Concurrency, Rate, Rule
from scheduler.core.timers import Timers
from schemas.messages import LimitChanged, LimitGrant, LimitHeld, LimitStrategy, LimitWish
from schemas.priorities import PRIORITIES

# Who holds something for so long is asked whether it is still needed; then after twice as long, and so on up to the
# second: for so long at most a permit is lost whose return was lost.
CHECK_US, CHECK_US_MAX = 10_000_000, 300_000_000
_SEPARATOR = "\n"  # between a key and an attempt

CHANGES_MAX = 2_000  # attempts of one kind in one decision: its event must not outgrow a record

RuleOf = Callable[[str], Rule | None]  # of a key; None: there is no such limit, not yet here or no more anywhere


class Decided(NamedTuple):
    """What changed of a key, and whose tasks are to be cancelled for it, each with the shard of its task."""

    key: str
    changed: LimitChanged
    cancelled: Sequence[tuple[int, str]] = ()


class _Bucket:
    """How many tokens there are, in units of which a token has `period_us`: whole numbers, without rounding."""

    __slots__ = ("at", "level", "period_us")

    def __init__(self, level: int, period_us: int, at: int | None) -> None:
        self.level, self.period_us = level, period_us
        self.at = at  # None: what passed before the next instant does not count

    def fill(self, rate: Rate, now: int) -> int:
        """Add what came since; how many units there are. A clock that went back adds nothing."""
        if rate.period_us != self.period_us:  # the limit was changed
            self.level = self.level * rate.period_us // self.period_us
            self.period_us = rate.period_us
        if self.at is not None:
            self.level += max(0, now - self.at) * rate.tokens
        self.at = now
        self.level = min(self.level, rate.burst * rate.period_us)
        return self.level


class _Key:
    """One key of a limit."""

    __slots__ = ("asked", "bucket", "cancelled", "holders", "returned", "used", "wishes")

    def __init__(self, name: str) -> None:
        self.holders: dict[str, int] = {}  # the shard of each, oldest first
        self.bucket: _Bucket | None = None  # None: full
        self.wishes: FairQueue[str] = FairQueue(name, {})
        self.asked: dict[str, int] = {}  # the shard of each wish, oldest first
        self.used: dict[str, None] = {}  # heard of, and not decided yet; in their order
        self.returned: dict[str, None] = {}
        self.cancelled: set[str] = set()  # holders whose tasks are to be cancelled

    def is_idle(self) -> bool:
        return not (self.holders or self.asked or self.bucket)

    def wish(self, shard: int, wish: LimitWish) -> None:
        self.asked[wish.attempt] = shard
        self.wishes.put(wish.attempt, wish.priority, str(shard))

    def unwish(self, attempt: str) -> None:
        if self.asked.pop(attempt, None) is not None:
            self.wishes.remove(attempt)

    def release(self, attempts: Iterable[str]) -> list[str]:
        """Those of them that held something, and do not any more."""
        gone = [attempt for attempt in attempts if self.holders.pop(attempt, None) is not None]
        self.cancelled.difference_update(gone)
        return gone


class Limiter:
    """All keys that have their home in a shard."""

    def __init__(self, rule_of: RuleOf) -> None:
        self._rule_of = rule_of
        self._keys: dict[str, _Key] = {}
        self._open: set[str] = set()  # keys to be looked at
        self.touched: set[str] = set()  # keys that a checkpoint must write or remove; whoever takes one clears it
        self._due = Timers()  # keys, by when a token will be there, or all of them
        self._checks = Timers()  # key and attempt, by when it is asked whether it is still needed
        self._waits: dict[str, int] = {}  # how long was waited for that

    def __len__(self) -> int:
        return len(self._keys)

    # --- facts ---------------------------------------------------------------------------------------------------

    def fold(self, name: str, changed: LimitChanged, at: int) -> None:
        """Take in what was decided, `at` by the clock of whoever did. Once or often: it comes to the same."""
        key, rule = self._key(name), self._rule_of(name)
        if isinstance(rule, Rate):
            if key.bucket is None:
                key.bucket = _Bucket(rule.burst * rule.period_us, rule.period_us, at)
            key.bucket.fill(rule, at)
            used = key.release(changed.used)
            key.bucket.level -= len(used) * rule.period_us
        else:
            used = key.release(changed.used)
        for attempt in (*used, *key.release(changed.returned)):
            self._cancel_check(name, attempt)
        for grant in changed.granted:
            for attempt in grant.attempts:
                key.holders[attempt] = grant.shard
                key.unwish(attempt)
        self.touched.add(name)
        if key.is_idle():
            del self._keys[name]

    def change_clock(self) -> None:
        """What comes next is of another clock: what passed between them is not counted."""
        for key in self._keys.values():
            if key.bucket is not None:
                key.bucket.at = None

    # --- what shards say -----------------------------------------------------------------------------------------

    def ask(self, name: str, shard: int, wishes: Sequence[LimitWish], *, is_whole: bool) -> list[str]:
        """What a shard wants of a key, in its order, more than before or (`is_whole`) instead; what it has already."""
        key = self._key(name)
        if is_whole:
            for attempt in [attempt for attempt, of in key.asked.items() if of == shard]:
                key.unwish(attempt)
        for wish in wishes:
            if wish.attempt not in key.holders and wish.attempt not in key.asked:
                key.wish(shard, wish)
        self._open.add(name)
        return [wish.attempt for wish in wishes if wish.attempt in key.holders]

    def hear(self, name: str, attempts: Iterable[str], *, is_used: bool) -> None:
        """Attempts have started, or hold nothing any more."""
        key = self._keys.get(name)
        if key is not None:
            (key.used if is_used else key.returned).update(dict.fromkeys(attempts))
            self._open.add(name)

    def holds(self, name: str, attempt: str) -> bool:
        """Whether an attempt holds something, and nobody has said that it does not any more."""
        key = self._keys.get(name)
        return key is not None and attempt in key.holders and attempt not in key.used and attempt not in key.returned

    def forget_wishes(self, shard: int) -> None:
        """A shard has a new owner, who asks anew."""
        for name, key in self._keys.items():
            for attempt in [attempt for attempt, of in key.asked.items() if of == shard]:
                key.unwish(attempt)
                self._open.add(name)

    # --- decisions -----------------------------------------------------------------------------------------------

    def decide(self, now: int) -> list[Decided]:
        """What changes now; it is folded already."""
        self._open.update(self._due.pop_due(now, len(self._due)))
        names, self._open = sorted(self._open), set()
        return [decided for name in names if (decided := self._decide(name, now)) is not None]

    def _decide(self, name: str, now: int) -> Decided | None:
        key = self._keys.get(name)
        if key is None:
            return None
        used = self._heard(name, key, key.used)
        begun = set(used)
        returned = tuple(attempt for attempt in self._heard(name, key, key.returned) if attempt not in begun)
        if used or returned:
            self.fold(name, LimitChanged(used=used, returned=returned), now)
            key = self._key(name)
        granted = self._granted(key, self._room(name, key, now), now, name)
        if granted:
            self.fold(name, LimitChanged(granted=granted), now)
        cancelled = self._to_cancel(name, key)
        if key.is_idle():
            self._keys.pop(name, None)
            self.touched.add(name)
        if not (used or returned or granted or cancelled):
            return None
        return Decided(name, LimitChanged(used=used, returned=returned, granted=granted), cancelled)

    def _heard(self, name: str, key: _Key, attempts: dict[str, None]) -> tuple[str, ...]:
        """Take out of what was heard as much as one decision may hold, without what concerns nobody."""
        now_heard = list(itertools.islice(attempts, CHANGES_MAX))
        for attempt in now_heard:
            del attempts[attempt]
        if attempts:
            self._open.add(name)
        return tuple(attempt for attempt in now_heard if attempt in key.holders)

    def _granted(self, key: _Key, room: int, now: int, name: str) -> tuple[LimitGrant, ...]:
        granted: dict[int, list[str]] = {}
        if room > CHANGES_MAX:
            room = CHANGES_MAX
            self._open.add(name)
        while room > 0 and (chosen := key.wishes.pop(PRIORITIES, equal_weights)) is not None:
            granted.setdefault(key.asked.pop(chosen.task_id), []).append(chosen.task_id)
            self._check_at(name, chosen.task_id, now, CHECK_US)
            room -= 1
        return tuple(LimitGrant(shard=shard, attempts=tuple(attempts)) for shard, attempts in granted.items())

    def _room(self, name: str, key: _Key, now: int) -> int:
        rule, held = self._rule_of(name), len(key.holders)
        if rule is None:
            key.bucket = None
            for attempt in list(key.asked):
                key.unwish(attempt)  # who has heard of a limit that is not known here yet asks again
            return 0
        if isinstance(rule, Concurrency):
            key.bucket = None  # it may have been a rate before
            return max(0, rule.permits - held)
        if key.bucket is None:
            return max(0, rule.burst - held)
        level, full = key.bucket.fill(rule, now), rule.burst * rule.period_us
        if level == full and not held:
            key.bucket = None  # as if there had been none
            return rule.burst
        room = max(0, level // rule.period_us - held)
        if not key.asked and not held:
            self._due.set(name, now + -(-(full - level) // rule.tokens))  # then it may be forgotten
        missing = (held + room + 1) * rule.period_us - level
        is_filling = held + room < rule.burst  # else the next token comes when one that is held is used, or given back
        if len(key.asked) > room and is_filling:
            self._due.set(name, now + -(-missing // rule.tokens))
        return room

    def _to_cancel(self, name: str, key: _Key) -> list[tuple[int, str]]:
        """Those that must go for a limit that lets nobody wait. Who holds something is told until it has gone."""
        rule = self._rule_of(name)
        if not isinstance(rule, Concurrency) or rule.strategy is LimitStrategy.WAIT or not key.asked:
            return []
        if len(key.holders) < rule.permits:
            return []  # the others are granted in the next decisions
        losers: list[tuple[int, str]] = []
        if rule.strategy is LimitStrategy.CANCEL_OLDEST:
            excess = max(0, len(key.holders) + len(key.asked) - rule.permits)
            holders = [(shard, attempt) for attempt, shard in key.holders.items()][:excess]
            losers = [(shard, attempt) for shard, attempt in holders if attempt not in key.cancelled]
            key.cancelled.update(attempt for _, attempt in losers)
            refused = [(shard, attempt) for attempt, shard in key.asked.items()][: max(0, excess - len(key.holders))]
        else:
            refused = [(shard, attempt) for attempt, shard in key.asked.items()]
        for _, attempt in refused:
            key.unwish(attempt)
        return losers + refused

    def to_check(self, now: int) -> Iterator[tuple[int, str, str]]:
        """Those that have held something for long: shard, key, attempt. Is it still needed?"""
        for place in self._checks.pop_due(now, len(self._checks)):
            name, _, attempt = place.partition(_SEPARATOR)
            key, wait = self._keys.get(name), self._waits.pop(place)
            shard = key.holders.get(attempt) if key is not None else None
            if key is not None and shard is not None:
                self._check_at(name, attempt, now, min(2 * wait, CHECK_US_MAX))
                if attempt in key.cancelled:  # it is to be told again
                    key.cancelled.discard(attempt)
                    self._open.add(name)
                yield shard, name, attempt

    def _check_at(self, name: str, attempt: str, now: int, wait: int) -> None:
        place = f"{name}{_SEPARATOR}{attempt}"
        self._checks.set(place, now + wait)
        self._waits[place] = wait

    def _cancel_check(self, name: str, attempt: str) -> None:
        place = f"{name}{_SEPARATOR}{attempt}"
        self._checks.cancel(place)
        self._waits.pop(place, None)

    def held_by(self, shard: int) -> Iterator[tuple[str, str]]:
        """What a shard holds: key, attempt."""
        for name, key in self._keys.items():
            for attempt, of in key.holders.items():
                if of == shard:
                    yield name, attempt

    def levels(self) -> Iterator[tuple[str, int]]:
        """Each key, and how many attempts hold something of it."""
        return ((name, len(key.holders)) for name, key in self._keys.items())

    def look_again(self) -> None:
        """Limits were changed: look at all keys."""
        self._open.update(self._keys)

    def next_at(self) -> int | None:
        """When `decide` or `to_check` may find something without any news."""
        if self._open:
            return 0
        instants = (self._due.next_at(), self._checks.next_at())
        return min((at for at in instants if at is not None), default=None)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def held(self, name: str) -> LimitHeld | None:
        """A key as a checkpoint is to keep it; None: it is as if nobody had ever asked."""
        key = self._keys.get(name)
        if key is None or not (key.holders or key.bucket):
            return None
        level, period_us = (key.bucket.level, key.bucket.period_us) if key.bucket else (0, 0)
        return LimitHeld(key=name, holders=dict(key.holders), level=level, period_us=period_us)

    def restore(self, held: LimitHeld) -> None:
        """Take a key from a checkpoint. `on_loaded` follows."""
        key = self._key(held.key)
        key.holders = dict(held.holders)
        if held.period_us:
            key.bucket = _Bucket(held.level, held.period_us, None)

    def on_loaded(self, now: int) -> None:
        """All facts are known: from here on time counts, and whoever holds something is asked whether it is needed."""
        self.change_clock()
        for name, key in self._keys.items():
            for attempt in key.holders:
                self._check_at(name, attempt, now, 0)
                self._waits[f"{name}{_SEPARATOR}{attempt}"] = CHECK_US // 2
        self.look_again()

    def _key(self, name: str) -> _Key:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(name)
        return key
