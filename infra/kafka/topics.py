"""Topics on the brokers: what is wanted, what is there, the difference between the two, and what may be done about it.

`compare` is pure. Nothing here removes a topic or a partition, and what may remove records is done only for a topic
that the operator named.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import admin as _admin

from infra.kafka.errors import translate, translated
from infra.kafka.names import Names
from infra.kafka.settings import KafkaSettings
from infra.topics import READY_PREFIX, TopicCatalog, TopicSpec
from schemas.errors import Fatal, Retriable, TidewheelIOError
from schemas.topics import REPLIES, TASK_EVENTS, TASK_REQUESTS

client: Any = _admin  # its types do not say what it exports

REQUEST_S = 10.0  # for one question to the brokers
LOOK_EVERY_S = 0.02  # between looks for a topic that was just created
SETTLE_S = 15.0  # until every broker shows what one of them has confirmed
_FOREVER = "-1"
_ALL_DOWN = "_ALL_BROKERS_DOWN"  # says nothing of why

_MEANINGS: Mapping[str, str] = {
    "cleanup.policy": "says whether old records are removed by age (delete) or by key (compact)",
    "retention.ms": "is how long records are kept, in milliseconds",
    "retention.bytes": "removes the oldest records of a partition beyond this size, however young they are",
    "max.message.bytes": "is the largest batch of records that is taken",
    "min.insync.replicas": "is how many copies must have a record before it counts as written",
    "unclean.leader.election.enable": "lets a copy that is behind become the truth: acknowledged records would be lost",
    "message.timestamp.type": "says whose clock retention goes by; that of producers may be wrong",
    "segment.ms": "is after how long a segment ends; only ended ones are removed or compacted",
    "segment.bytes": "is at what size a segment ends; only ended ones are removed or compacted",
    "min.cleanable.dirty.ratio": "is which share of changed records starts a compaction",
    "max.compaction.lag.ms": "is the longest time until a record is compacted",
    "delete.retention.ms": "is how long the mark of a removed key stays, which a takeover must be able to read",
}


class Change(StrEnum):
    """What it takes to bring a difference to an end."""

    SETTING = "setting"  # may be changed at any time
    LOSES_DATA = "loses_data"  # the brokers would remove records that are there
    FIXED = "fixed"  # cannot be changed in place


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTopic:
    """A topic as the catalog wants it, by its name on the brokers."""

    name: str
    spec: TopicSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTopic:
    """A topic as the brokers have it."""

    name: str
    partitions: int
    replication: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing about a topic that is not as wanted; `meaning` and `remedy` are for the operator."""

    topic: str
    name: str
    wanted: str
    found: str
    change: Change
    meaning: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a comparison found. Topics are named as the brokers know them."""

    to_create: tuple[WantedTopic, ...]
    equal: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def is_done(self) -> bool:
        """Whether the brokers have what is wanted."""
        return not self.to_create and not self.differences

    def allowed(self, *, change_settings: bool, allow_data_loss: Collection[str]) -> tuple[Difference, ...]:
        """The differences that may be ended with these permissions; `allow_data_loss` names topics."""
        return tuple(
            one
            for one in self.differences
            if (one.change is Change.SETTING and change_settings)
            or (one.change is Change.LOSES_DATA and one.topic in allow_data_loss)
        )


# --- the comparison ---------------------------------------------------------------------------------------------------


def wanted_topics(catalog: TopicCatalog, prefix: str, found: Iterable[str]) -> tuple[WantedTopic, ...]:
    """What the brokers should have: the topics of the catalog, and of the queues those that are `found` there.

    Topics of queues are created by whoever uses them first.
    """
    exact = [WantedTopic(name=f"{prefix}{spec.name}", spec=spec) for spec in catalog if not spec.is_prefix]
    kinds = [(f"{prefix}{spec.name}", spec) for spec in catalog if spec.is_prefix]
    of_kinds = [
        WantedTopic(name=name, spec=spec)
        for name in sorted(found)
        for begin, spec in kinds
        if name.startswith(begin) and len(name) > len(begin)
    ]
    return (*exact, *of_kinds)


def compare(wanted: Iterable[WantedTopic], found: Mapping[str, FoundTopic]) -> Plan:
    """What it takes to get from `found` to `wanted`."""
    to_create, equal, differences = [], [], []
    for topic in wanted:
        there = found.get(topic.name)
        if there is None:
            to_create.append(topic)
            continue
        of_topic = _differences(topic, there)
        differences += of_topic
        if not of_topic:
            equal.append(topic.name)
    return Plan(to_create=tuple(to_create), equal=tuple(equal), differences=tuple(differences))


def _differences(wanted: WantedTopic, found: FoundTopic) -> list[Difference]:
    differences = []
    if found.partitions != wanted.spec.partitions:
        differences.append(_of_partitions(wanted, found))
    if found.replication != wanted.spec.replication:
        differences.append(_of_replication(wanted, found))
    for name, value in wanted.spec.settings.items():
        there = found.settings.get(name, "not set")
        if there != value:
            differences.append(_of_setting(wanted, name, value, there))
    return differences


def _of_partitions(wanted: WantedTopic, found: FoundTopic) -> Difference:
    name, count = wanted.spec.name, found.partitions
    if name == READY_PREFIX:
        meaning = f"the topic is used as it is: at most {count} workers share this priority of the queue"
        remedy = (
            f"leave it, or set kafka.ready_partitions to {count}; or remove the topic while no worker of the queue "
            "runs: it is created anew, and the shards send what waits again"
        )
    elif name == REPLIES:
        meaning, remedy = (
            "API processes choose among the partitions that are there",
            f"set kafka.reply_partitions={count}",
        )
    elif wanted.spec.is_kept_until_trimmed:
        meaning = "a slot of the delay wheel is found by its number: with other partitions tasks are not found any more"
        remedy = (
            "set shards to what task-requests has partitions, of which each has its slots here; if that is right, the "
            "topic was made by hand: remove it before any task waits in it, and apply again"
        )
    elif wanted.spec.partitions == 1:
        meaning, remedy = "only the first partition is used", "leave it, or remove the topic and apply again"
    else:
        meaning = (
            "the number of shards is fixed for the life of a cluster: with another one tasks are not found any more"
        )
        remedy = (
            f"set shards={count}; for a new cluster with {wanted.spec.partitions} shards choose another kafka.prefix"
        )
    return Difference(
        topic=wanted.name,
        name="partitions",
        wanted=str(wanted.spec.partitions),
        found=str(count),
        change=Change.FIXED,
        meaning=meaning,
        remedy=remedy,
    )


def _of_replication(wanted: WantedTopic, found: FoundTopic) -> Difference:
    fewer = found.replication < wanted.spec.replication
    return Difference(
        topic=wanted.name,
        name="replication",
        wanted=str(wanted.spec.replication),
        found=str(found.replication),
        change=Change.FIXED,
        meaning="fewer brokers may fail than was meant" if fewer else "there are more copies than was meant",
        remedy=f"move the copies with kafka-reassign-partitions.sh, or set kafka.replication to {found.replication}",
    )


def _of_setting(topic: WantedTopic, name: str, wanted: str, found: str) -> Difference:
    loses = _loses_data(name, wanted, found)
    change = Change.LOSES_DATA if loses else Change.SETTING
    meaning = f"{name} {_MEANINGS[name]}"
    if loses:
        meaning += "; with the wanted value the brokers remove records that are there now"
        remedy = f"tidewheel topics apply --allow-data-loss {topic.name}, if these records are not needed"
        if name == "retention.ms" and topic.spec.name == TASK_EVENTS:
            remedy += ", or set kafka.event_retention_s to what is there"
    else:
        remedy = "tidewheel topics apply --change-settings"
    return Difference(
        topic=topic.name, name=name, wanted=wanted, found=found, change=change, meaning=meaning, remedy=remedy
    )


def _loses_data(name: str, wanted: str, found: str) -> bool:
    if name == "cleanup.policy":
        return True
    return name in ("retention.ms", "retention.bytes") and wanted != _FOREVER and _is_less(wanted, found)


def _is_less(wanted: str, found: str) -> bool:
    """Whether less is kept than now; what cannot be compared counts as less."""
    return found == _FOREVER or not found.isdigit() or int(wanted) < int(found)


# --- the brokers ------------------------------------------------------------------------------------------------------


class TopicAdmin:
    """Asks the brokers about topics, creates them and changes their settings. Each call has a deadline.

    All calls raise Retriable if no broker answers, and Fatal if they refuse.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.prefix = settings.prefix
        self._settings = settings
        self._bootstrap, self._manner = settings.bootstrap, settings.manner
        self._errors: deque[KafkaError] = deque(maxlen=16)  # why no broker answers is told in no other way
        # What goes wrong is told by what is raised; the client's own lines would stand between those of a command.
        own = {
            "client.id": "tidewheel-topics",
            "log_level": 0,
            "error_cb": self._errors.append,
            "allow.auto.create.topics": False,  # a question must not create what it asks for
        }
        with translated("set up a client"):
            self._client = client.AdminClient(settings.client(**own))

    def partition_counts(self, timeout_s: float) -> dict[str, int]:
        """How many partitions each of our topics has, by its name on the brokers. Needs no right but to describe."""
        return {name: len(topic.partitions) for name, topic in self._listed(timeout_s).items()}

    def ping(self, timeout_s: float) -> None:
        """Let a broker answer, with as little as possible: a cluster may have thousands of partitions to tell of."""
        self._metadata(timeout_s, f"{self.prefix}{TASK_REQUESTS}")

    def found(self) -> dict[str, FoundTopic]:
        """The topics whose names begin with the prefix, by name; without those that not every broker knows (yet)."""
        ours = self._listed(REQUEST_S)
        settings = self._settings_of(ours)
        return {
            name: FoundTopic(
                name=name,
                partitions=len(topic.partitions),
                replication=min((len(one.replicas) for one in topic.partitions.values()), default=0),
                settings=settings[name],
            )
            for name, topic in ours.items()
            if name in settings
        }

    def create(self, topic: WantedTopic) -> bool:
        """Create a topic; whether that was done. One that is there already is left as it is."""
        spec = topic.spec
        new = client.NewTopic(topic.name, spec.partitions, spec.replication, config=dict(spec.settings))
        (created,) = self._client.create_topics([new], operation_timeout=REQUEST_S, request_timeout=REQUEST_S).values()
        try:
            created.result(2 * REQUEST_S)
        except KafkaException as error:
            cause = error.args[0]
            if cause.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise _refusal(cause, topic) from error
            return False
        return True

    def change(self, topic: str, settings: Mapping[str, str]) -> None:
        """Set settings of a topic; the others stay as they are."""
        entries = [
            client.ConfigEntry(name, value, incremental_operation=client.AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = client.ConfigResource(client.ResourceType.TOPIC, topic, incremental_configs=entries)
        (changed,) = self._client.incremental_alter_configs([resource], request_timeout=REQUEST_S).values()
        with translated(f"change settings of {topic}"):
            changed.result(2 * REQUEST_S)

    def remove_all(self) -> None:
        """Remove the topics whose names begin with the prefix, and all that is in them. ValueError: there is none."""
        if not self.prefix:
            raise ValueError("prefix: empty, so that every topic of the brokers would be meant")
        ours = list(self._listed(REQUEST_S))
        removed = self._client.delete_topics(ours, operation_timeout=REQUEST_S) if ours else {}
        for name, done in removed.items():
            with translated(f"remove the topic {name}"):
                done.result(2 * REQUEST_S)

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has; None: it is not there (yet)."""
        try:
            found = self._client.list_topics(topic, timeout=REQUEST_S).topics[topic]
        except KafkaException as error:
            raise self._unreachable(error) from error
        if found.error is None:
            return len(found.partitions)
        if found.error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.LEADER_NOT_AVAILABLE):
            return None
        raise translate(found.error, f"look up the topic {topic}")

    def await_partitions(self, topic: str) -> int:
        """How many partitions a topic has that was just created. Retriable: it is not there after `REQUEST_S`."""
        found: int | None = None

        def is_there() -> bool:
            nonlocal found
            found = self.partitions(topic)
            return found is not None

        _wait_until(is_there, REQUEST_S)
        if found is None:
            raise Retriable(f"Kafka: {topic} was created, but the brokers do not know it after {REQUEST_S:g} s")
        return found

    def await_everywhere(self, topics: Set[str]) -> None:
        """Wait until each broker has shown these topics, for up to `SETTLE_S`: whoever asks next asks any of them.

        A client asks the broker that it happens to be connected to, and the answer says which one that was.
        """
        silent = {broker.id: f"{broker.host}:{broker.port}" for broker in self._metadata(REQUEST_S).brokers.values()}
        give_up_at = time.monotonic() + SETTLE_S
        while silent and time.monotonic() < give_up_at:
            another = TopicAdmin(replace(self._settings, bootstrap=next(iter(silent.values()))))
            try:
                answer = another._metadata(REQUEST_S)
            except Retriable:  # it went away a moment ago
                answer = self._metadata(REQUEST_S)
            if topics <= answer.topics.keys():
                silent.pop(answer.orig_broker_id, None)
            time.sleep(LOOK_EVERY_S)

    def _metadata(self, timeout_s: float, topic: str | None = None) -> Any:
        try:
            return self._client.list_topics(topic, timeout=timeout_s)
        except KafkaException as error:
            raise self._unreachable(error) from error

    def _listed(self, timeout_s: float) -> dict[str, Any]:
        listed = self._metadata(timeout_s).topics
        return {name: topic for name, topic in listed.items() if name.startswith(self.prefix) and topic.error is None}

    def _settings_of(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        resources = [client.ConfigResource(client.ResourceType.TOPIC, name) for name in topics]
        if not resources:
            return {}
        answers = self._client.describe_configs(resources, request_timeout=REQUEST_S)
        found = {}
        for resource, answer in answers.items():
            try:
                entries = answer.result(2 * REQUEST_S)
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:  # of a broker that is a moment behind
                    raise translate(error.args[0], f"read the settings of {resource.name}") from error
                continue
            found[resource.name] = {entry.name: str(entry.value) for entry in entries.values()}
        return found

    def _unreachable(self, error: KafkaException) -> TidewheelIOError:
        self._client.poll(0)  # hands over what went wrong meanwhile
        told = [one for one in self._errors if one.name() != _ALL_DOWN]
        for one in told:
            meant = translate(one, f"use the brokers {self._bootstrap}")
            if isinstance(meant, Fatal):
                return meant
        reason = told[-1].str() if told else error.args[0].str()
        return Retriable(f"Kafka: no broker of {self._bootstrap} answers: {reason}; asked {self._manner}")


def _refusal(error: KafkaError, topic: WantedTopic) -> TidewheelIOError:
    what = f"create the topic {topic.name}"
    if error.code() == KafkaError.INVALID_REPLICATION_FACTOR:
        copies = topic.spec.replication
        return Fatal(
            f"Kafka: cannot {what}: there are fewer than {copies} brokers; set kafka.replication ({error.str()})"
        )
    if error.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED):
        return Fatal(
            f"Kafka: this user may not {what}: grant create on it, or on names that begin with kafka.prefix; or create "
            f"it yourself, with {topic.spec.partitions} partitions ({error.str()})"
        )
    if error.code() in (KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION, KafkaError.TOPIC_EXCEPTION):
        return Fatal(f"Kafka: the brokers do not allow to {what}: {error.str()}")
    return translate(error, what)


def plan(admin: TopicAdmin, catalog: TopicCatalog) -> Plan:
    """What the brokers lack of a catalog, or have otherwise. Raises Retriable, Fatal."""
    found = admin.found()
    return compare(wanted_topics(catalog, admin.prefix, found), found)


def apply(
    admin: TopicAdmin, planned: Plan, *, change_settings: bool = False, allow_data_loss: Collection[str] = ()
) -> tuple[Difference, ...]:
    """Create what is missing, change what may be changed; says which differences were ended. Raises Retriable, Fatal.

    Afterwards every broker shows it, or `SETTLE_S` are over: a broker that is asked later may be a moment behind.
    Settings of topics that are there are changed only with `change_settings`; such as may remove records only for the
    topics that `allow_data_loss` names.
    """
    created = [topic for topic in planned.to_create if admin.create(topic)]
    allowed = planned.allowed(change_settings=change_settings, allow_data_loss=allow_data_loss)
    for name in sorted({one.topic for one in allowed}):
        admin.change(name, {one.name: one.wanted for one in allowed if one.topic == name})
    if created:
        admin.await_everywhere({topic.name for topic in created})
    if created or allowed:
        _wait_until(lambda: _shows(admin.found(), created, allowed), SETTLE_S)
    return allowed


def _shows(found: Mapping[str, FoundTopic], created: Collection[WantedTopic], ended: Iterable[Difference]) -> bool:
    is_changed = all(one.topic in found and found[one.topic].settings.get(one.name) == one.wanted for one in ended)
    return is_changed and compare(created, found).is_done


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> None:
    """Look again and again until something is so, or the time is over."""
    give_up_at = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < give_up_at:
        time.sleep(LOOK_EVERY_S)


def ensure_topic(settings: KafkaSettings, catalog: TopicCatalog, topic: str) -> int:
    """Create a topic of the catalog unless it is there; how many partitions it has, which may not be as many as wanted.

    Several processes may do so at once. Retriable: not within some `REQUEST_S`; Fatal: the brokers refuse.
    """
    admin = TopicAdmin(settings)
    name = Names(settings.prefix).physical(topic)
    admin.create(WantedTopic(name=name, spec=catalog.spec(topic)))
    return admin.await_partitions(name)
