"""Settings of the processes of a cluster, as values: what there is, what is allowed, what is made of it.

Where they come from is in `tidewheel.configuration`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from infra.kafka.settings import DEFAULT_PREFIX, REFUSED_PROPERTIES, KafkaSettings
from infra.topics import (
    CLUSTER_REPLY_PARTITIONS,
    CLUSTER_SHARDS,
    EVENT_RETENTION_MS,
    READY_PARTITIONS,
    ClusterSizes,
    TopicCatalog,
    cluster_catalog,
)
from scheduler.core.admission import AdmissionSettings
from schemas.priorities import DEFAULT_WEIGHTS, WEIGHT_MAX, Weights
from tidewheel.settings import DEFAULT_PORT
from workers.settings import SLOTS_MAX

if TYPE_CHECKING:
    from infra.cassandra import CassandraSettings

PREFIX = "TIDEWHEEL_"
SHARDS_MAX = 1024  # each costs a partition of four topics
_DAY_S = 86_400.0


class Problem(NamedTuple):
    """What is wrong with one setting. `where` is the variable, the place in the file or the option it came from."""

    name: str
    where: str
    message: str
    allowed: str


class SettingsError(Exception):
    """Settings that are not allowed; all that is wrong, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{one.where} {one.message}: {one.allowed}" for one in self.problems))


# --- the settings -----------------------------------------------------------------------------------------------------


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _setting(default: Any, meaning: str, allowed: str, **bounds: Any) -> Any:
    return Field(default, description=meaning, json_schema_extra={"allowed": allowed}, **bounds)


