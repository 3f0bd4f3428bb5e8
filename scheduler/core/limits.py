"""A shard's part in limits: it waits at the gate for its own tasks, and is the home of some keys for all shards.

Shards tell each other what they want and hold by messages that may be lost. What matters is said again: who waits asks
again, who granted something asks whether it is still needed, and each new owner tells all others that it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler.core.gate import Gate, Known
from scheduler.core.limit_keys import home_of
from scheduler.core.limiter import Decided, Limiter
from scheduler.core.policies import Policies
from schemas.messages import (
    Event,
    LimitAsk,
    LimitChanged,
    LimitHeld,
    LimitWord,
    LimitWordKind,
    ShardMessage,
)

ATTEMPTS_MAX = 1_000  # of a word
BYTES_MAX = 400_000  # of a message, about: more of it goes in several, so that none outgrows a record


def _size(key: str, attempts: Sequence[str]) -> int:
    return len(key.encode()) + 16 + sum(len(attempt) + 4 for attempt in attempts)


class Heard(NamedTuple):
    """What follows from a message: tasks that may go, and attempts whose tasks are to be cancelled for others."""

    free: Sequence[str]
    cancelled: Sequence[tuple[str, str]]  # key, attempt


class _Letter:
    """What is to be told to one shard."""

    def __init__(self) -> None:
        self.words: dict[tuple[LimitWordKind, str], list[str]] = {}
        self.asks: list[LimitAsk] = []


class _Peer:
    """What is known of the owner of a shard, here."""

    def __init__(self) -> None:
        self.epoch = 0
        self.heard = 0  # the number of its last message
        self.told = 0  # how many messages were sent to it
        self.returned: deque[tuple[int, str, str]] = deque()  # which message told of it, key, attempt


class ShardLimits:
    """The limits of one shard. `known` tells how a task of the shard stands."""

    def __init__(self, shard: int, shards: int, policies: Policies, gate: Gate, known: Known) -> None:
        self._shard, self._shards = shard, shards
        self._policies, self._gate, self._known = policies, gate, known
        self._followed = len(policies.gate_changes)
        self.limiter = Limiter(policies.rule_of)
        self._folded_epoch = 0
        self._letters: dict[int, _Letter] = {}
        self._peers: dict[int, _Peer] = {}

    # --- facts ---------------------------------------------------------------------------------------------------

    def fold(self, event: Event, changed: LimitChanged) -> None:
        """Take in what an owner decided on a key."""
        if event.epoch != self._folded_epoch:
            self._folded_epoch = event.epoch
            self.limiter.change_clock()
        self.limiter.fold(event.entity_id, changed, event.at)

    def touched(self) -> Iterator[str]:
        """The keys that changed since the last call."""
        touched, self.limiter.touched = self.limiter.touched, set()
        return iter(touched)

    def restore(self, held: LimitHeld) -> None:
        """Take a key from a checkpoint."""
        self.limiter.restore(held)

    def on_loaded(self, now: int) -> None:
        """All facts are known: tell the others that a new owner begins here, and ask about what they hold."""
        self.limiter.on_loaded(now)
        for shard in range(self._shards):
            self._letter(shard)

    # --- messages ------------------------------------------------------------------------------------------------

    def hear(self, message: ShardMessage, epoch: int) -> Heard:
        """Take in what another shard says; a message of an owner of the past, or one that came before, says nothing."""
        if not 0 <= message.shard < self._shards:
            return Heard((), ())
        peer = self._peer(message.shard)
        if message.epoch < peer.epoch or (message.epoch == peer.epoch and message.number <= peer.heard):
            return Heard((), ())
        if message.epoch > peer.epoch:
            self._meet(message.shard)
        peer.epoch, peer.heard = message.epoch, message.number
        for word in message.words:
            if word.kind in (LimitWordKind.USED, LimitWordKind.RETURNED):
                self.limiter.hear(word.key, word.attempts, is_used=word.kind is LimitWordKind.USED)
        for ask in message.asks:
            for attempt in self.limiter.ask(ask.key, message.shard, ask.wishes, is_whole=ask.is_whole):
                self._tell(message.shard, LimitWordKind.CHECK, ask.key, attempt)  # it is no news, if it holds it still
        if message.heard_epoch != epoch:
            self._letter(message.shard)  # what it says is meant for the owner before: let it know
            return Heard((), ())
        while peer.returned and peer.returned[0][0] <= message.heard:
            self._gate.has_heard(*peer.returned.popleft())
        return self._hear_home(message)

    def _hear_home(self, message: ShardMessage) -> Heard:
        """What the home of keys says. It may not know yet what was returned to it, and then that is said again."""
        free: list[str] = []
        cancelled: list[tuple[str, str]] = []
        for word in message.words:
            if word.kind in (LimitWordKind.GRANTED, LimitWordKind.CHECK):
                is_news = word.kind is LimitWordKind.GRANTED
                free += self._gate.heard(word.key, word.attempts, self._known, is_news=is_news)
            elif word.kind is LimitWordKind.CANCEL:
                cancelled += [(word.key, attempt) for attempt in word.attempts]
        return Heard(free, cancelled)

    def _meet(self, shard: int) -> None:
        """Another owner of a shard: it knows nothing of what was asked of its shard, and of what its shard holds."""
        self.limiter.forget_wishes(shard)
        for key, attempt in self.limiter.held_by(shard):
            self._tell(shard, LimitWordKind.CHECK, key, attempt)
        self._gate.ask_anew(key for key in self._gate.asked_keys() if home_of(key, self._shards) == shard)

    def decide(self, now: int) -> Iterator[Decided]:
        """What changes now of the keys whose home is here; it is folded already. Who is granted something is told."""
        if len(self._policies.gate_changes) != self._followed:
            self._followed = len(self._policies.gate_changes)
            self.limiter.look_again()
        for shard, key, attempt in self.limiter.to_check(now):
            self._tell(shard, LimitWordKind.CHECK, key, attempt)
        for decided in self.limiter.decide(now):
            for grant in decided.changed.granted:
                for attempt in grant.attempts:
                    self._tell(grant.shard, LimitWordKind.GRANTED, decided.key, attempt)
            for shard, attempt in decided.cancelled:
                self._tell(shard, LimitWordKind.CANCEL, decided.key, attempt)
            yield decided

    def messages(self, now: int, epoch: int) -> Iterator[tuple[int, ShardMessage]]:
        """What is to be told to other shards now, each with its shard."""
        for word in self._gate.words(now):
            kind = LimitWordKind.USED if word.is_used else LimitWordKind.RETURNED
            self._tell(home_of(word.key, self._shards), kind, word.key, word.attempt)
        for ask in self._gate.asks(now):
            self._letter(home_of(ask.key, self._shards)).asks.append(ask)
        letters, self._letters = self._letters, {}
        for shard, letter in letters.items():
            yield from self._sealed(shard, letter, epoch)

    def _sealed(self, shard: int, letter: _Letter, epoch: int) -> Iterator[tuple[int, ShardMessage]]:
        words: list[LimitWord] = []
        asks: list[LimitAsk] = []
        room = BYTES_MAX
        for word in self._words(letter):
            if (size := _size(word.key, word.attempts)) > room:
                yield shard, self._message(shard, words, asks, epoch)
                words, asks, room = [], [], BYTES_MAX
            words.append(word)
            room -= size
        for ask in letter.asks:
            if (size := _size(ask.key, [wish.attempt for wish in ask.wishes])) > room:
                yield shard, self._message(shard, words, asks, epoch)
                words, asks, room = [], [], BYTES_MAX
            asks.append(ask)
            room -= size
        yield shard, self._message(shard, words, asks, epoch)

    def _words(self, letter: _Letter) -> Iterator[LimitWord]:
        """What is said, in portions. Whether one holds something is asked only of those that do, now that all that was
        heard is decided: who hears it takes it for what the home knows."""
        for (kind, key), attempts in letter.words.items():
            said = attempts
            if kind is LimitWordKind.CHECK:
                said = [attempt for attempt in attempts if self.limiter.holds(key, attempt)]
            for begin in range(0, len(said), ATTEMPTS_MAX):
                yield LimitWord(kind=kind, key=key, attempts=tuple(said[begin : begin + ATTEMPTS_MAX]))

    def _message(self, shard: int, words: list[LimitWord], asks: list[LimitAsk], epoch: int) -> ShardMessage:
        peer = self._peer(shard)
        peer.told += 1
        for word in words:
            if word.kind in (LimitWordKind.USED, LimitWordKind.RETURNED):
                for attempt in word.attempts:
                    self._gate.has_told(peer.told, word.key, attempt)
                    peer.returned.append((peer.told, word.key, attempt))
        return ShardMessage(
            shard=self._shard,
            epoch=epoch,
            number=peer.told,
            heard_epoch=peer.epoch,
            heard=peer.heard,
            words=tuple(words),
            asks=tuple(asks),
        )

    def _tell(self, shard: int, kind: LimitWordKind, key: str, attempt: str) -> None:
        self._letter(shard).words.setdefault((kind, key), []).append(attempt)

    def _letter(self, shard: int) -> _Letter:
        letter = self._letters.get(shard)
        if letter is None:
            letter = self._letters[shard] = _Letter()
        return letter

    def _peer(self, shard: int) -> _Peer:
        return self._peers.setdefault(shard, _Peer())

    def next_at(self) -> int | None:
        """When there may be something to decide or to tell without any news."""
        if self._letters:
            return 0
        instants = (self.limiter.next_at(), self._gate.next_at())
        return min((at for at in instants if at is not None), default=None)
