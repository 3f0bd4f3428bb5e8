"""Whether a service really answers, asked in its own protocol over a plain socket: no driver is needed to find out.

Each takes at most a few seconds; whatever goes wrong on the way means that there is no answer yet.
"""

from __future__ import annotations

import http.client
import socket
import struct

PROBE_S = 2.0  # for each step of an exchange
_REPLY_BYTES_MAX = 16 * 1024 * 1024
_CLIENT_ID = b"tidewheel-services"

# Kafka: a Metadata request of version 1 that asks for no topics.
_METADATA = struct.pack(f">hhih{len(_CLIENT_ID)}si", 3, 1, 1, len(_CLIENT_ID), _CLIENT_ID, 0)

# Cassandra: native protocol, version 4.
_HEADER = struct.Struct(">BBhBi")  # version, flags, stream, opcode, length
_STARTUP, _READY, _QUERY, _RESULT = 0x01, 0x02, 0x07, 0x08
CONSISTENCY_ONE, CONSISTENCY_ALL = 0x0001, 0x0005


def kafka_brokers(host: str, port: int) -> frozenset[int]:
    """The ids of the brokers that the one at this address sees; empty without an answer."""
    try:
        with socket.create_connection((host, port), PROBE_S) as connection:
            connection.sendall(struct.pack(">i", len(_METADATA)) + _METADATA)
            (length,) = struct.unpack(">i", _read(connection, 4))
            return _broker_ids(_read(connection, length))
    except (OSError, struct.error):
        return frozenset()


def _broker_ids(reply: bytes) -> frozenset[int]:
    _, count = struct.unpack_from(">ii", reply)
    ids, at = [], 8
    for _ in range(count):
        node, host_length = struct.unpack_from(">ih", reply, at)
        (rack_length,) = struct.unpack_from(">h", reply, at + 6 + host_length + 4)
        at += 6 + host_length + 4 + 2 + max(0, rack_length)
        ids.append(node)
    return frozenset(ids)


def cassandra_answers(host: str, port: int, statement: str, consistency: int) -> bool:
    """Whether the node at this address has a result for a statement."""
    startup = struct.pack(">h", 1) + _text("CQL_VERSION") + _text("3.0.0")
    query = struct.pack(">i", len(statement)) + statement.encode() + struct.pack(">hB", consistency, 0)
    try:
        with socket.create_connection((host, port), PROBE_S) as connection:
            return _cql(connection, _STARTUP, startup) == _READY and _cql(connection, _QUERY, query) == _RESULT
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
