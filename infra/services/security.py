"""What secured services are set up with: TLS on both sides, and a user with a password."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Security:
    """PEM files, and who may log in. Clients must show a certificate of the same authority.

    `server` and `client` hold a key (PKCS #8, not encrypted) with its certificate; the server's is valid for 127.0.0.1
    to 127.0.0.3. Kafka knows the user under PLAIN and SCRAM-SHA-512; Cassandra begins with a superuser of its own
    (SUPERUSER), who makes others.
    """

    ca: Path
    server: Path
    client: Path
    username: str
    password: str = field(repr=False)

    @cached_property
    def context(self) -> ssl.SSLContext:
        """How a client connects."""
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.client)
        return context
