"""Limits are exact, whatever the delays, restarts and clocks are; and what they allow is used."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from random import Random

import pytest

from scheduler.core.limit_keys import Concurrency, Rate, Rule
from scheduler.core.limiter import Limiter
from schemas.messages import LimitGrant, LimitStrategy, LimitWish, Priority

SECOND = 1_000_000
KEY = "emails:acme"


class World:
    """Some shards with attempts that wait for one key, a home that may crash, and messages that take their time."""

    def __init__(self, rng: Random, rule: Rule, *, shards: int, delay_us: int, run_us: int = 0) -> None:
        self.rng, self.rule, self.delay_us, self.run_us = rng, rule, delay_us, run_us
        self.limiter = Limiter(lambda key: self.rule)
        self.waiting = {shard: deque(f"{shard}-{number}" for number in range(10_000)) for shard in range(shards)}
        self.asked: dict[int, list[str]] = {shard: [] for shard in range(shards)}
        self.starts: list[int] = []
        self.returned: dict[str, str] = {}  # how each attempt that needs nothing any more is told of
        self.running = 0
        self.most = 0
        self._serial = itertools.count()
        self._due: list[tuple[int, int, str, object]] = []
        self.now = 0
        self._wake_at: int | None = None

    def run(self, until: int, *, crash_every: float = 0.0, unused: float = 0.0) -> None:
        for shard in self.waiting:
            self._later(0, "ask", shard)
        while self._due and self._due[0][0] <= until:
            self.now, _, what, subject = heapq.heappop(self._due)
            getattr(self, f"_{what}")(subject, unused)
            if self.rng.random() < crash_every:
                self._crash()
            self._decide()

    def _delay(self) -> int:
        return self.rng.randint(0, self.delay_us)

    def _later(self, delay: int, what: str, subject: object) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._serial), what, subject))

    def _decide(self) -> None:
        for _, _, attempt in self.limiter.to_check(self.now):
            if attempt in self.returned:
                self._later(self._delay(), self.returned[attempt], attempt)
        for _, changed, _ in self.limiter.decide(self.now):
            for grant in changed.granted:
                self._later(self._delay(), "granted", grant)
        at = self.limiter.next_at()
        if at is not None and (self._wake_at is None or at < self._wake_at):
            self._wake_at = max(self.now, at)
            self._later(self._wake_at - self.now, "wake", self._wake_at)

    def _wake(self, at: object, _unused: float) -> None:
        if at == self._wake_at:
            self._wake_at = None

    def _ask(self, shard: object, _unused: float) -> None:
        assert isinstance(shard, int)
        asked = self.asked[shard]
        while len(asked) < 40 and self.waiting[shard]:
            asked.append(self.waiting[shard].popleft())
        told = self.limiter.ask(KEY, shard, wishes(*asked), is_whole=True)
        if told:
            self._later(self._delay(), "granted", LimitGrant(shard=shard, attempts=tuple(told)))

    def _granted(self, grant: object, unused: float) -> None:
        assert isinstance(grant, LimitGrant)
        news = [attempt for attempt in grant.attempts if attempt in self.asked[grant.shard]]
        for attempt in news:
            self.asked[grant.shard].remove(attempt)
            if self.rng.random() < unused:
                self._give_back(attempt, "unused")
            else:
                self._later(self._delay(), "start", attempt)
        self._later(self._delay(), "ask", grant.shard)

    def _unused(self, attempt: object, _unused: float) -> None:
        self.limiter.hear(KEY, [str(attempt)], is_used=False)

    def _start(self, attempt: object, _unused: float) -> None:
        self.starts.append(self.now)
        self.running += 1
        self.most = max(self.most, self.running)
        self._later(self.rng.randint(0, self.run_us), "end", attempt)
        if isinstance(self.rule, Rate):
            self._give_back(str(attempt), "heard")

    def _end(self, attempt: object, _unused: float) -> None:
        self.running -= 1
        if isinstance(self.rule, Concurrency):
            self._give_back(str(attempt), "heard")

    def _give_back(self, attempt: str, how: str) -> None:
        self.returned[attempt] = how
        self._later(self._delay(), how, attempt)

    def _heard(self, attempt: object, _unused: float) -> None:
        self.limiter.hear(KEY, [str(attempt)], is_used=isinstance(self.rule, Rate))

    def _crash(self) -> None:
        """The home is loaded elsewhere: who asked is forgotten, and asks again; what was heard may be lost."""
        held = self.limiter.held(KEY)
        self.limiter = Limiter(lambda key: self.rule)
        if held is not None:
            self.limiter.restore(held)
        self.limiter.on_loaded(self.now)
        for shard in self.waiting:
            self._later(self._delay(), "ask", shard)


def check_rate(starts: list[int], rate: Rate) -> None:
    """In no interval more than the burst and what came meanwhile; intervals that begin with a start are enough."""
    # starts[b] >= starts[a] + (b - a + 1 - burst) * period / count, for all a <= b: prefix maxima of what a demands
    latest = -(10**18)
    for number, at in enumerate(sorted(starts)):
        latest = max(latest, at * rate.tokens - number * rate.period_us)
        assert at * rate.tokens - (number + 1 - rate.burst) * rate.period_us >= latest, (number, at)


@pytest.mark.parametrize("crash_every", [0.0, 0.02])
@pytest.mark.parametrize("burst", [1, 3, 10, 50])
def test_in_no_interval_are_more_starts_than_the_rate_allows(burst: int, crash_every: float) -> None:
    for seed in range(8):
        rng = Random(seed)
        rate = Rate(rng.choice([1, 7, 100]), rng.choice([1, 3, 60]) * SECOND, burst)
        world = World(rng, rate, shards=rng.choice([1, 3, 8]), delay_us=rng.choice([0, 5_000, 300_000]))
        world.run(60 * SECOND, crash_every=crash_every, unused=rng.choice([0.0, 0.3]))
        assert world.starts, seed
        check_rate(world.starts, rate)


def test_what_a_rate_allows_is_used() -> None:
    """100 a second, the burst of a tenth of a second, and messages of up to 10 ms."""
    rate = Rate(100, SECOND, 10)
    world = World(Random(1), rate, shards=8, delay_us=10_000)
    world.run(60 * SECOND)
    assert len(world.starts) >= 0.98 * 60 * 100


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_c29_with_a_burst_of_one_starts_are_a_period_apart(shards: int) -> None:
    rate = Rate(10, 60 * SECOND, 1)
    world = World(Random(1), rate, shards=shards, delay_us=10_000)
    world.run(300 * SECOND)
    gaps = [after - before for before, after in itertools.pairwise(world.starts)]
    assert all(6 * SECOND <= gap <= 6.05 * SECOND for gap in gaps)
    assert world.starts[39] <= 236 * SECOND


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_c29_a_full_bucket_is_the_burst_that_was_declared_and_no_more(shards: int) -> None:
    rate = Rate(10, 60 * SECOND, 10)
    world = World(Random(2), rate, shards=shards, delay_us=10_000)
    world.run(300 * SECOND, crash_every=0.001)
    check_rate(world.starts, rate)
    assert sum(at <= SECOND for at in world.starts) == 10
    assert world.starts[39] <= 185 * SECOND


@pytest.mark.parametrize("crash_every", [0.0, 0.05])
@pytest.mark.parametrize("count", [1, 4])
def test_never_more_at_a_time_than_allowed_and_never_fewer_for_long(count: int, crash_every: float) -> None:
    for seed in range(8):
        world = World(Random(seed), Concurrency(count), shards=4, delay_us=2_000, run_us=100_000)
        world.run(20 * SECOND, crash_every=crash_every, unused=0.1)
        assert world.most == count
        assert len(world.starts) >= 0.85 * count * 20 * SECOND / 54_000, seed


def test_a_limit_that_is_changed_holds_at_once() -> None:
    world = World(Random(3), Concurrency(10), shards=2, delay_us=1_000, run_us=10_000)
    world.run(SECOND)
    assert world.most == 10
    world.rule = Concurrency(2)
    world.run(world.now + 50_000)
    world.most = world.running
    world.run(world.now + SECOND)
    assert world.most == 2


@pytest.mark.parametrize("after", [Rate(10, SECOND, 2), Rate(7, 3 * SECOND, 1), Rate(200, SECOND, 50)])
def test_a_rate_that_is_changed_holds_at_once(after: Rate) -> None:
    world = World(Random(3), Rate(50, SECOND, 10), shards=2, delay_us=1_000)
    world.run(SECOND)
    world.rule = after
    begun = len(world.starts)
    world.run(world.now + 20 * SECOND)
    check_rate(world.starts[begun + 1 :], after)
    assert len(world.starts) - begun >= 0.9 * 20 * SECOND * after.tokens / after.period_us - after.burst


def test_shards_that_ask_for_the_same_share_it() -> None:
    world = World(Random(5), Rate(100, SECOND, 5), shards=4, delay_us=1_000)
    world.run(10 * SECOND)
    left = [len(queue) for queue in world.waiting.values()]
    assert max(left) - min(left) <= 60


def wishes(*attempts: str) -> list[LimitWish]:
    return [LimitWish(attempt=attempt, priority=Priority.MEDIUM) for attempt in attempts]


def granted(limiter: Limiter, now: int = 0) -> list[str]:
    """What is granted now."""
    changes = [changed for _, changed, _ in limiter.decide(now)]
    return [attempt for changed in changes for grant in changed.granted for attempt in grant.attempts]


def test_nothing_is_kept_of_a_key_that_nobody_uses() -> None:
    limiter = Limiter(lambda key: Rate(10, SECOND, 5))
    limiter.ask(KEY, 0, wishes("a"), is_whole=True)
    assert granted(limiter) == ["a"]
    limiter.hear(KEY, ["a"], is_used=True)
    limiter.decide(10)
    assert limiter.held(KEY) is not None
    full_at = limiter.next_at()
    assert full_at == 10 + SECOND // 10
    limiter.decide(full_at)
    assert limiter.held(KEY) is None
    assert len(limiter) == 0


def test_who_loses_in_a_limit_that_lets_nobody_wait() -> None:
    limiter = Limiter(lambda key: Concurrency(1, LimitStrategy.REJECT))
    limiter.ask(KEY, 0, wishes("a"), is_whole=False)
    limiter.ask(KEY, 1, wishes("b", "c"), is_whole=False)
    ((_, changed, cancelled),) = limiter.decide(0)
    assert [grant.attempts for grant in changed.granted] == [("a",)]
    assert cancelled == [(1, "b"), (1, "c")]
    limiter.hear(KEY, ["a"], is_used=False)
    assert granted(limiter) == []


def test_the_oldest_goes_for_the_newest() -> None:
    limiter = Limiter(lambda key: Concurrency(1, LimitStrategy.CANCEL_OLDEST))
    limiter.ask(KEY, 0, wishes("a"), is_whole=False)
    assert granted(limiter) == ["a"]
    limiter.ask(KEY, 1, wishes("b", "c"), is_whole=False)
    ((_, _, cancelled),) = limiter.decide(0)
    assert cancelled == [(0, "a"), (1, "b")], "the one that runs, and all that waited but the newest"
    assert limiter.decide(0) == [], "it is told once"
    limiter.hear(KEY, ["a"], is_used=False)
    assert granted(limiter) == ["c"]


def test_an_attempt_that_must_go_is_told_again_if_it_does_not() -> None:
    limiter = Limiter(lambda key: Concurrency(1, LimitStrategy.CANCEL_OLDEST))
    limiter.ask(KEY, 0, wishes("a"), is_whole=False)
    limiter.decide(0)
    limiter.ask(KEY, 1, wishes("b"), is_whole=False)
    limiter.decide(0)
    later = limiter.next_at()
    assert later is not None
    assert list(limiter.to_check(later)) == [(0, KEY, "a")]
    ((_, _, cancelled),) = limiter.decide(later)
    assert cancelled == [(0, "a")]


def test_who_holds_something_for_long_is_asked_less_and_less_often() -> None:
    limiter = Limiter(lambda key: Concurrency(1))
    limiter.ask(KEY, 3, wishes("a"), is_whole=False)
    limiter.decide(0)
    asked_at: list[int] = []
    while len(asked_at) < 8:
        at = limiter.next_at()
        assert at is not None
        assert list(limiter.to_check(at)) == [(3, KEY, "a")]
        asked_at.append(at // SECOND)
    assert asked_at == [10, 30, 70, 150, 310, 610, 910, 1210]


def test_what_a_limit_of_another_process_allows_is_not_known_here() -> None:
    """A home that has not read of a limit yet lets nobody go."""
    rules: dict[str, Rule] = {}
    limiter = Limiter(rules.get)
    limiter.ask(KEY, 0, wishes("a"), is_whole=True)
    assert granted(limiter) == []
    assert len(limiter) == 0
    rules[KEY] = Concurrency(1)
    limiter.ask(KEY, 0, wishes("a"), is_whole=True)
    assert granted(limiter) == ["a"]


def test_a_decision_holds_no_more_than_an_event_has_room_for() -> None:
    limiter = Limiter(lambda key: Concurrency(5_000))
    for shard in range(10):
        limiter.ask(KEY, shard, wishes(*(f"{shard}-{number}" for number in range(500))), is_whole=True)
    counts = []
    while limiter.next_at() == 0:
        counts.append(len(granted(limiter)))
    assert counts == [2_000, 2_000, 1_000]


@pytest.mark.parametrize("strategy", [LimitStrategy.REJECT, LimitStrategy.CANCEL_OLDEST])
def test_nobody_has_to_go_while_there_is_room(strategy: LimitStrategy) -> None:
    """More ask than one decision may grant: the others are granted in the next one."""
    limiter = Limiter(lambda key: Concurrency(5_000, strategy))
    for shard in range(6):
        limiter.ask(KEY, shard, wishes(*(f"{shard}-{number}" for number in range(500))), is_whole=True)
    cancelled = []
    while limiter.next_at() == 0:
        cancelled += [one for decided in limiter.decide(0) for one in decided.cancelled]
    assert cancelled == []
    held = limiter.held(KEY)
    assert held is not None
    assert len(held.holders) == 3_000


def test_looking_again_and_again_leaves_nothing_behind() -> None:
    limiter = Limiter(lambda key: Rate(1, 86_400 * SECOND, 1))
    limiter.ask(KEY, 0, wishes("a", "b"), is_whole=True)
    for second in range(1_000):
        limiter.decide(second * SECOND)
        limiter.ask(KEY, 0, [], is_whole=False)
    assert len(limiter._due) <= 1
