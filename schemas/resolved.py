"""Reads records of other versions: by the schema that wrote them, resolved to the one of today.

Slower than `schemas.compiled`, and met only while versions change: in what older code left or newer code writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from schemas.catalog import Schema, full_name, short_name
from schemas.compiled import Decode
from schemas.errors import Undecodable, UnknownSchema

Build = Callable[[Any], Any]


def is_same_layout(one: Schema, other: Schema) -> bool:
    """Whether two schemas have the same bytes for the same value, so that their differences are only words."""
    from fastavro.schema import to_parsing_canonical_form  # not needed while everything is of one version

    return bool(to_parsing_canonical_form(one) == to_parsing_canonical_form(other))


def resolving_decoder(writer: Schema, reader: Schema, classes: Mapping[str, type]) -> Decode:
    """Reads what `writer` wrote as values of `reader`; raises UnknownSchema where they do not fit together."""
    from fastavro import parse_schema, schemaless_reader
    from fastavro.schema import SchemaParseException, UnknownType

    try:
        parsed_writer, parsed_reader = parse_schema(writer), parse_schema(reader)
    except (SchemaParseException, UnknownType, ValueError, TypeError, KeyError) as error:
        raise UnknownSchema(f"the registered schema is not valid: {error}") from error
    build = _builder(reader, classes, {})

    def decode(d: bytes, p: int) -> tuple[Any, int]:
        from fastavro.read import SchemaResolutionError

        source = BytesIO(d)
        source.seek(p)
        try:
            datum = schemaless_reader(
                source, parsed_writer, parsed_reader, return_record_name=True, return_record_name_override=True
            )
            return build(datum), source.tell()
        except SchemaResolutionError as error:
            raise UnknownSchema(f"written by a version that this one cannot follow: {error}") from error
        except Exception as error:  # whatever broken bytes make of a general reader
            raise Undecodable(f"{type(error).__name__}: {error}") from error

    return decode


def _builder(schema: Schema, classes: Mapping[str, type], known: dict[str, Build]) -> Build:
    """What makes a message of the plain values that a general reader gives."""
    if isinstance(schema, list):
        return _union_builder(schema, classes, known)
    if isinstance(schema, str):
        return known.get(short_name(schema), _same)
    kind = schema["type"]
    if kind == "array":
        item = _builder(schema["items"], classes, known)
        return lambda values: tuple(map(item, values))
    if kind == "map":
        item = _builder(schema["values"], classes, known)
        return lambda values: {key: item(value) for key, value in values.items()}
    if kind not in ("record", "enum"):
        return _builder(kind, classes, known)
    name = short_name(full_name(schema))
    made: Any = classes[name]
    if kind == "record":
        fields = [(field["name"], _builder(field["type"], classes, known)) for field in schema["fields"]]
        known[name] = lambda values: made(**{field: build(values[field]) for field, build in fields})
    else:
        known[name] = made
    return known[name]


def _union_builder(branches: list[Schema], classes: Mapping[str, type], known: dict[str, Build]) -> Build:
    builders = [_builder(branch, classes, known) for branch in branches]
    if branches[0] == "null":
        return lambda value: None if value is None else builders[1](value)
    names = [full_name(branch) if isinstance(branch, dict) else branch for branch in branches]
    by_name = {short_name(name): build for name, build in zip(names, builders, strict=True)}
    return lambda pair: by_name[short_name(pair[0])](pair[1])


def _same(value: Any) -> Any:
    return value
