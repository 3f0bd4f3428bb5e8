"""How Cassandra is reached and used. Plain values: where they come from is the composition root's business."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from schemas.errors import Fatal

TTL_S = 30 * 86_400
TTL_S_MAX = 5 * 366 * 86_400  # Cassandra stores no expiry after 2038 unless it is told that no node is older than 5.0
_KEYSPACE = re.compile(r"[a-z][a-z0-9_]{0,47}")
_HIDDEN = ("password", "key_password")


class Consistency(StrEnum):
    """How many replicas must answer, as Cassandra calls it."""

    ONE = "ONE"
    LOCAL_ONE = "LOCAL_ONE"
    QUORUM = "QUORUM"
    LOCAL_QUORUM = "LOCAL_QUORUM"
    ALL = "ALL"


class CassandraSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the view in Cassandra. ValueError on construction: one of them cannot be.

    `replication` is the number of copies by datacenter; empty means `replication_factor` in `datacenter`. With
    `is_simple_strategy` it is `replication_factor` wherever the ring leads. TLS is used if `is_tls` or with a file.
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 9042
    keyspace: str = "tidewheel"
    datacenter: str = "datacenter1"  # requests go to nodes of this one only
    username: str | None = None
    password: str | None = None
    is_tls: bool = False
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    key_password: str | None = None
    verify_hostname: bool = True
    write_consistency: Consistency = Consistency.LOCAL_QUORUM
    read_consistency: Consistency = Consistency.LOCAL_QUORUM
    connect_timeout_s: float = 5.0  # for each host
    request_timeout_s: float = 5.0
    ttl_s: int = TTL_S  # how long a task is shown after its end
    replication: Mapping[str, int] = {}
    replication_factor: int = 1
    is_simple_strategy: bool = False

    def __post_init__(self) -> None:
        if not self.hosts or not all(self.hosts):
            raise ValueError("hosts: at least one is needed, and none may be empty")
        if not _KEYSPACE.fullmatch(self.keyspace):
            raise ValueError(f"keyspace: {self.keyspace!r} must be 1 to 48 of a-z, 0-9 and _, beginning with a letter")
        if not 1 <= self.ttl_s <= TTL_S_MAX:
            raise ValueError(f"ttl_s: {self.ttl_s} must be 1 to {TTL_S_MAX} seconds")
        if (self.username is None) != (self.password is None):
            raise ValueError("username and password: one needs the other")
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("certificate_file: it is missing beside key_file")
        if min([self.replication_factor, *self.replication.values()]) < 1:
            raise ValueError("replication: at least one copy must be kept")

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        hidden = {name: "***" for name in _HIDDEN if shown[name] is not None}
        return f"CassandraSettings({', '.join(f'{name}={value!r}' for name, value in (shown | hidden).items())})"

    def copies(self) -> Mapping[str, int]:
        """The number of copies by datacenter."""
        return self.replication or {self.datacenter: self.replication_factor}


def is_tls(settings: CassandraSettings) -> bool:
    """Whether connections are secured: if it is said, or if there are files for it."""
    return settings.is_tls or settings.ca_file is not None or settings.certificate_file is not None


def tls_of(settings: CassandraSettings) -> ssl.SSLContext | None:
    """What connections are secured with; None for plain ones. Fatal: a file is missing or not what it should be."""
    if not is_tls(settings):
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        context.check_hostname = settings.verify_hostname
        if settings.certificate_file is not None:
            context.load_cert_chain(settings.certificate_file, settings.key_file, settings.key_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = (settings.ca_file, settings.certificate_file, settings.key_file)
        raise Fatal(
            f"Cassandra's TLS files cannot be used ({', '.join(filter(None, files))}): {error}; check paths, rights, "
            "PEM format and cassandra.tls.key_password"
        ) from error
    return context
