"""Removes records that were read from topics that time removes nothing of: the slots of the delay wheel."""

from __future__ import annotations

from typing import Any

import structlog
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka import admin as _admin

from infra.kafka.errors import Complaints
from infra.kafka.names import Names
from infra.kafka.settings import KafkaSettings
from scheduler.ports import TopicPartition

client: Any = _admin  # its types do not say what it exports

EVERY_S = 60.0  # between two requests: nothing depends on it but the room on the brokers' disks
REQUEST_S = 30.0
PARTITIONS_MAX = 1_000  # in one request

_log = structlog.get_logger(__name__)


class Trimmer:
    """Asks the brokers now and then, without waiting for their answer. What is refused is asked for again later."""

    def __init__(self, settings: KafkaSettings, client_id: str) -> None:
        self._settings, self._names = settings, Names(settings.prefix)
        self._client_id = client_id
        self._complaints = Complaints()
        self._client: Any = None
        self._wanted: dict[TopicPartition, int] = {}
        self._asked: dict[Any, Any] = {}
        self._next_at = 0.0

    def want(self, partition: TopicPartition, before_offset: int) -> None:
        """Records below `before_offset` may go."""
        self._wanted[partition] = before_offset

    def turn(self, now: float) -> None:
        """Ask, if it is time; `now` is of a monotonic clock, in seconds."""
        if now < self._next_at or not (self._wanted or self._asked):
            return
        self._next_at = now + EVERY_S
        self._look_at_answers()
        offsets = [
            KafkaPartition(self._names.physical(topic), number, offset)
            for (topic, number), offset in list(self._wanted.items())[:PARTITIONS_MAX]
        ]
        self._wanted = dict(list(self._wanted.items())[PARTITIONS_MAX:])
        if offsets:
            self._asked = self._delete(offsets)

    def _delete(self, offsets: list[KafkaPartition]) -> dict[Any, Any]:
        try:
            if self._client is None:
                own = {"client.id": self._client_id, "log_level": 0, "error_cb": self._complaints.note}
                self._client = client.AdminClient(self._settings.client(**own))
            asked: dict[Any, Any] = self._client.delete_records(offsets, request_timeout=REQUEST_S, operation_timeout=0)
        except KafkaException as error:
            self._complain(error)
            return {}
        return asked

    def _look_at_answers(self) -> None:
        """A refusal is said, and no more: the next opening of the slot asks for all that was asked for here."""
        errors = [error for future in self._asked.values() if future.done() and (error := future.exception())]
        self._asked = {}
        if errors:
            self._complain(errors[0])

    def _complain(self, error: BaseException) -> None:
        _log.warning(
            "read records of the delay wheel stay on the brokers' disks",
            reason=str(error),
            advice="if it is not allowed, grant this user `delete` on the topics delay.*",
        )
