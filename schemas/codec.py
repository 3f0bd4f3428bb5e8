"""Messages to bytes and back, in Confluent's framing: a zero byte, the schema's number in 4 bytes, the Avro body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from schemas import messages
from schemas.catalog import Release, Schema, full_name, newest, releases, short_name
from schemas.compiled import BROKEN, Decode, Encode, Functions, functions_of
from schemas.errors import Undecodable, UnknownSchema
from schemas.messages import Message
from schemas.registry import SchemaIds
from schemas.resolved import is_same_layout, resolving_decoder

_HEADER = 5
_CLASSES: Mapping[str, type] = vars(messages)


class Codec:
    """Encodes and decodes all messages; safe to share between threads.

    What the schemas built in have as numbers is always understood; `ids` gives other numbers, to write and to look up.
    """

    def __init__(self, ids: SchemaIds | None = None) -> None:
        """Numbers come from `ids`, or are the built-in ones. May raise what `ids.register` raises."""
        self._ids = ids
        self._encoders: dict[type, tuple[Encode, bytes]] = {}
        self._decoders: dict[bytes, Decode] = {}
        for name, release in newest().items():
            functions = _functions()[name]
            self._decoders[_header(release.schema_id)] = functions.decode
            header = _header(release.schema_id if ids is None else ids.register(name, release.text))
            self._decoders[header] = functions.decode
            self._encoders[_CLASSES[name]] = functions.encode, header

    @classmethod
    def builtin(cls) -> Codec:
        """The codec with the built-in numbers, which needs no registry."""
        return _builtin()

    def encode(self, message: Message) -> bytes:
        """The bytes of a message of a topic. ValueError, TypeError: it holds a value that Avro has no room for."""
        encode, header = self._encoders[type(message)]
        return encode(message, header)

    def decode(self, value: bytes | None) -> Message:
        """The message that `value` holds.

        Raises Undecodable, UnknownSchema, and what `ids.schema` raises when the schema must be looked up there.
        """
        decode = self._decoders.get(value[:_HEADER]) if isinstance(value, bytes) else None
        if decode is None:
            decode = self._look_up(value)
        value = cast(bytes, value)
        try:
            message, end = decode(value, _HEADER)
        except BROKEN as error:
            raise Undecodable(f"broken body: {type(error).__name__}: {error}") from error
        if end != len(value):
            what = "truncated" if end > len(value) else f"{len(value) - end} bytes too many"
            raise Undecodable(f"broken body: {what}")
        return cast(Message, message)

    def _look_up(self, value: bytes | None) -> Decode:
        if not isinstance(value, bytes):
            raise Undecodable("no bytes" if value is None else f"bytes expected, not {type(value).__name__}")
        if len(value) < _HEADER or value[0] != 0:
            raise Undecodable(f"no frame: a zero byte and 4 bytes of schema id expected, not {value[:_HEADER]!r}")
        schema_id = int.from_bytes(value[1:_HEADER], "big")
        older = _older().get(schema_id)
        if older is not None:
            decode = _decoder(older.name, json.loads(older.text))
        elif self._ids is None:
            raise UnknownSchema(f"schema {schema_id} is not built in, and no registry is configured")
        else:
            decode = _decoder_of_text(schema_id, self._ids.schema(schema_id))
        self._decoders[value[:_HEADER]] = decode  # as many as the registry has schemas of ours
        return decode


@cache
def _builtin() -> Codec:
    return Codec()


@cache
def _functions() -> dict[str, Functions]:
    return functions_of([json.loads(release.text) for release in newest().values()], _CLASSES)


def _header(schema_id: int) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big")


@cache
def _older() -> dict[int, Release]:
    """Releases that are read, and not written any more, by their numbers; made into decoders when they are met."""
    return {release.schema_id: release for release in releases() if release != newest()[release.name]}


def _decoder_of_text(schema_id: int, text: str) -> Decode:
    try:
        writer: Any = json.loads(text)
        name = short_name(full_name(writer))
    except (ValueError, TypeError, KeyError) as error:
        raise UnknownSchema(f"schema {schema_id} is no Avro record") from error
    if name not in newest():
        raise UnknownSchema(f"schema {schema_id} is {full_name(writer)}, which is none of our messages")
    return _decoder(name, writer)


def _decoder(name: str, writer: Schema) -> Decode:
    reader = json.loads(newest()[name].text)
    if is_same_layout(writer, reader):
        return _functions()[name].decode
    return resolving_decoder(writer, reader, _CLASSES)
