"""Python made from Avro schemas: one function that writes, and one that reads, for each record.

A task costs about twenty of these calls, and a general Avro library, which interprets the schema for every value, takes
three to five times as long. So the text of straight-line functions is made of the schema once, as `dataclasses` does:

    def encode_RunningAttempt(m, head=b""):
        return join((head, LONG[len(x := m.task_id.encode())], x, LONG[m.attempt]))

    def decode_RunningAttempt(d, p):
        if (n := d[p]) & 0x81: n, p = length(d, p)
        else: n >>= 1; p += 1
        v_task_id = d[p:(p := p + n)].decode()
        if (n := d[p]) & 0x81: v_attempt, p = long(d, p)
        else: v_attempt = n >> 1; p += 1
        return RunningAttempt(task_id=v_task_id, attempt=v_attempt), p

`d` is the record, `p` the place in it. A number below 64 is one byte, `n` doubled; 0x81 picks out the longer and the
negative ones. A slice beyond the end is short but moves `p` all the same, so whoever called compares it at last with
the length of the record. Broken records raise one of BROKEN. Only a schema's own writer and reader are made here;
records of other versions are read by `schemas.resolved`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from schemas.catalog import Schema, full_name, short_name

Encode = Callable[..., bytes]  # (message, head=b"") → head and body
Decode = Callable[[bytes, int], tuple[Any, int]]  # (record, place) → value, place after it

BROKEN = (IndexError, KeyError, ValueError, OverflowError, struct.error)

_INT64_MAX = 2**63 - 1
_BRANCHES_MAX = 64  # of a union or an enumeration: what one byte can tell
# Short texts that come again and again are kept once: 100,000 waiting tasks share a handful of them.
_REPEATED = frozenset({"task_type", "queue", "tenant_id", "content_type", "worker_id", "source_topic"})
_TEXTS_MAX = 4_096
_TEXT_LENGTH_MAX = 64
# Values that nearly all records of a batch share: the last one is recognised by its bytes.
_SHARED = frozenset({"RetryPolicy"})


class Functions(NamedTuple):
    """How a record of one schema is written and read."""

    encode: Encode
    decode: Decode


def functions_of(schemas: Iterable[Schema], classes: Mapping[str, type]) -> dict[str, Functions]:
    """By name, the functions of all records in `schemas`. ValueError: two of them define a type differently."""
    module = _Module(classes)
    for schema in schemas:
        module.add(schema)
    return {name: Functions(module.names[f"encode_{name}"], module.names[f"decode_{name}"]) for name in module.records}


# --- what the made functions call -------------------------------------------------------------------------------------


def _long_bytes(n: int) -> bytes:
    if not -_INT64_MAX - 1 <= n <= _INT64_MAX:
        raise ValueError(f"{n} does not fit into 64 bits")
    z = n << 1 ^ n >> 63
    if 1 << 49 <= z < 1 << 56:  # instants of our time
        return _PAIRS[z & 16383] + _PAIRS[z >> 14 & 16383] + _PAIRS[z >> 28 & 16383] + _ENDS[z >> 42]
    out = bytearray()
    while z > 127:
        out.append(z & 127 | 128)
        z >>= 7
    out.append(z)
    return bytes(out)


_PAIRS = [bytes((i & 127 | 128, i >> 7 | 128)) for i in range(1 << 14)]
_ENDS = [bytes((i & 127 | 128, i >> 7)) for i in range(1 << 14)]


class _Longs(dict[int, bytes]):
    def __missing__(self, n: int) -> bytes:
        return _long_bytes(n)


_LONG = _Longs((n, _long_bytes(n)) for n in range(-1, 4_096))
_FOUR_PAIRS = struct.Struct("<4H").unpack_from
_PAIR_BITS = [i & 127 | (i >> 8 & 127) << 7 for i in range(1 << 16)]


def _long(d: bytes, p: int) -> tuple[int, int]:
    if p + 8 <= len(d):
        a, b, c, e = _FOUR_PAIRS(d, p)
        if a & b & c & 0x8080 == 0x8080 and e & 0x8080 == 0x0080:  # eight bytes: an instant of our time
            z = _PAIR_BITS[a] | _PAIR_BITS[b] << 14 | _PAIR_BITS[c] << 28 | _PAIR_BITS[e] << 42
            return z >> 1 ^ -(z & 1), p + 8
    byte = d[p]
    z = byte & 127
    shift = 7
    while byte > 127:
        p += 1
        byte = d[p]
        z |= (byte & 127) << shift
        shift += 7
    if z >> 64 or shift > 70:
        raise ValueError("a number of more than 64 bits")
    return z >> 1 ^ -(z & 1), p + 1


def _length(d: bytes, p: int) -> tuple[int, int]:
    n, p = _long(d, p)
    if n < 0:
        raise ValueError("a negative length")
    return n, p


def _string(text: str) -> bytes:
    encoded = text.encode()
    return _LONG[len(encoded)] + encoded


def _bytes(value: bytes) -> bytes:
    return _LONG[len(value)] + value


def _decode_string(d: bytes, p: int) -> tuple[str, int]:
    n, p = _length(d, p)
    return d[p : p + n].decode(), p + n


def _array(values: tuple[Any, ...], item: Encode) -> bytes:
    return b"".join((_LONG[len(values)], *map(item, values), b"\0"))


def _map(values: dict[str, Any], item: Encode) -> bytes:
    pairs = [part for key, value in values.items() for part in (_string(key), item(value))]
    return b"".join((_LONG[len(values)], *pairs, b"\0"))


def _block(d: bytes, p: int) -> tuple[int, int]:
    n, p = _long(d, p)
    if n < 0:  # a writer may say how long the block is in bytes
        n = -n
        _, p = _length(d, p)
    return n, p


def _decode_array(d: bytes, p: int, item: Decode) -> tuple[tuple[Any, ...], int]:
    values = []
    n, p = _block(d, p)
    while n:
        for _ in range(n):
            value, p = item(d, p)
            values.append(value)
        n, p = _block(d, p)
    return tuple(values), p


def _decode_map(d: bytes, p: int, item: Decode) -> tuple[dict[str, Any], int]:
    values = {}
    n, p = _block(d, p)
    while n:
        for _ in range(n):
            key, p = _decode_string(d, p)
            values[key], p = item(d, p)
        n, p = _block(d, p)
    return values, p


def _no_branch() -> None:
    raise ValueError("a branch that the union does not have")


def _union(branches: Mapping[type, tuple[bytes, Encode]]) -> Encode:
    def encode(value: Any) -> bytes:
        tag, branch = branches[type(value)]
        return branch(value, tag)

    return encode


_texts: dict[bytes, str] = {}


def _text(encoded: bytes) -> str:
    text = encoded.decode()
    if len(encoded) <= _TEXT_LENGTH_MAX:
        if len(_texts) >= _TEXTS_MAX:
            _texts.clear()
        _texts[encoded] = text
    return text


def _encode_shared(encode: Encode) -> Encode:
    last: tuple[Any, bytes] = (None, b"")

    def encode_again(value: Any) -> bytes:
        nonlocal last
        known, encoded = last
        if value is known:
            return encoded
        encoded = encode(value)
        last = (value, encoded)
        return encoded

    return encode_again


def _decode_shared(decode: Decode) -> Decode:
    last: tuple[bytes, Any] = (b"", None)

    def decode_again(d: bytes, p: int) -> tuple[Any, int]:
        nonlocal last
        encoded, value = last
        if encoded and d.startswith(encoded, p):
            return value, p + len(encoded)
        value, end = decode(d, p)
        if end <= len(d):  # else it is a truncated record, and its bytes stand for nothing
            last = (d[p:end], value)
        return value, end

    return decode_again


# --- the making -------------------------------------------------------------------------------------------------------

_ONE = {"string": "string", "bytes": "bytes_", "long": "LONG.__getitem__"}
_WRITE = {
    "string": "LONG[len(x := {0}.encode())], x",
    "bytes": "LONG[len(x := {0})], x",
    "long": "LONG[{0}]",
    "double": "pack_double({0})",
    "boolean": "BOOL[{0}]",
}
_SIZE = ["if (n := d[p]) & 0x81: n, p = length(d, p)", "else: n >>= 1; p += 1"]
_READ = {
    "string": [*_SIZE, "{0} = d[p:(p := p + n)].decode()"],
    "repeated": [*_SIZE, "{0} = texts.get(x := d[p:(p := p + n)]) or text(x)"],
    "bytes": [*_SIZE, "{0} = d[p:(p := p + n)]"],
    "long": ["if (n := d[p]) & 0x81: {0}, p = long(d, p)", "else: {0} = n >> 1; p += 1"],
    "double": ["{0}, = unpack_double(d, p); p += 8"],
    "boolean": ["{0} = TRUTH[d[p]]; p += 1"],
}


class _Module:
    """The names that the made functions see, and the functions made so far."""

    def __init__(self, classes: Mapping[str, type]) -> None:
        self.classes = classes
        self.records: dict[str, Schema] = {}
        self._enums: dict[str, Schema] = {}
        self.names: dict[str, Any] = {
            "join": b"".join,
            "LONG": _LONG,
            "long": _long,
            "length": _length,
            "string": _string,
            "bytes_": _bytes,
            "texts": _texts,
            "text": _text,
            "array": _array,
            "map_": _map,
            "decode_array": _decode_array,
            "decode_map": _decode_map,
            "decode_string": _decode_string,
            "decode_long": _long,
            "no_branch": _no_branch,
            "pack_double": struct.Struct("<d").pack,
            "unpack_double": struct.Struct("<d").unpack_from,
            "BOOL": (b"\0", b"\1"),
            "TRUTH": {0: False, 1: True},
        }

    def add(self, schema: Schema) -> str:
        """Make what `schema` needs; returns its primitive type, `enum X`, `record X`, or the kind of a compound."""
        if isinstance(schema, list):
            return "union"
        if isinstance(schema, str):
            name = short_name(schema)
            kind = "record " if name in self.records else "enum " if name in self._enums else ""
            return kind + name
        if schema["type"] == "enum":
            return self._add_enum(schema)
        if schema["type"] == "record":
            return self._add_record(schema)
        return str(schema["type"])

    def _add_enum(self, schema: Schema) -> str:
        name = short_name(full_name(schema))
        symbols = schema["symbols"]
        if self._enums.setdefault(name, schema) != schema or len(symbols) > _BRANCHES_MAX:
            raise ValueError(f"{name}: two definitions, or more than {_BRANCHES_MAX} symbols")
        members = [self.classes[name](symbol) for symbol in symbols]
        self.names[f"ENCODE_{name}"] = {member: _LONG[i] for i, member in enumerate(members)}
        self.names[f"DECODE_{name}"] = {2 * i: member for i, member in enumerate(members)}
        return f"enum {name}"

    def _add_record(self, schema: Schema) -> str:
        name = short_name(full_name(schema))
        if name in self.records:
            if self.records[name] != _outline(schema):
                raise ValueError(f"{name}: two definitions")
            return f"record {name}"
        fields = [(field["name"], field["type"]) for field in schema["fields"]]
        writes = ", ".join(self._write(f"m.{field}", of) for field, of in fields)
        reads = [line for field, of in fields for line in self._read(f"v_{field}", of, field in _REPEATED)]
        arguments = ", ".join(f"{field}=v_{field}" for field, _ in fields)
        self.names[name] = self.classes[name]
        encode = self._make(f"encode_{name}", "m, head=b''", [f"return join((head, {writes}))"])
        decode = self._make(f"decode_{name}", "d, p", [*reads, f"return {name}({arguments}), p"])
        if name in _SHARED:
            self.names[f"encode_{name}"] = _encode_shared(encode)
            self.names[f"decode_{name}"] = _decode_shared(decode)
        self.records[name] = _outline(schema)
        return f"record {name}"

    def _make(self, name: str, arguments: str, body: list[str]) -> Any:
        text = f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in body)
        exec(compile(text, f"<{name}>", "exec"), self.names)
        return self.names[name]

    def _write(self, value: str, schema: Schema) -> str:
        """The expressions, separated by commas, of the bytes of `value`."""
        kind = self.add(schema)
        if kind in _WRITE:
            return _WRITE[kind].format(value)
        if kind == "union":
            return self._write_union(value, schema)
        if kind in ("array", "map"):
            item = self._one(schema["items" if kind == "array" else "values"])
            return f"{'array' if kind == 'array' else 'map_'}(x, {item}) if (x := {value}) else b'\\0'"
        return f"ENCODE_{kind[5:]}[{value}]" if kind.startswith("enum") else f"encode_{kind[7:]}({value})"

    def _one(self, schema: Schema) -> str:
        """A name of the function from one value to its bytes."""
        kind = self.add(schema)
        return _ONE[kind] if kind in _ONE else f"encode_{kind[7:]}"

    def _write_union(self, value: str, branches: list[Schema]) -> str:
        if branches[0] == "null":
            inner = self.add(branches[1])
            present = f"{_ONE[inner]}(x)" if inner in ("string", "bytes") else self._write("x", branches[1])
            return f"b'\\0' if (x := {value}) is None else b'\\2' + ({present})"
        records = [self.add(branch)[7:] for branch in branches]
        union = f"encode_{'_'.join(records)}"
        self.names[union] = _union(
            {self.classes[name]: (_LONG[i], self.names[f"encode_{name}"]) for i, name in enumerate(records)}
        )
        return f"{union}({value})"

    def _read(self, name: str, schema: Schema, is_repeated: bool = False) -> list[str]:
        """The statements that read a value into the variable `name`."""
        kind = self.add(schema)
        if kind in _READ:
            return [line.format(name) for line in _READ["repeated" if is_repeated and kind == "string" else kind]]
        if kind == "union":
            return self._read_union(name, schema, is_repeated)
        if kind in ("array", "map"):
            inner = self.add(schema["items" if kind == "array" else "values"])
            item = f"decode_{inner.split()[-1]}"
            return [
                f"if d[p] == 0: {name} = {'()' if kind == 'array' else '{}'}; p += 1",
                f"else: {name}, p = decode_{kind}(d, p, {item})",
            ]
        if kind.startswith("enum"):
            return [f"{name} = DECODE_{kind[5:]}[d[p]]; p += 1"]
        return [f"{name}, p = decode_{kind[7:]}(d, p)"]

    def _read_union(self, name: str, branches: list[Schema], is_repeated: bool) -> list[str]:
        if branches[0] == "null":
            present = self._read(name, branches[1], is_repeated)
            return [
                "n = d[p]; p += 1",
                f"if n == 0: {name} = None",
                "elif n == 2:",
                *(f"    {line}" for line in present),
                "else: no_branch()",
            ]
        records = [self.add(branch)[7:] for branch in branches]
        union = f"DECODE_{'_'.join(records)}"
        self.names[union] = {2 * i: self.names[f"decode_{record}"] for i, record in enumerate(records)}
        return [f"{name}, p = {union}[d[p]](d, p + 1)"]


def _outline(schema: Schema) -> Schema:
    """A record's names alone: in a self-contained schema only the first mention of a type defines it."""
    return [(field["name"], _mention(field["type"])) for field in schema["fields"]]


def _mention(schema: Schema) -> Schema:
    if isinstance(schema, list):
        return [_mention(branch) for branch in schema]
    if isinstance(schema, str):
        return short_name(schema)
    if "name" in schema:
        return short_name(full_name(schema))
    return [schema["type"], _mention(schema.get("items", schema.get("values")))]