def _file(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise ValueError(f"there is no file {path}")
    return path


def _listed(given: object) -> object:
    """A list, or text with commas."""
    return tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given


def _named(given: object) -> object:
    """A table, or text of the form name=value,name=value."""
    if not isinstance(given, str):
        return given
    pairs = {}
    for pair in given.split(","):
        name, separator, value = pair.partition("=")
        if not separator or not name.strip():
            raise ValueError(f"{pair.strip()!r} is not of the form name=value")
        pairs[name.strip()] = value.strip()
    return pairs


def _unrefused(given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in REFUSED_PROPERTIES:
            raise ValueError(f"{name} cannot be set: {REFUSED_PROPERTIES[name]}")
    return given


ExistingFile = Annotated[Path | None, AfterValidator(_file)]
_A_FILE = "the path of a file that can be read"
_PORT = "a port, 1 to 65535"


class Tls(_Section):
    """TLS of one connection."""

    enabled: bool = _setting(False, "Whether to use TLS.", "true or false")
    ca: ExistingFile = _setting(None, "Certificates of the authorities to trust; without it the system's.", _A_FILE)
    cert: ExistingFile = _setting(None, "Our certificate, if the server asks for one.", _A_FILE)
    key: ExistingFile = _setting(None, "The key of our certificate.", _A_FILE)
    key_password: SecretStr | None = _setting(None, "The password of the key.", "any text")
    verify: bool = _setting(True, "Whether the server's certificate and name are checked.", "true or false")

    def path(self, name: Literal["ca", "cert", "key"]) -> str | None:
        """The path of one of the files, as text."""
        file: Path | None = getattr(self, name)
        return None if file is None else str(file)


class Sasl(_Section):
    """How we say who we are to Kafka."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = _setting(
        None, "The SASL mechanism; without it there is no SASL.", "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"
    )
    username: str | None = _setting(None, "The user.", "any text")
    password: SecretStr | None = _setting(None, "The user's password.", "any text")
    password_file: ExistingFile = _setting(None, "A file that holds the password.", _A_FILE)


class Kafka(_Section):
    """The brokers, and our topics on them."""

    bootstrap: str | None = _setting(
        None,
        "The brokers to begin with. What is needed to run on Kafka at all.",
        "host:port, or several with commas",
        pattern=r"^[^\s,]+:\d{1,5}(,[^\s,]+:\d{1,5})*$",
    )
    prefix: str = _setting(
        DEFAULT_PREFIX,
        "What the names of our topics, groups and transactional ids begin with: one for each cluster.",
        "up to 64 of A-Z a-z 0-9 . _ -",
        pattern=r"^[A-Za-z0-9._-]{0,64}$",
    )
    replication: int = _setting(
        1, "Copies of each topic; 3 in production.", "from 1 to the number of brokers", ge=1, le=32
    )
    min_insync: int | None = _setting(
        None,
        "Copies that must have a record before it counts as written; by default one less than there are.",
        "from 1 to kafka.replication",
        ge=1,
        le=32,
    )
    ready_partitions: int = _setting(
        READY_PARTITIONS,
        "Partitions of each topic of a queue: at most so many workers share one priority of a queue.",
        "from 1 to 256",
        ge=1,
        le=256,
    )
    reply_partitions: int = _setting(
        CLUSTER_REPLY_PARTITIONS,
        "Partitions of the replies; several times the API processes.",
        "from 1 to 1024",
        ge=1,
        le=1024,
    )
    event_retention_s: float = _setting(
        EVENT_RETENTION_MS / 1000,
        "How long events are kept, in seconds.",
        "from 3600 to 10 years",
        ge=3600,
        le=3650 * _DAY_S,
    )
    sasl: Sasl = Sasl()
    tls: Tls = Tls()
    properties: Annotated[dict[str, str | int | float | bool], BeforeValidator(_named), AfterValidator(_unrefused)] = (
        _setting(
            {},
            "Further properties of librdkafka, for all clients; they win over ours.",
            "a table of names and values; in the environment name=value,name=value",
        )
    )


_Consistency = Literal["ONE", "LOCAL_ONE", "QUORUM", "LOCAL_QUORUM", "ALL"]
_CONSISTENCIES = "ONE, LOCAL_ONE, QUORUM, LOCAL_QUORUM or ALL"


class Cassandra(_Section):
    """The database of the view."""

    hosts: Annotated[tuple[str, ...], BeforeValidator(_listed)] = _setting(
        (), "The nodes to begin with.", "a list of names or addresses; in the environment with commas"
    )
    port: int = _setting(9042, "The nodes' port.", _PORT, ge=1, le=65535)
    keyspace: str = _setting(
        "tidewheel",
        "The keyspace of the view.",
        "up to 48 of a-z 0-9 _, a letter first",
        pattern=r"^[a-z][a-z0-9_]{0,47}$",
    )
    datacenter: str = _setting(
        "datacenter1", "The datacenter whose nodes are asked.", "the name that `nodetool status` shows", min_length=1
    )
    replication: int = _setting(
        1,
        "Copies of each row, for a keyspace that is created; 3 in production.",
        "from 1 to the number of nodes",
        ge=1,
        le=32,
    )
    write_consistency: _Consistency = _setting("LOCAL_QUORUM", "Copies that must have a write.", _CONSISTENCIES)
    read_consistency: _Consistency = _setting("LOCAL_QUORUM", "Copies that are asked.", _CONSISTENCIES)
    connect_timeout_s: float = _setting(
        5.0, "How long connecting to one node may take.", "seconds, from 0.1 to 60", ge=0.1, le=60
    )
    request_timeout_s: float = _setting(5.0, "How long one request may take.", "seconds, from 0.1 to 60", ge=0.1, le=60)
    ended_ttl_s: int = _setting(
        30 * 86_400,
        "How long a task is shown after its end.",
        "seconds, from 3600 to 5 years",
        ge=3600,
        le=5 * 366 * 86_400,
    )
    username: str | None = _setting(None, "The user.", "any text")
    password: SecretStr | None = _setting(None, "The user's password.", "any text")
    password_file: ExistingFile = _setting(None, "A file that holds the password.", _A_FILE)
    tls: Tls = Tls()


class Api(_Section):
    """Where the API listens."""

    host: str = _setting("127.0.0.1", "The address that the API listens at.", "an address or a name of this machine")
    port: int = _setting(DEFAULT_PORT, "The API's port; 0 is any that is free.", "from 0 to 65535", ge=0, le=65535)


class Health(_Section):
    """/healthz, /readyz and /metrics of each process."""

    host: str = _setting("127.0.0.1", "The address that they are served at.", "an address or a name of this machine")
    port: int | None = _setting(
        None, "Their port; 0 is any that is free; without one they are not served.", "from 0 to 65535", ge=0, le=65535
    )
    stalled_s: float = _setting(
        30.0, "A loop that made no turn for so long is not alive.", "seconds, from 1 to 3600", ge=1, le=3600
    )


class Admission(_Section):
    """What is let in of tenants and queues of which operators say nothing else. The same for all processes."""

    tenant_submits_per_s: int | None = _setting(
        1_000,
        "How many tasks a named tenant may submit in a second, over ten seconds.",
        "from 1 to a million",
        ge=1,
        le=10**6,
    )
    tenant_pending_max: int | None = _setting(
        None, "How many tasks of a tenant may wait; without it as many as of a queue.", "from 1 to 10^9", ge=1, le=10**9
    )
    takes_any_queue: bool = _setting(
        True,
        "Whether a queue is there when it is first named; else only if an operator said something of it.",
        "true or false",
    )
    queue_pending_max: int = _setting(
        10_000_000, "How many tasks of a queue may wait.", "from 1 to 10^9", ge=1, le=10**9
    )
    queue_overflow_at: int | None = _setting(
        1_000_000,
        "How many tasks of a queue wait in memory before new ones of low priority are put off.",
        "from 1 to 10^9",
        ge=1,
        le=10**9,
    )


_WEIGHT: Any = {"allowed": f"from 1 to {WEIGHT_MAX}", "ge": 1, "le": WEIGHT_MAX}


class Priorities(_Section):
    """How much each priority gets while all three wait. The same for all processes."""

    high: int = _setting(DEFAULT_WEIGHTS.high, "The share of high.", **_WEIGHT)
    medium: int = _setting(DEFAULT_WEIGHTS.medium, "The share of medium.", **_WEIGHT)
    low: int = _setting(DEFAULT_WEIGHTS.low, "The share of low.", **_WEIGHT)


class Log(_Section):
    """What the processes say."""

    level: Literal["debug", "info", "warning", "error", "critical"] = _setting(
        "info", "The least severe lines that are shown.", "debug, info, warning, error or critical"
    )
    format: Literal["text", "json"] = _setting("text", "Lines for people, or JSON documents.", "text or json")


class Worker(_Section):
    """What runs tasks."""

    slots: int = _setting(100, "Attempts that may run at once.", f"from 1 to {SLOTS_MAX}", ge=1, le=SLOTS_MAX)
    grace_s: float = _setting(
        30.0, "How long what runs may take to end at a stop, in seconds.", "from 0 to a day", ge=0, le=_DAY_S
    )


class ClusterSettings(_Section):
    """All of it. What processes must agree on is the same for all of them: shards, topics, window, registry."""

    shards: int = _setting(
        CLUSTER_SHARDS,
        "The number of shards; fixed for the life of a cluster.",
        f"from 1 to {SHARDS_MAX}",
        ge=1,
        le=SHARDS_MAX,
    )
    idempotency_window_s: float = _setting(
        _DAY_S,
        "How long idempotency keys of ended tasks are known, in seconds.",
        "from 1 to a week",
        ge=1,
        le=7 * _DAY_S,
    )
    registry: str | None = _setting(
        None,
        "A Confluent-compatible schema registry; without one the schema ids are built in.",
        "an http or https URL",
        pattern=r"^https?://\S+$",
    )
    startup_timeout_s: float = _setting(
        120.0,
        "How long a process waits at its start for Kafka and its topics.",
        "seconds, from 0 to a day",
        ge=0,
        le=_DAY_S,
    )
    kafka: Kafka = Kafka()
    cassandra: Cassandra = Cassandra()
    api: Api = Api()
    health: Health = Health()
    log: Log = Log()
    worker: Worker = Worker()
    admission: Admission = Admission()
    priorities: Priorities = Priorities()

    def of_admission(self) -> AdmissionSettings:
        """What holds for tenants and queues of which nothing else is said."""
        return AdmissionSettings(**self.admission.model_dump())

    def weights(self) -> Weights:
        """The shares of the priorities."""
        return Weights(**self.priorities.model_dump())

    def catalog(self) -> TopicCatalog:
        """The topics of this cluster."""
        kafka = self.kafka
        return cluster_catalog(
            ClusterSizes(
                shards=self.shards,
                ready_partitions=kafka.ready_partitions,
                reply_partitions=kafka.reply_partitions,
                replication=kafka.replication,
                min_insync=kafka.min_insync,
                event_retention_ms=round(kafka.event_retention_s * 1000),
            )
        )

    def of_kafka(self) -> KafkaSettings:
        """How clients of the brokers are made. SettingsError: no brokers are named, or the password cannot be read."""
        kafka = self.kafka
        if kafka.bootstrap is None:
            raise missing("kafka.bootstrap")
        security = {**_protocol(kafka), **_of_tls(kafka.tls), **_of_sasl(kafka.sasl), **kafka.properties}
        return KafkaSettings(bootstrap=kafka.bootstrap, prefix=kafka.prefix, security=security)

    def of_cassandra(self) -> CassandraSettings:
        """How the view is reached. SettingsError: no nodes are named, or the password cannot be read."""
        from infra.cassandra import CassandraSettings, Consistency  # with its driver, which few commands need

        given = self.cassandra
        if not given.hosts:
            raise missing("cassandra.hosts")
        return CassandraSettings(
            hosts=given.hosts,
            port=given.port,
            keyspace=given.keyspace,
            datacenter=given.datacenter,
            username=given.username,
            password=secret_of("cassandra", given.password, given.password_file),
            is_tls=given.tls.enabled,
            ca_file=given.tls.path("ca"),
            certificate_file=given.tls.path("cert"),
            key_file=given.tls.path("key"),
            key_password=secret_of("cassandra.tls", given.tls.key_password, None),
            verify_hostname=given.tls.verify,
            write_consistency=Consistency(given.write_consistency),
            read_consistency=Consistency(given.read_consistency),
            connect_timeout_s=given.connect_timeout_s,
            request_timeout_s=given.request_timeout_s,
            ttl_s=given.ended_ttl_s,
            replication_factor=given.replication,
        )


def _protocol(kafka: Kafka) -> dict[str, str]:
    if kafka.sasl.mechanism is None:
        return {"security.protocol": "ssl"} if kafka.tls.enabled else {}
    return {"security.protocol": "sasl_ssl" if kafka.tls.enabled else "sasl_plaintext"}


def _of_tls(tls: Tls) -> dict[str, Any]:
    if not tls.enabled:
        return {}
    given: dict[str, Any] = {
        "ssl.ca.location": tls.path("ca"),
        "ssl.certificate.location": tls.path("cert"),
        "ssl.key.location": tls.path("key"),
        "ssl.key.password": secret_of("kafka.tls", tls.key_password, None),
    }
    verify = {
        "enable.ssl.certificate.verification": tls.verify,
        "ssl.endpoint.identification.algorithm": "https" if tls.verify else "none",
    }
    return verify | {name: value for name, value in given.items() if value is not None}


def _of_sasl(sasl: Sasl) -> dict[str, Any]:
    if sasl.mechanism is None:
        return {}
    password = secret_of("kafka.sasl", sasl.password, sasl.password_file)
    return {"sasl.mechanism": sasl.mechanism, "sasl.username": sasl.username, "sasl.password": password}


def secret_of(section: str, given: SecretStr | None, file: Path | None) -> str | None:
    """A password as it was given, or the content of its file without the line's end. SettingsError: no such file."""
    if given is not None:
        return given.get_secret_value()
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        name = f"{section}.password_file"
        raise SettingsError([Problem(name, name, f"{file} cannot be read ({error})", _A_FILE)]) from error


def missing(name: str) -> SettingsError:
    """The error of a setting without which a command cannot do anything."""
    where = f"{name} ({variable_of(name)})"
    return SettingsError([Problem(name, where, "is not set", f"needed here; {known_settings()[name].allowed}")])


# --- what there is ----------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A setting as documents and messages show it."""

    name: str
    variable: str
    default: Any
    meaning: str
    allowed: str
    is_secret: bool
    is_table: bool


@cache
def known_settings() -> Mapping[str, Known]:
    """All settings by dotted name, in the order of the document."""
    return {one.name: one for one in _known(ClusterSettings, "")}


def _known(section: type[BaseModel], prefix: str) -> Iterator[Known]:
    for field, info in section.model_fields.items():
        name = f"{prefix}{field}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _known(info.annotation, f"{name}.")
            continue
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        is_secret = "SecretStr" in str(info.annotation)
        is_table = isinstance(info.default, dict)
        meaning, allowed = info.description or "", str(extra.get("allowed", ""))
        yield Known(name, variable_of(name), info.default, meaning, allowed, is_secret, is_table)


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper().replace(".", "_")


# --- what is wrong only together --------------------------------------------------------------------------------------


class Contradiction(NamedTuple):
    """Settings that are allowed one by one, and not together; `name` is the one to change."""

    name: str
    message: str
    allowed: str


def contradictions(settings: ClusterSettings) -> Iterator[Contradiction]:
    """What is wrong with settings only together."""
    kafka, cassandra = settings.kafka, settings.cassandra
    if kafka.min_insync is not None and kafka.min_insync > kafka.replication:
        message = f"{kafka.min_insync} is more than there are copies, kafka.replication={kafka.replication}"
        yield Contradiction("kafka.min_insync", message, "from 1 to kafka.replication")
    yield from _of_user(kafka.sasl)
    for name, section in (("kafka.sasl", kafka.sasl), ("cassandra", cassandra)):
        if section.password is not None and section.password_file is not None:
            yield Contradiction(f"{name}.password_file", f"is given beside {name}.password", "one of the two")
    has_password = cassandra.password is not None or cassandra.password_file is not None
    if cassandra.username is not None and not has_password:
        allowed = "set cassandra.password or cassandra.password_file"
        yield Contradiction("cassandra.username", "needs a password", allowed)
    if cassandra.username is None and has_password:
        yield Contradiction("cassandra.password", "needs a user", "set cassandra.username")
    yield from _of_files("kafka.tls", kafka.tls)
    yield from _of_files("cassandra.tls", cassandra.tls)


def _of_user(sasl: Sasl) -> Iterator[Contradiction]:
    has_password = sasl.password is not None or sasl.password_file is not None
    if sasl.mechanism is not None and (sasl.username is None or not has_password):
        allowed = "set kafka.sasl.username, and kafka.sasl.password or kafka.sasl.password_file"
        yield Contradiction("kafka.sasl.mechanism", "needs a user and a password", allowed)
    if sasl.mechanism is None and (sasl.username is not None or has_password):
        name = "kafka.sasl.username" if sasl.username is not None else "kafka.sasl.password"
        yield Contradiction(name, "is not used without kafka.sasl.mechanism", "set the mechanism too")


def _of_files(name: str, tls: Tls) -> Iterator[Contradiction]:
    if not tls.enabled and (tls.ca or tls.cert or tls.key):
        yield Contradiction(f"{name}.enabled", f"{name} has files but is not enabled", f"set {name}.enabled=true")
    if tls.cert is not None and tls.key is None:
        yield Contradiction(f"{name}.cert", "needs its key", f"set {name}.key")
    if tls.key is not None and tls.cert is None:
        yield Contradiction(f"{name}.key", "needs its certificate", f"set {name}.cert")
