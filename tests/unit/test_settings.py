"""Settings of a cluster: where they come from, what is said of wrong ones, and what is made of right ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from docs import configuration
from infra.cassandra import CassandraSettings
from infra.kafka.settings import REFUSED_PROPERTIES
from infra.topics import ClusterSizes, cluster_catalog
from schemas.topics import TASK_EVENTS
from tidewheel.cluster_settings import ClusterSettings, Problem, SettingsError, known_settings
from tidewheel.configuration import HIDDEN, Loaded, load_settings

SECRET = "7hard-to-guess"


def loaded(
    environ: Mapping[str, str] | None = None, file: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Loaded:
    return load_settings(file, overrides, environ or {})


def problems(environ: Mapping[str, str] | None = None, file: Path | None = None) -> dict[str, Problem]:
    with pytest.raises(SettingsError) as caught:
        loaded(environ, file)
    assert SECRET not in str(caught.value)
    return {problem.name: problem for problem in caught.value.problems}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.toml"


# --- where they come from ---------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(file: Path) -> None:
    file.write_text('shards = 2\nstartup_timeout_s = 2\n[kafka]\nprefix = "two."\nreplication = 2\n')
    environ = {"TIDEWHEEL_SHARDS": "3", "TIDEWHEEL_STARTUP_TIMEOUT_S": "3"}
    found = loaded(environ, file, {"shards": 4, "registry": None})
    settings = found.settings
    assert settings.shards == 4
    assert settings.startup_timeout_s == 3.0
    assert (settings.kafka.prefix, settings.kafka.replication) == ("two.", 2)
    assert settings.cassandra.port == 9042
    origins = {name: origin for name, _, origin in found.shown()}
    assert origins["shards"] == "--shards"
    assert origins["startup_timeout_s"] == "TIDEWHEEL_STARTUP_TIMEOUT_S"
    assert origins["kafka.prefix"] == f"kafka.prefix in {file}"
    assert origins["cassandra.port"] == origins["registry"] == "default"


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    file.write_text("shards = 5\n")
    assert loaded({"TIDEWHEEL_CONFIG": str(file)}).settings.shards == 5


def test_every_setting_can_be_set_in_both_ways(file: Path) -> None:
    """The names of variables are unique, and each kind of value can be written in a variable and in a file."""
    existing = file.parent / "there"
    existing.write_text(SECRET)
    given: dict[str, tuple[str, str]] = {  # where the default, or a number, is not allowed: in a variable, in a file
        "registry": ("http://r", '"http://r"'),
        "kafka.bootstrap": ("a:1,b:2", '"a:1,b:2"'),
        "kafka.min_insync": ("1", "1"),
        "kafka.sasl.mechanism": ("PLAIN", '"PLAIN"'),
        "kafka.properties": ("client.rack=z", '{ "client.rack" = "z" }'),
        "cassandra.hosts": ("a,b", '["a", "b"]'),
        "health.port": ("0", "0"),
        "admission.tenant_pending_max": ("5", "5"),
    }
    text = str(existing)
    for known in known_settings().values():
        if known.name.endswith((".ca", ".cert", ".key", "_file")):
            given[known.name] = (text, f'"{text}"')
        elif known.default is None and known.name not in given:
            given[known.name] = ("x", '"x"')
        elif known.default is not None and known.name not in given:
            plain = str(known.default).lower() if isinstance(known.default, bool) else str(known.default)
            given[known.name] = (plain, plain if isinstance(known.default, int | float) else f'"{plain}"')
    for password in ("kafka.sasl.password", "cassandra.password"):  # the file of each is given
        del given[password]
    given["kafka.tls.enabled"] = given["cassandra.tls.enabled"] = ("true", "true")
    by_variable = loaded({known_settings()[name].variable: value for name, (value, _) in given.items()})
    file.write_text("\n".join(f"{name} = {value}" for name, (_, value) in given.items()))
    by_file = loaded(file=file)
    assert by_variable.settings == by_file.settings
    assert by_variable.origins.keys() == by_file.origins.keys() == given.keys()


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert loaded({"TIDEWHEEL_REGISTRY": "", "TIDEWHEEL_KAFKA_BOOTSTRAP": ""}).settings == ClusterSettings()


def test_variables_of_others_and_of_clients_are_left_alone() -> None:
    environ = {
        "PATH": "/bin",
        "TIDEWHEEL_SERVER": "http://x",
        "TIDEWHEEL_TIMEOUT_S": "3",
        "TIDEWHEEL_DEBUG": "1",
        "TIDEWHEEL_TEST_KAFKA": "x:1",
    }
    assert loaded(environ).settings == ClusterSettings()


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TIDEWHEEL_KAFAK_BOOTSTRAP", "TIDEWHEEL_KAFKA_BOOTSTRAP"),
        ("TIDEWHEEL_KAFKA_BOOTSTRAP_SERVERS", "TIDEWHEEL_KAFKA_BOOTSTRAP"),
        ("TIDEWHEEL_SHARD", "TIDEWHEEL_SHARDS"),
    ],
)
def test_a_variable_that_is_misspelt_is_an_error_with_what_was_meant(variable: str, meant: str) -> None:
    problem = problems({variable: "x"})[variable]
    assert problem.allowed == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("text", "name", "meant"),
    [
        ("shard = 3", "shard", "shards"),
        ('[kafka]\nbootstap = "a:1"', "kafka.bootstap", "kafka.bootstrap"),
        ('[kafka.tls]\ncafile = "a"', "kafka.tls.cafile", "kafka.tls.ca"),
        ("[shards]\nx = 1", "shards.x", "shards"),
    ],
)
def test_a_key_that_is_misspelt_is_an_error_with_what_was_meant(file: Path, text: str, name: str, meant: str) -> None:
    file.write_text(text)
    problem = problems(file=file)[name]
    assert problem.where == f"{name} in {file}"
    assert problem.allowed == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("TIDEWHEEL_SHARDS", "0", "from 1 to 1024"),
        ("TIDEWHEEL_SHARDS", "many", "from 1 to 1024"),
        ("TIDEWHEEL_KAFKA_BOOTSTRAP", "kafka", "host:port"),
        ("TIDEWHEEL_KAFKA_PREFIX", "a b", "A-Z"),
        ("TIDEWHEEL_KAFKA_SASL_MECHANISM", "OAUTHBEARER", "SCRAM-SHA-512"),
        ("TIDEWHEEL_CASSANDRA_PORT", "0", "a port"),
        ("TIDEWHEEL_REGISTRY", "registry:8081", "URL"),
        ("TIDEWHEEL_STARTUP_TIMEOUT_S", "nan", "seconds"),
        ("TIDEWHEEL_LOG_FORMAT", "xml", "text or json"),
        ("TIDEWHEEL_CASSANDRA_KEYSPACE", "Tide-Wheel", "a letter first"),
    ],
)
def test_a_wrong_value_is_named_with_its_place_and_what_is_allowed(variable: str, value: str, allowed: str) -> None:
    (problem,) = problems({variable: value}).values()
    assert problem.where == variable
    assert repr(value) in problem.message
    assert allowed in problem.allowed


def test_all_that_is_wrong_is_said_at_once(file: Path) -> None:
    file.write_text('shards = 0\n[cassandra]\nport = "x"\n')
    found = problems({"TIDEWHEEL_NOTHING": "1", "TIDEWHEEL_KAFKA_REPLICATION": "-1"}, file)
    assert found.keys() == {"shards", "cassandra.port", "TIDEWHEEL_NOTHING", "kafka.replication"}


def test_a_file_that_cannot_be_read_is_an_error(file: Path) -> None:
    assert "cannot be read" in problems(file=file)["config"].message
    file.write_text("shards = = 3")
    assert "is not TOML" in problems(file=file)["config"].message


@pytest.mark.parametrize("name", sorted(REFUSED_PROPERTIES))
def test_properties_that_would_break_guarantees_are_refused_with_the_reason(name: str) -> None:
    (problem,) = problems({"TIDEWHEEL_KAFKA_PROPERTIES": f"client.rack=a,{name}=1"}).values()
    assert f"{name} cannot be set: {REFUSED_PROPERTIES[name]}" in problem.message


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TIDEWHEEL_KAFKA_MIN_INSYNC": "2"}, "kafka.min_insync"),
        ({"TIDEWHEEL_KAFKA_SASL_MECHANISM": "PLAIN"}, "kafka.sasl.mechanism"),
        ({"TIDEWHEEL_KAFKA_SASL_MECHANISM": "PLAIN", "TIDEWHEEL_KAFKA_SASL_USERNAME": "u"}, "kafka.sasl.mechanism"),
        ({"TIDEWHEEL_KAFKA_SASL_USERNAME": "u"}, "kafka.sasl.username"),
        ({"TIDEWHEEL_KAFKA_SASL_PASSWORD": SECRET}, "kafka.sasl.password"),
        ({"TIDEWHEEL_CASSANDRA_USERNAME": "u"}, "cassandra.username"),
        ({"TIDEWHEEL_CASSANDRA_PASSWORD": SECRET}, "cassandra.password"),
        (
            {
                "TIDEWHEEL_CASSANDRA_USERNAME": "u",
                "TIDEWHEEL_CASSANDRA_PASSWORD": SECRET,
                "TIDEWHEEL_CASSANDRA_PASSWORD_FILE": __file__,
            },
            "cassandra.password_file",
        ),
        ({"TIDEWHEEL_KAFKA_TLS_CA": __file__}, "kafka.tls.enabled"),
        ({"TIDEWHEEL_CASSANDRA_TLS_ENABLED": "true", "TIDEWHEEL_CASSANDRA_TLS_CERT": __file__}, "cassandra.tls.cert"),
        ({"TIDEWHEEL_CASSANDRA_TLS_ENABLED": "true", "TIDEWHEEL_CASSANDRA_TLS_KEY": __file__}, "cassandra.tls.key"),
        ({"TIDEWHEEL_KAFKA_TLS_CA": "/not/there"}, "kafka.tls.ca"),
    ],
)
def test_settings_that_do_not_go_together_are_named(environ: Mapping[str, str], name: str) -> None:
    assert problems(environ).keys() == {name}


@pytest.mark.parametrize("section", ["kafka", "cassandra"])
def test_what_is_needed_and_missing_is_named_with_its_variable(section: str) -> None:
    with pytest.raises(SettingsError, match=rf"TIDEWHEEL_{section.upper()}_(BOOTSTRAP|HOSTS)\) is not set"):
        getattr(ClusterSettings(), f"of_{section}")()


# --- what is made of them ---------------------------------------------------------------------------------------------


def test_the_catalog_is_the_one_of_the_settings() -> None:
    environ = {
        "TIDEWHEEL_SHARDS": "6",
        "TIDEWHEEL_KAFKA_READY_PARTITIONS": "3",
        "TIDEWHEEL_KAFKA_REPLICATION": "3",
        "TIDEWHEEL_KAFKA_EVENT_RETENTION_S": "7200",
    }
    catalog = loaded(environ).settings.catalog()
    events = catalog.spec(TASK_EVENTS)
    assert (events.partitions, events.replication, events.settings["retention.ms"]) == (6, 3, "7200000")
    assert catalog.spec("ready.mail.low").partitions == 3


def test_the_defaults_are_those_of_the_topics_and_of_the_view() -> None:
    assert list(ClusterSettings().catalog()) == list(cluster_catalog(ClusterSizes()))
    view = loaded({"TIDEWHEEL_CASSANDRA_HOSTS": "127.0.0.1"}).settings.of_cassandra()
    assert view == CassandraSettings(hosts=("127.0.0.1",))


def test_without_security_there_is_none() -> None:
    kafka = loaded({"TIDEWHEEL_KAFKA_BOOTSTRAP": "a:1"}).settings.of_kafka()
    assert (kafka.bootstrap, kafka.prefix, kafka.security) == ("a:1", "tidewheel.", {})


def test_sasl_and_tls_reach_the_clients_and_the_operators_properties_win(file: Path) -> None:
    secret_file = file.parent / "password"
    secret_file.write_text(f"{SECRET}\n")
    file.write_text(
        f"""
        [kafka]
        bootstrap = "a:1"
        [kafka.sasl]
        mechanism = "SCRAM-SHA-256"
        username = "u"
        password_file = "{secret_file}"
        [kafka.tls]
        enabled = true
        ca = "{secret_file}"
        cert = "{secret_file}"
        key = "{secret_file}"
        key_password = "{SECRET}"
        verify = false
        [kafka.properties]
        "client.rack" = "z"
        "socket.timeout.ms" = 20000
        """
    )
    kafka = loaded(file=file).settings.of_kafka()
    properties = kafka.client(**{"client.id": "one"})
    assert (
        properties.items()
        >= {
            "bootstrap.servers": "a:1",
            "client.id": "one",
            "security.protocol": "sasl_ssl",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "u",
            "sasl.password": SECRET,
            "ssl.ca.location": str(secret_file),
            "ssl.certificate.location": str(secret_file),
            "ssl.key.location": str(secret_file),
            "ssl.key.password": SECRET,
            "enable.ssl.certificate.verification": False,
            "ssl.endpoint.identification.algorithm": "none",
            "client.rack": "z",
            "socket.timeout.ms": 20_000,
        }.items()
    )
    assert SECRET not in repr(kafka)


def test_secrets_are_shown_nowhere() -> None:
    environ = {
        "TIDEWHEEL_KAFKA_BOOTSTRAP": "a:1",
        "TIDEWHEEL_KAFKA_SASL_MECHANISM": "PLAIN",
        "TIDEWHEEL_KAFKA_SASL_USERNAME": "u",
        "TIDEWHEEL_KAFKA_SASL_PASSWORD": SECRET,
        "TIDEWHEEL_KAFKA_PROPERTIES": f"ssl.keystore.password={SECRET},ssl.key.pem={SECRET},client.rack=z",
        "TIDEWHEEL_CASSANDRA_HOSTS": "a",
        "TIDEWHEEL_CASSANDRA_USERNAME": "u",
        "TIDEWHEEL_CASSANDRA_PASSWORD": SECRET,
        "TIDEWHEEL_REGISTRY": f"https://u:{SECRET}@registry",
    }
    found = loaded(environ)
    shown = {name: value for name, value, _ in found.shown()}
    assert SECRET not in repr(shown)
    assert SECRET not in repr(found.settings.kafka.sasl) + repr(found.settings.of_kafka())
    assert SECRET not in repr(found.settings.of_cassandra())
    assert shown["kafka.sasl.password"] == shown["cassandra.password"] == HIDDEN
    assert shown["kafka.properties"]["client.rack"] == "z"
    problems({**environ, "TIDEWHEEL_KAFKA_PROPERTIES": f"acks=1,sasl.password={SECRET}"})
    problems({**environ, "TIDEWHEEL_REGISTRY": f"ftp://u:{SECRET}@registry"})


def test_a_secret_in_a_property_of_the_wrong_type_is_not_told(file: Path) -> None:
    file.write_text(f'[kafka.properties]\n"sasl.password" = ["{SECRET}"]\n')
    assert HIDDEN in problems(file=file)["kafka.properties"].message


def test_a_password_file_that_went_away_is_named(file: Path) -> None:
    file.write_text(SECRET)
    environ = {
        "TIDEWHEEL_KAFKA_BOOTSTRAP": "a:1",
        "TIDEWHEEL_KAFKA_SASL_MECHANISM": "PLAIN",
        "TIDEWHEEL_KAFKA_SASL_USERNAME": "u",
        "TIDEWHEEL_KAFKA_SASL_PASSWORD_FILE": str(file),
    }
    settings = loaded(environ).settings
    file.unlink()
    with pytest.raises(SettingsError, match=re.escape(f"{file} cannot be read")):
        settings.of_kafka()


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_lists_the_settings_as_they_are() -> None:
    assert configuration.PATH.read_text(encoding="utf-8") == configuration.text(), "run: python -m docs.configuration"


def test_every_setting_says_what_it_means_and_what_is_allowed() -> None:
    assert all(known.meaning.endswith(".") and known.allowed for known in known_settings().values())
    variables = [known.variable for known in known_settings().values()]
    assert len(set(variables)) == len(variables)
