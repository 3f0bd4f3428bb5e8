"""How the broker is reached: the properties that every client of librdkafka is made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_PREFIX = "tidewheel."

# In force for every client. A broker that went away is noticed by the client's own deadlines, and one that came back
# is found within a second: the defaults are 30 s to connect, 60 s for an answer and 10 s between tries.
_CLIENT: Mapping[str, object] = {
    "client.id": "tidewheel",
    # What goes wrong with a connection is told to `error_cb` too: in the log it would be 20 lines a second per client.
    "log_level": 2,
    "statistics.interval.ms": 0,
    "socket.keepalive.enable": True,
    "socket.nagle.disable": True,  # small requests follow each other closely
    "socket.connection.setup.timeout.ms": 10_000,
    "socket.timeout.ms": 10_000,
    "reconnect.backoff.ms": 100,
    "reconnect.backoff.max.ms": 1_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Where the brokers are, and what our names begin with there.

    `bootstrap` is one or more host:port, separated by commas. `prefix` begins the names of all topics, groups and
    transactional ids on the brokers. `security` holds ready-made properties of librdkafka for SASL and TLS, and those
    that the operator passes through; they may be secret and are never shown.
    """

    bootstrap: str
    prefix: str = DEFAULT_PREFIX
    security: Mapping[str, object] = field(default_factory=dict, repr=False)

    def client(self, **more: object) -> dict[str, object]:
        """The properties of a client. `more` wins over what all clients have, and the operator's over both."""
        return {**_CLIENT, **more, "bootstrap.servers": self.bootstrap, **self.security}

    @property
    def manner(self) -> str:
        """How brokers are asked. One that expects it otherwise ends connections, and the client does not say why."""
        protocol = str(self.security.get("security.protocol", "plaintext")).lower()
        has_certificate = any(name in self.security for name in ("ssl.certificate.location", "ssl.keystore.location"))
        facts = {
            "TLS (kafka.tls.enabled)": protocol.endswith("ssl"),
            "a certificate of ours (kafka.tls.cert)": has_certificate,
            "SASL (kafka.sasl.mechanism)": protocol.startswith("sasl"),
        }
        return ", ".join(f"{'with' if is_so else 'without'} {what}" for what, is_so in facts.items())


# What the guarantees stand on, or what each client must have for itself: not the operator's to change.
_OWN = "the adapter sets it for each client"
REFUSED_PROPERTIES: Mapping[str, str] = {
    "enable.idempotence": "without it a retry of the client may write an event twice, or out of order",
    "acks": "an event counts once it is acknowledged, so all copies in sync must have it",
    "request.required.acks": "an event counts once it is acknowledged, so all copies in sync must have it",
    "max.in.flight": "more than 5 would break the order of events",
    "max.in.flight.requests.per.connection": "more than 5 would break the order of events",
    "enable.gapless.guarantee": "it ends a producer at the first timeout; the adapter handles gaps itself",
    "partitioner": "the key decides the shard, in the same way for producers in every language",
    "transactional.id": "the shard's owner is fenced by it",
    "isolation.level": "checkpoints that were not finished must not be read",
    "enable.auto.commit": "a record counts as read when it was dealt with, not when it was fetched",
    "enable.auto.offset.store": "a record counts as read when it was dealt with, not when it was fetched",
    "auto.offset.reset": "a group that begins must not pass over what waits",
    "enable.partition.eof": _OWN,
    "group.id": _OWN,
    "group.instance.id": "a static member keeps its shards while it is down, so nobody takes them over",
    "group.protocol": "the time after which shards are taken over is known for classic groups only",
    "group.remote.assignor": "requests and reports of a shard must go to the same owner",
    "partition.assignment.strategy": "requests and reports of a shard must go to the same owner",
    "allow.auto.create.topics": "topics are created by `tidewheel topics apply`, with the right number of partitions",
    "bootstrap.servers": "it is the setting kafka.bootstrap",
    "metadata.broker.list": "it is the setting kafka.bootstrap",
    "message.timeout.ms": "an event that timed out alone would leave a hole; the adapter has a deadline of its own",
    "delivery.timeout.ms": "an event that timed out alone would leave a hole; the adapter has a deadline of its own",
    "delivery.report.only.error": "every acknowledgement releases what follows from it",
    "statistics.interval.ms": _OWN,
}
