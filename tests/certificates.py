"""Certificates for tests of TLS: an authority, a server on the loopback, a client; in PEM files."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from infra.services import Security

_LOOPBACK = [x509.IPAddress(ip_address(f"127.0.0.{n}")) for n in (1, 2, 3)]
_VALID = timedelta(days=1)


def security_in(folder: Path) -> Security:
    """Files in a folder, and a user with a password that is in no other test."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = Authority("tests")
    for name in ("server", "client"):
        (folder / f"{name}.pem").write_bytes(authority.issue(name))
    (folder / "ca.pem").write_bytes(authority.certificate)
    files = {name: folder / f"{name}.pem" for name in ("ca", "server", "client")}
    return Security(**files, username="tidewheel", password=f"secret-{secrets.token_hex(8)}")


class Authority:
    """A certificate authority that its own certificate vouches for."""

    def __init__(self, name: str) -> None:
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates, lists
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        self.certificate = builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def issue(self, name: str) -> bytes:
        """A new key with its certificate, for a server on the loopback or its clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key)
        builder = builder.add_extension(x509.SubjectAlternativeName(_LOOPBACK), critical=False)
        certificate = builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)
        return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _VALID).not_valid_after(now + _VALID)
