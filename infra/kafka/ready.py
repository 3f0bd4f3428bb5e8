"""Which ready topics can be written, found out beside the loop that writes them.

A ready topic is created by whoever uses it first. The brokers may refuse that (rights, a policy), it may be removed
while tasks wait, or have another number of partitions than the catalog says. None of this may hold up other queues, nor
the loop: questions are asked in one thread of their own, and the answers remembered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import structlog

from infra.kafka.fetching import LEAVE_S, within
from infra.kafka.names import Names
from infra.kafka.settings import KafkaSettings
from infra.kafka.topics import TopicAdmin, WantedTopic
from infra.topics import TopicCatalog
from schemas.errors import Retriable, TidewheelIOError

AGAIN_S, AGAIN_S_MAX = 0.5, 60.0  # between tries of a topic that cannot be written: doubled each time
REFRESH_S = 60.0  # between looks at one that can: it may have got more partitions, or been made anew

_log = structlog.get_logger(__name__)


class _Ready:
    """What is known of a topic."""

    __slots__ = ("is_asked", "look_at", "partitions", "reason", "wait_s")

    def __init__(self) -> None:
        self.partitions = 0
        self.reason: str | None = None
        self.wait_s = AGAIN_S
        self.look_at = 0.0
        self.is_asked = False


class ReadyTopics:
    """The ready topics that one connection writes. All but `held` is for one thread, or guarded by it."""

    def __init__(self, settings: KafkaSettings, catalog: TopicCatalog, on_change: Callable[[], None]) -> None:
        """`on_change` is called, in another thread, when a topic can be written that could not be."""
        self._settings, self._catalog, self._on_change = settings, catalog, on_change
        self._names = Names(settings.prefix)
        self._topics: dict[str, _Ready] = {}
        self._to_ask: list[str] = []
        self._news = threading.Condition()  # of what is to be asked, and of the end; guards `_topics`, too
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def partitions(self, topic: str) -> int:
        """How many partitions of a topic can be written; 0: none now."""
        known = self._topics.get(topic)
        if known is None or (not known.is_asked and time.monotonic() >= known.look_at):
            known = self._ask(topic)
        return known.partitions

    def refused(self, topic: str, failure: TidewheelIOError) -> None:
        """A record for the topic was not taken: it is looked up again, after a pause that grows each time."""
        with self._news:
            self._hold(topic, self._topics.setdefault(topic, _Ready()), failure)

    def taken(self, topic: str) -> None:
        """Records for the topic were taken: the next failure is a first one."""
        known = self._topics.get(topic)
        if known is not None and known.partitions:
            known.wait_s = AGAIN_S

    def held(self) -> Mapping[str, str]:
        """The topics that cannot be written, and why; from any thread."""
        with self._news:
            return {topic: one.reason for topic, one in self._topics.items() if one.reason is not None}

    def close(self) -> None:
        """Ask no more."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._thread is not None:
            within(LEAVE_S, self._thread.join)

    def _ask(self, topic: str) -> _Ready:
        with self._news:
            known = self._topics.setdefault(topic, _Ready())
            if not known.is_asked and not self._is_closed:
                known.is_asked = True
                self._to_ask.append(topic)
                self._news.notify()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="ready-topics", daemon=True)
                    self._thread.start()
        return known

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        admin: TopicAdmin | None = None
        while (topic := self._next()) is not None:
            try:
                admin = admin or TopicAdmin(self._settings)
                partitions = self._look_up(admin, topic)
            except TidewheelIOError as error:
                self._not_found(topic, error)
            else:
                self._open(topic, partitions)

    def _next(self) -> str | None:
        with self._news:
            while not self._to_ask and not self._is_closed:
                self._news.wait()
            return None if self._is_closed else self._to_ask.pop(0)

    def _look_up(self, admin: TopicAdmin, topic: str) -> int:
        name = self._names.physical(topic)
        found = admin.partitions(name)
        if found is None:
            admin.create(WantedTopic(name=name, spec=self._catalog.spec(topic)))
            found = admin.await_partitions(name)
        return found

    def _not_found(self, topic: str, failure: TidewheelIOError) -> None:
        with self._news:
            known = self._topics[topic]
            known.is_asked = False
            if known.partitions and isinstance(failure, Retriable):
                known.look_at = time.monotonic() + AGAIN_S_MAX  # whoever does not answer now may well take records
            else:
                self._hold(topic, known, failure)

    def _open(self, topic: str, partitions: int) -> None:
        with self._news:
            known = self._topics[topic]
            wanted = self._catalog.spec(topic).partitions
            if partitions != wanted and known.partitions != partitions:
                _log.warning("a ready topic is used as it is", topic=topic, partitions=partitions, configured=wanted)
            was_held, known.partitions = not known.partitions, partitions
            known.is_asked = False
            known.look_at = time.monotonic() + REFRESH_S
            if known.reason is not None:
                _log.info("a ready topic can be looked up again", topic=topic, partitions=partitions)
            known.reason = None
        if was_held:
            self._on_change()

    def _hold(self, topic: str, known: _Ready, failure: TidewheelIOError) -> None:
        if known.reason is not None and not known.partitions and known.look_at > time.monotonic():
            return  # many records, one failure
        known.partitions, known.reason = 0, str(failure)
        known.look_at = time.monotonic() + known.wait_s
        known.wait_s = min(2 * known.wait_s, AGAIN_S_MAX)
        _log.warning("a ready topic cannot be written, its tasks wait", topic=topic, reason=known.reason)
