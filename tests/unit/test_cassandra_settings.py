"""Settings of the view in Cassandra, and what the driver's errors tell the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cassandra import (
    AuthenticationFailed,
    InvalidRequest,
    OperationTimedOut,
    ReadFailure,
    ReadTimeout,
    Unauthorized,
    Unavailable,
    WriteTimeout,
)
from cassandra.cluster import NoHostAvailable

from infra.cassandra.session import translate
from infra.cassandra.settings import CassandraSettings, tls_of
from schemas.errors import Fatal, Retriable

SETTINGS = CassandraSettings(hosts=("a", "b"))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"hosts": ()}, "hosts"),
        ({"hosts": ("a", "")}, "hosts"),
        ({"keyspace": "Tide-wheel"}, "keyspace"),
        ({"keyspace": "x" * 49}, "keyspace"),
        ({"keyspace": "x; DROP"}, "keyspace"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": 10**9}, "ttl_s"),
        ({"username": "u"}, "password"),
        ({"password": "secret"}, "username"),
        ({"key_file": "k"}, "certificate_file"),
        ({"replication": {"dc1": 0}}, "replication"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        CassandraSettings(**wrong)
    assert "secret" not in str(refused.value)


def test_secrets_are_not_shown() -> None:
    settings = CassandraSettings(
        username="u", password="hush", certificate_file="c", key_file="k", key_password="quiet", hosts=("a",)
    )
    shown = f"{settings!r} {settings} {[settings]}"
    assert "hush" not in shown
    assert "quiet" not in shown
    assert "username='u'" in shown


def test_copies_are_kept_in_the_own_datacenter_unless_others_are_named() -> None:
    assert CassandraSettings(replication_factor=3).copies() == {"datacenter1": 3}
    assert CassandraSettings(replication={"a": 3, "b": 2}).copies() == {"a": 3, "b": 2}


def test_plain_connections_unless_tls_is_asked_for() -> None:
    assert tls_of(SETTINGS) is None
    context = tls_of(CassandraSettings(is_tls=True))
    assert context is not None
    assert context.check_hostname
    lenient = tls_of(CassandraSettings(is_tls=True, verify_hostname=False))
    assert lenient is not None
    assert not lenient.check_hostname


def test_tls_files_that_are_no_good_are_named(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"missing\.pem"):
        tls_of(CassandraSettings(ca_file=str(tmp_path / "missing.pem")))
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(Fatal, match="PEM"):
        tls_of(CassandraSettings(is_tls=True, certificate_file=str(broken)))


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (NoHostAvailable("no", {}), Retriable, "a,b port 9042: check that it runs"),
        (NoHostAvailable("no", {"a": OSError("refused")}), Retriable, "check that it runs"),
        (
            NoHostAvailable("no", {"a": OSError("x"), "b": AuthenticationFailed("bad")}),
            Fatal,
            "cassandra.username and its password",
        ),
        (NoHostAvailable("no", {"a": OSError("certificate verify failed: self-signed")}), Fatal, "cassandra.tls.ca"),
        (NoHostAvailable("no", {"a": OSError("tlsv13 alert certificate required")}), Fatal, "cassandra.tls.cert"),
        (
            NoHostAvailable("no", {"a": OSError("[SSL: WRONG_VERSION_NUMBER] wrong version number")}),
            Fatal,
            "cassandra.port",
        ),
        (NoHostAvailable("no", {"a": OSError("EOF occurred")}), Retriable, "without TLS (cassandra.tls.enabled)"),
        (NoHostAvailable("no", {"a": WriteTimeout("slow", write_type=0)}), Retriable, "may have done it or not"),
        (NoHostAvailable("no", {"a": Unavailable("u", 6, 2, 1)}), Retriable, "1 of 2 replicas"),
        (OperationTimedOut(), Retriable, "may have done it or not"),
        (WriteTimeout("slow", write_type=0), Retriable, "look at its load"),
        (ReadTimeout("slow"), Retriable, "look at its load"),
        (Unavailable("u", 6, 2, 1), Retriable, "start the missing nodes"),
        (ReadFailure("r", error_code_map={"a": 1}), Retriable, "narrower time"),
        (ReadFailure("r", error_code_map={"a": 0}), Retriable, "its log"),
        (AuthenticationFailed("bad"), Fatal, "cassandra.username and its password"),
        (Unauthorized("no"), Fatal, "grant"),
        (InvalidRequest("unconfigured table tasks"), Fatal, "tidewheel schema apply"),
        (InvalidRequest("Keyspace 'x' does not exist"), Fatal, "tidewheel schema apply"),
        (InvalidRequest("Batch too large"), Fatal, "batch_size_fail_threshold"),
        (InvalidRequest("something else"), Fatal, "report it"),
    ],
)
def test_errors_say_who_must_act(error: Exception, kind: type[Exception], advice: str) -> None:
    translated = translate(error, SETTINGS)
    assert type(translated) is kind
    assert advice in str(translated)
