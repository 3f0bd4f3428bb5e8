"""What the client's errors mean to whoever must act."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from confluent_kafka import KafkaError, KafkaException

from schemas.errors import Fatal, Retriable, TidewheelIOError

REPEAT_LOG_S = 10.0  # between two lines that say the same of a broker

_log = structlog.get_logger(__name__)

_LOGIN = "the broker does not accept the credentials: check kafka.sasl.username, its password and kafka.sasl.mechanism"
_REFUSED = {
    KafkaError._AUTHENTICATION: _LOGIN,
    KafkaError.SASL_AUTHENTICATION_FAILED: _LOGIN,
    KafkaError._SSL: "no TLS connection: check kafka.tls.ca, kafka.tls.cert with its key, and that the port speaks TLS",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "this user may not use the topic: grant read, write and describe on it",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "this user may not join the group: grant read on it",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "this user may not do that on the cluster: grant idempotent write",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "this user may not use the transactional id: grant write on it",
    KafkaError.UNSUPPORTED_VERSION: "the broker is too old: use Kafka 2.8 or newer",
    KafkaError.MSG_SIZE_TOO_LARGE: "the broker takes no record that large: check max.message.bytes of the topic",
    KafkaError._INVALID_ARG: "the client does not take a setting or a value: check kafka.properties and kafka.tls",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "the topic or partition does not exist: run `tidewheel topics apply`",
}


def translate(error: KafkaError, what: str) -> TidewheelIOError:
    """The error of one of our classes for what went wrong when we tried `what`."""
    advice = _REFUSED.get(error.code())
    if advice is not None:
        return Fatal(f"Kafka: cannot {what}: {advice} ({error.str()})")
    return Retriable(f"Kafka: cannot {what} now: {error.str()} ({error.name()})")


class Complaints:
    """Says what clients tell their `error_cb`, each kind now and then: they try again several times a second."""

    def __init__(self) -> None:
        self._told: dict[str, float] = {}

    def note(self, error: KafkaError) -> None:
        """Take one in, from any thread."""
        now = time.monotonic()
        if now - self._told.get(error.name(), -REPEAT_LOG_S) >= REPEAT_LOG_S:
            self._told[error.name()] = now
            _log.warning("kafka", reason=error.str(), error=error.name())


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise the client's errors as ours; `what` was tried."""
    try:
        yield
    except KafkaException as error:
        cause = error.args[0]
        if isinstance(cause, KafkaError):
            raise translate(cause, what) from error
        raise Fatal(f"Kafka: cannot {what}: {cause}") from error
