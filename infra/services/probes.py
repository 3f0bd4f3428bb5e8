"""Whether a service really answers, asked in its own protocol over a plain socket: no driver is needed to find out.

Each takes at most a few seconds; whatever goes wrong on the way means that there is no answer yet.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
from typing import NamedTuple

PROBE_S = 2.0  # for each step of an exchange
_REPLY_BYTES_MAX = 16 * 1024 * 1024
_CLIENT_ID = "tidewheel-services"

# Kafka: requests by key and version.
_METADATA, _SASL_HANDSHAKE, _SASL_AUTHENTICATE = (3, 1), (17, 1), (36, 0)
_NO_TOPICS = struct.pack(">i", 0)

# Cassandra: native protocol, version 4.
_HEADER = struct.Struct(">BBhBi")  # version, flags, stream, opcode, length
_STARTUP, _READY, _AUTHENTICATE, _QUERY, _RESULT, _AUTH_RESPONSE, _AUTH_SUCCESS = (
    0x01,
    0x02,
    0x03,
    0x07,
    0x08,
    0x0F,
    0x10,
)
CONSISTENCY_ONE, CONSISTENCY_ALL = 0x0001, 0x0005


class Login(NamedTuple):
    """How a secured service is asked: over TLS, by a user with a password."""

    context: ssl.SSLContext
    username: str
    password: str

    @property
    def plain(self) -> bytes:
        """Both, as SASL's mechanism PLAIN has them."""
        return f"\0{self.username}\0{self.password}".encode()


def _connected(host: str, port: int, login: Login | None) -> socket.socket:
    connection = socket.create_connection((host, port), PROBE_S)
    if login is None:
        return connection
    try:
        return login.context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def kafka_brokers(host: str, port: int, login: Login | None = None) -> frozenset[int]:
    """The ids of the brokers that the one at this address sees; empty without an answer."""
    try:
        with _connected(host, port, login) as connection:
            if login is not None:
                _ask_kafka(connection, _SASL_HANDSHAKE, _text("PLAIN"))
                _ask_kafka(connection, _SASL_AUTHENTICATE, struct.pack(">i", len(login.plain)) + login.plain)
            return _broker_ids(_ask_kafka(connection, _METADATA, _NO_TOPICS))
    except (OSError, struct.error):  # a broker that refuses a login closes the connection
        return frozenset()


def _ask_kafka(connection: socket.socket, request: tuple[int, int], body: bytes) -> bytes:
    """The answer to a request, from its correlation id on."""
    content = struct.pack(">hhi", *request, 1) + _text(_CLIENT_ID) + body
    connection.sendall(struct.pack(">i", len(content)) + content)
    (length,) = struct.unpack(">i", _read(connection, 4))
    return _read(connection, length)


def _broker_ids(reply: bytes) -> frozenset[int]:
    _, count = struct.unpack_from(">ii", reply)
    ids, at = [], 8
    for _ in range(count):
        node, host_length = struct.unpack_from(">ih", reply, at)
        (rack_length,) = struct.unpack_from(">h", reply, at + 6 + host_length + 4)
        at += 6 + host_length + 4 + 2 + max(0, rack_length)
        ids.append(node)
    return frozenset(ids)


def cassandra_answers(host: str, port: int, statement: str, consistency: int, login: Login | None = None) -> bool:
    """Whether the node at this address has a result for a statement."""
    startup = struct.pack(">h", 1) + _text("CQL_VERSION") + _text("3.0.0")
    query = struct.pack(">i", len(statement)) + statement.encode() + struct.pack(">hB", consistency, 0)
    try:
        with _connected(host, port, login) as connection:
            is_ready = _cql(connection, _STARTUP, startup) == (_READY if login is None else _AUTHENTICATE)
            if is_ready and login is not None:
                response = struct.pack(">i", len(login.plain)) + login.plain
                is_ready = _cql(connection, _AUTH_RESPONSE, response) == _AUTH_SUCCESS
            return is_ready and _cql(connection, _QUERY, query) == _RESULT
    except (OSError, struct.error):
        return False


def _cql(connection: socket.socket, opcode: int, body: bytes) -> int:
    connection.sendall(_HEADER.pack(4, 0, 0, opcode, len(body)) + body)
    *_, answer, length = _HEADER.unpack(_read(connection, _HEADER.size))
    _read(connection, length)
    return int(answer)


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _read(connection: socket.socket, length: int) -> bytes:
    if not 0 <= length <= _REPLY_BYTES_MAX:
        raise ConnectionError(f"a reply of {length} bytes: another protocol")
    content = b""
    while len(content) < length:
        more = connection.recv(length - len(content))
        if not more:
            raise ConnectionError("the connection was closed")
        content += more
    return content


def http_answers(host: str, port: int, path: str) -> bool:
    """Whether a GET is answered with 200."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens at a port, or it cannot be had for another reason."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what is just closed is free
        try:
            listener.bind((host, port))
        except OSError:
            return True
        return False
