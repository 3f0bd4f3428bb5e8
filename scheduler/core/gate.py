"""Where pending tasks wait that a limit concerns: between what is due and what may go out.

An attempt needs a grant of each of its keys, one after the other in an order that all shards share (so that no two
wait for each other), before its task enters a lane. It keeps a permit until it has ended, and gives a token back as
used when it has started. What is held is known here only as long as this owner lives: the homes know it, and tell the
next one.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scheduler.core.fairness import FairQueue, Places
from scheduler.core.limit_keys import Rate
from scheduler.core.policies import Policies
from scheduler.core.timers import Timers
from schemas.messages import EndedTask, LimitAsk, LimitWish, Priority, Status, Task
from schemas.priorities import PRIORITIES, Weights

ASKED_MAX = 256  # attempts of one priority for which a key's home is asked at a time
WITHDRAWN_MAX = 100  # wishes that are not wanted any more, before the home is told all that is
ASK_AGAIN_US = 1_000_000  # until a home is asked again that has not answered; then after twice as long, …
ASK_AGAIN_US_MAX = 30_000_000  # … up to this: a home that was loaded anew says so, and is asked at once
# What went out and was then cancelled, or changed, may be about to start: its worker hears of it within this.
STALE_START_US = 5_000_000

DepthKey = tuple[str, Priority, str]  # queue, priority, tenant
Known = Callable[[str], Task | EndedTask | None]


class Word(NamedTuple):
    """Something for the home of a key: an attempt has started, or holds nothing any more."""

    key: str
    attempt: str
    is_used: bool


class _Returning(NamedTuple):
    """What was said to a home that may not have heard it yet."""

    is_used: bool
    number: int = 0  # of the message that says so; 0: it is not written yet


class _Waiting(NamedTuple):
    """A task that waits for a key."""

    depth: DepthKey
    attempt: str
    keys: Sequence[str]  # all that it needs
    key: str  # the one that it waits for


class _Queue:
    """Who waits for one key."""

    __slots__ = ("again_us", "asked", "waiting", "withdrawn")

    def __init__(self, key: str, places: Places[str], weights: Weights) -> None:
        self.waiting = FairQueue(key, places, weights)  # not asked for yet
        self.asked: dict[str, Priority] = {}  # task ids, in their order
        self.again_us = ASK_AGAIN_US
        self.withdrawn = 0  # of what was asked for, since all of it was said


class _Holds:
    """What an attempt has been granted."""

    __slots__ = ("attempt", "keys", "was_out")

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt
        self.keys: set[str] = set()
        self.was_out = False


def depth_key(task: Task) -> DepthKey:
    """By what waiting and running tasks are counted."""
    return task.spec.queue, task.spec.priority, task.spec.tenant_id


def attempt_of(task: Task) -> str:
    """The name of the attempt that a pending task is to begin, or that a running one has begun."""
    return f"{task.task_id}:{task.attempt + (task.status is not Status.RUNNING)}"


def _is_at(task: Task, attempt: str) -> bool:
    """Whether a task waits for the start of this attempt, or for its end."""
    return task.status in (Status.PENDING, Status.RUNNING) and attempt_of(task) == attempt


def _in_order(keys: Sequence[str], held: Collection[str]) -> Sequence[str]:
    """Those that are held before the first that is not. With what lies behind it two could wait for each other."""
    return tuple(itertools.takewhile(lambda key: key in held, keys))


def _number(attempt: str) -> int:
    return int(attempt.rpartition(":")[2])


class Gate:
    """The limited tasks of a shard that wait, and what those that do not were granted."""

    def __init__(self, policies: Policies, weights: Weights) -> None:
        self._policies, self._weights = policies, weights
        self._queues: dict[str, _Queue] = {}
        self._places: Places[str] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._by_depth: dict[DepthKey, dict[str, None]] = {}  # the same by queue, priority and tenant
        self._holds: dict[str, _Holds] = {}
        self._words: list[Word] = []
        self._returning: dict[tuple[str, str], _Returning] = {}  # key and attempt
        self._later: list[tuple[int, str, str]] = []  # a heap: when to give back, key, attempt
        self._to_ask: dict[str, bool] = {}  # keys with something to be asked; True: for all of it
        self._again = Timers()  # keys whose home has not answered

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._waiting

    # --- tasks ---------------------------------------------------------------------------------------------------

    def admits(self, task: Task, now: int) -> bool:
        """A task became pending, durably: whether it may go now. Else it waits here, or is told of by `heard`."""
        keys = self._policies.keys_of(task.spec)
        holds = self._holds.get(task.task_id)
        if not keys and holds is None:
            return True
        attempt = attempt_of(task)
        if self._policies.is_paused(task.spec.queue):
            keys = ()  # when the queue is resumed it comes again; meanwhile nothing is held for what is not out
        if holds is not None:
            is_out = holds.was_out and holds.attempt == attempt and not keys  # it may start even now
            kept = _in_order(keys, holds.keys) if holds.attempt == attempt else ()
            self._give_back(task, holds, [] if is_out else [key for key in holds.keys if key not in kept], now)
        return self._goes_on(task.task_id, depth_key(task), attempt, keys)

    def _goes_on(self, task_id: str, depth: DepthKey, attempt: str, keys: Sequence[str]) -> bool:
        """Wait for the next key; True: all are held."""
        holds = self._holds.get(task_id)
        for key in keys:
            if holds is None or key not in holds.keys:
                self._wait(task_id, _Waiting(depth, attempt, keys, key))
                return False
        return True

    def _wait(self, task_id: str, waiting: _Waiting) -> None:
        key = waiting.key
        self._waiting[task_id] = waiting
        self._by_depth.setdefault(waiting.depth, {})[task_id] = None
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue(key, self._places, self._weights)
            self._to_ask[key] = True  # instead of what it may have been asked before
        _, priority, tenant_id = waiting.depth
        queue.waiting.put(task_id, priority, tenant_id)
        self._to_ask.setdefault(key, False)

    def forget(self, task_id: str) -> None:
        """The task waits no more. What it was granted is given back by `settle`, once that is in the log."""
        waiting = self._waiting.pop(task_id, None)
        if waiting is not None:
            self._forget_depth(waiting.depth, task_id)
            queue = self._queues[waiting.key]
            queue.waiting.remove(task_id)
            if queue.asked.pop(task_id, None) is not None:
                self._to_ask.setdefault(waiting.key, False)  # there is room to ask for another
                queue.withdrawn += 1
                if queue.withdrawn > WITHDRAWN_MAX:
                    self._to_ask[waiting.key] = True  # the home has wishes that nobody has any more
            self._drop_if_idle(waiting.key, queue)

    def note_out(self, task_id: str) -> None:
        """A ready record of the task goes out."""
        holds = self._holds.get(task_id)
        if holds is not None:
            holds.was_out = True

    def note_back(self, task_id: str) -> None:
        """A worker gave the record back: it will not be started."""
        holds = self._holds.get(task_id)
        if holds is not None:
            holds.was_out = False

    def settle(self, known: Task | EndedTask, now: int) -> None:
        """How a task stands is in the log: give back what it needs no more."""
        holds = self._holds.get(known.task_id)
        if holds is None:
            return
        if not isinstance(known, Task) or not _is_at(known, holds.attempt):
            self._give_back(known, holds, list(holds.keys), now)
        elif known.status is Status.RUNNING:
            tokens = [key for key in holds.keys if isinstance(self._policies.rule_of(key), Rate)]
            self._give_back(known, holds, tokens, now)

    def settle_running(self, tasks: Mapping[str, Task], now: int) -> None:
        """Limits were changed: what was a permit of an attempt that runs may be a token now."""
        for task_id in list(self._holds):
            task = tasks.get(task_id)
            if task is not None and task.status is Status.RUNNING:
                self.settle(task, now)

    def _give_back(self, known: Task | EndedTask, holds: _Holds, keys: Sequence[str], now: int) -> None:
        is_started = known.attempt >= _number(holds.attempt)
        if holds.was_out and not is_started:
            for key in keys:
                heapq.heappush(self._later, (now + STALE_START_US, key, holds.attempt))
                self._returning[key, holds.attempt] = _Returning(is_used=False)
        else:
            self._say(keys, holds.attempt, is_used=is_started)
        holds.keys.difference_update(keys)
        if not holds.keys:
            del self._holds[known.task_id]

    # --- what homes say ------------------------------------------------------------------------------------------

    def heard(self, key: str, attempts: Sequence[str], known: Known, *, is_news: bool) -> list[str]:
        """Attempts hold `key`, by word of its home: which tasks may go now. What nobody needs is given back.

        With `is_news` they were granted it now; else the home asks whether they still need it. What was given back
        counts for nothing until the home speaks as one that has heard of it: its word and ours may have crossed.
        """
        free: list[str] = []
        for attempt in attempts:
            if (returning := self._returning.get((key, attempt))) is not None:
                if returning.number:  # that message may be lost
                    self._say([key], attempt, is_used=returning.is_used)
                continue
            task_id = attempt.rpartition(":")[0]
            waiting, holds = self._waiting.get(task_id), self._holds.get(task_id)
            if waiting is not None and waiting.attempt == attempt and key in waiting.keys:
                is_held = holds is not None and key in holds.keys
                if holds is not None and is_held and waiting.keys.index(key) > waiting.keys.index(waiting.key):
                    # An owner before had it, and not what comes before it, which this one still waits for.
                    self._return_held(task_id, holds, key)
                elif not is_held and self._hold(task_id, waiting, key):
                    free.append(task_id)
            elif holds is None or holds.attempt != attempt or key not in holds.keys:
                self._adopt(key, attempt, known(task_id), is_news=is_news)
        queue = self._queues.get(key)
        if queue is not None:
            queue.again_us = ASK_AGAIN_US  # it answers
            self._to_ask.setdefault(key, False)
        return free

    def _return_held(self, task_id: str, holds: _Holds, key: str) -> None:
        self._say([key], holds.attempt, is_used=False)
        holds.keys.discard(key)
        if not holds.keys:
            del self._holds[task_id]

    def _hold(self, task_id: str, waiting: _Waiting, key: str) -> bool:
        """It holds one more: whether that was the last."""
        self._holds.setdefault(task_id, _Holds(waiting.attempt)).keys.add(key)
        if key != waiting.key:
            return False  # it still waits for another one
        self.forget(task_id)
        if (queue := self._queues.get(key)) is not None:
            queue.withdrawn -= 1  # the home knows of this one
        return self._goes_on(task_id, waiting.depth, waiting.attempt, waiting.keys)

    def _adopt(self, key: str, attempt: str, known: Task | EndedTask | None, *, is_news: bool) -> None:
        """An attempt holds what is not known here: an owner before this one asked for it, or it is of the past."""
        rule = self._policies.rule_of(key)
        is_live = isinstance(known, Task) and known.status in (Status.PENDING, Status.RUNNING)
        if (
            not isinstance(known, Task)
            or not is_live
            or attempt_of(known) != attempt
            or key not in self._keys_of(known)
        ):
            # Whether it has started is not known of what was forgotten; to take a token for used is safe.
            is_used = known is None or known.attempt >= _number(attempt)
            self._say([key], attempt, is_used=is_used)
        elif known.status is Status.RUNNING and isinstance(rule, Rate):
            self._say([key], attempt, is_used=True)
        elif known.status is Status.PENDING and self._policies.is_paused(known.spec.queue) and is_news:
            self._say([key], attempt, is_used=False)
        else:
            holds = self._holds.setdefault(known.task_id, _Holds(attempt))
            holds.keys.add(key)
            holds.was_out = True  # by an earlier owner, maybe

    def _keys_of(self, task: Task) -> Sequence[str]:
        return self._policies.keys_of(task.spec)

    # --- what homes are told -------------------------------------------------------------------------------------

    def words(self, now: int) -> list[Word]:
        """What homes are to be told now, in its order; once."""
        while self._later and self._later[0][0] <= now:
            _, key, attempt = heapq.heappop(self._later)
            self._say([key], attempt, is_used=False)
        words, self._words = self._words, []
        return words

    def _say(self, keys: Iterable[str], attempt: str, *, is_used: bool) -> None:
        for key in keys:
            self._words.append(Word(key, attempt, is_used))
            self._returning[key, attempt] = _Returning(is_used)

    def has_told(self, number: int, key: str, attempt: str) -> None:
        """What was given back is said in a message of this number."""
        returning = self._returning.get((key, attempt))
        if returning is not None:
            self._returning[key, attempt] = returning._replace(number=number)

    def has_heard(self, number: int, key: str, attempt: str) -> None:
        """The home has heard that message, or never will: it has the last word from now on."""
        returning = self._returning.get((key, attempt))
        if returning is not None and returning.number == number:
            del self._returning[key, attempt]

    def asks(self, now: int) -> Iterator[LimitAsk]:
        """What homes are to be asked now."""
        for key in self._again.pop_due(now, len(self._queues)):
            queue = self._queues[key]
            queue.again_us = min(ASK_AGAIN_US_MAX, 2 * queue.again_us)
            self._to_ask[key] = True
        to_ask, self._to_ask = self._to_ask, {}
        for key, is_whole in to_ask.items():
            queue = self._queues[key]
            added = self._add_wishes(queue)
            if not added and not is_whole:
                continue
            if is_whole:
                queue.withdrawn = 0
            if is_whole or key not in self._again:  # what is added does not put off that all is said again
                self._again.set(key, now + queue.again_us)
            chosen = list(queue.asked) if is_whole else added
            wishes = tuple(LimitWish(attempt=self._waiting[one].attempt, priority=queue.asked[one]) for one in chosen)
            yield LimitAsk(key=key, is_whole=is_whole, wishes=wishes)

    def _add_wishes(self, queue: _Queue) -> list[str]:
        counts = Counter(queue.asked.values())
        added: list[str] = []
        while allowed := [one for one in PRIORITIES if counts[one] < ASKED_MAX]:
            chosen = queue.waiting.pop(allowed, self._policies.weight_of)
            if chosen is None:
                break
            queue.asked[chosen.task_id] = chosen.priority
            counts[chosen.priority] += 1
            added.append(chosen.task_id)
        return added

    def ask_anew(self, keys: Iterable[str]) -> None:
        """The homes of these keys know nothing of what they were asked."""
        for key in keys:
            if key in self._queues:
                self._to_ask[key] = True

    def asked_keys(self) -> Sequence[str]:
        """Those for which somebody waits."""
        return tuple(self._queues)

    def next_at(self) -> int | None:
        """When homes are to be told or asked something without any news."""
        if self._words or self._to_ask:
            return 0
        instants = [self._again.next_at(), self._later[0][0] if self._later else None]
        return min((at for at in instants if at is not None), default=None)

    # --- looks ---------------------------------------------------------------------------------------------------

    def take(self, queues: Collection[str] | None) -> list[str]:
        """Those of these queues that wait (None: of all), who wait no more: they are to be offered anew."""
        taken = [task_id for task_id, one in self._waiting.items() if queues is None or one.depth[0] in queues]
        for task_id in taken:
            self.forget(task_id)
        return taken

    def concerns(self, task: Task) -> bool:
        """Whether there are limits for a task, or it holds something."""
        return task.task_id in self._holds or bool(self._keys_of(task))

    def depth(self) -> Mapping[DepthKey, int]:
        """How many tasks wait. Safe from any thread."""
        return {key: len(tasks) for key, tasks in list(self._by_depth.items())}

    def waiting(self) -> Iterator[tuple[str, int]]:
        """Each key for which somebody waits, and how many do."""
        return ((key, len(queue.waiting) + len(queue.asked)) for key, queue in self._queues.items())

    def oldest(self) -> Iterator[tuple[DepthKey, str]]:
        """Those that have waited longest."""
        return ((key, next(iter(tasks))) for key, tasks in self._by_depth.items())

    def held(self) -> int:
        """How many attempts hold something, as far as it is known here."""
        return len(self._holds) + len(self._later) + sum(not one.number for one in self._returning.values())

    def _forget_depth(self, depth: DepthKey, task_id: str) -> None:
        tasks = self._by_depth[depth]
        del tasks[task_id]
        if not tasks:
            del self._by_depth[depth]

    def _drop_if_idle(self, key: str, queue: _Queue) -> None:
        if not queue.asked and not queue.waiting:
            del self._queues[key]
            self._to_ask.pop(key, None)
            self._again.cancel(key)
