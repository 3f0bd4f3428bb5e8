"""A log that notes when its thread last came by: whoever owns a loop that stands still cannot say so itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from scheduler.ports import Entry, Log, Member, OnAck, Reader, TopicPartition


class WatchedLog:
    """Implements `ports.Log` by another one."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._turned_at = time.monotonic()

    def turned_s(self) -> float:
        """Seconds since the loop last polled; from any thread."""
        return time.monotonic() - self._turned_at

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        return self._log.partitions(topic)

    def ready_partitions(self, topic: str) -> int:
        """How many partitions of a ready topic can be written now."""
        return self._log.ready_partitions(topic)

    def append(self, entries: Sequence[Entry], on_ack: OnAck | None = None) -> None:
        """Send entries."""
        self._log.append(entries, on_ack)

    def poll(self, timeout_s: float) -> None:
        """Give the log the thread."""
        self._turned_at = time.monotonic()
        self._log.poll(timeout_s)

    def wake(self) -> None:
        """End a waiting `poll`."""
        self._log.wake()

    def reader(self) -> Reader:
        """A reader of explicit partitions."""
        return self._log.reader()

    def member(self, group: str, topics: Iterable[str]) -> Member:
        """Join a group."""
        return self._log.member(group, topics)

    def end_offset(self, partition: TopicPartition) -> int:
        """The offset that the next record will have, at least."""
        return self._log.end_offset(partition)

    def is_disturbed(self) -> bool:
        """As the log says."""
        return self._log.is_disturbed()

    def trim(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below are not needed any more."""
        self._log.trim(partition, before_offset)

    def close(self) -> None:
        """Disconnect."""
        self._log.close()
