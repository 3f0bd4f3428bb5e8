"""Python values as JSON and back: arguments, results and checkpoints.

What is written can be read by every JSON parser: no NaN, no broken Unicode, bounded size, nesting and numbers.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import msgspec

from schemas.limits import JSON_DEPTH_MAX, JSON_INTEGER_DIGITS_MAX
from workers.errors import NotSerialisable

JSON = "application/json"
Decode = Callable[[bytes], Any]
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_BRACKETS = re.compile(rb"[\[{]+|[\]}]+")
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (JSON_INTEGER_DIGITS_MAX + 1))


def encode_json(value: object, size_max: int) -> bytes:
    """`value` as JSON of at most `size_max` bytes. Raises NotSerialisable, and nothing else, for any value."""
    try:
        content = _encoder.encode(value)
        # msgspec writes NaN and Infinity as null, so only what contains a null can have held one.
        if b"null" in content and _has_non_finite(msgspec.to_builtins(value, enc_hook=_to_plain)):
            raise NotSerialisable("it contains NaN or Infinity, which JSON does not have")
    except NotSerialisable:
        raise
    except RecursionError:
        raise NotSerialisable(f"it is nested deeper than {JSON_DEPTH_MAX} levels, or contains itself") from None
    except UnicodeEncodeError:
        raise NotSerialisable("a text in it contains a lone surrogate, which UTF-8 does not have") from None
    except Exception as error:
        # The value's own code (a model's serializer, a property) may raise anything.
        raise NotSerialisable(f"{type(error).__name__}: {error}"[:1000]) from error
    _check_bounds(content, size_max)
    return content


def decode_json(content: bytes) -> Any:
    """The plain value of a JSON text that `encode_json` wrote."""
    return msgspec.json.decode(content)


def from_json(wanted: type, value: object) -> Any:
    """Make what msgspec does not know by itself from a JSON value (msgspec's `dec_hook`)."""
    plain = typing.get_origin(wanted) or wanted
    if issubclass(plain, PurePath) and isinstance(value, str):
        return plain(value)
    if isinstance(value, plain):
        return value
    validate = getattr(plain, "model_validate", None)  # a pydantic model inside a dataclass or struct
    if validate is not None:
        return validate(value)
    raise TypeError(f"a {plain.__name__} can't be made from JSON")


def is_fast(annotation: Any) -> bool:
    """Whether msgspec alone can make it: no pydantic model in it and no constraints in pydantic's terms."""
    if hasattr(annotation, "__get_pydantic_core_schema__") or hasattr(annotation, "__pydantic_core_schema__"):
        return False
    metadata = getattr(annotation, "__metadata__", ())
    if any(type(item).__module__.partition(".")[0] in ("pydantic", "annotated_types") for item in metadata):
        return False
    return all(is_fast(part) for part in typing.get_args(annotation))


def decoder_of(annotation: Any) -> Decode:
    """Makes a value of an annotated type of JSON text, or raises ValueError.

    TypeError or ValueError: there are no values of that type in JSON.
    """
    if is_fast(annotation):
        return msgspec.json.Decoder(annotation, dec_hook=from_json).decode
    from pydantic import TypeAdapter  # only where a handler's annotations ask for it

    return TypeAdapter(annotation).validate_json


def _to_plain(value: object) -> object:
    dump = getattr(value, "model_dump", None)  # a pydantic model, without importing pydantic
    if dump is not None:
        return dump(mode="json")
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


_encoder = msgspec.json.Encoder(enc_hook=_to_plain)


def _has_non_finite(value: object) -> bool:
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            rest.extend(item)
    return False


def _check_bounds(content: bytes, size_max: int) -> None:
    if len(content) > size_max:
        raise NotSerialisable(f"it has {len(content)} bytes as JSON; at most {size_max} are allowed")
    is_flat = content.count(b"[") + content.count(b"{") <= JSON_DEPTH_MAX
    if is_flat and len(content) <= JSON_INTEGER_DIGITS_MAX:
        return
    bare = _STRING.sub(b'""', content)
    if _depth(bare) > JSON_DEPTH_MAX:
        raise NotSerialisable(f"it is nested deeper than {JSON_DEPTH_MAX} levels")
    if _LONG_NUMBER.search(bare):
        raise NotSerialisable(f"it contains an integer of more than {JSON_INTEGER_DIGITS_MAX} digits")


def _depth(bare: bytes) -> int:
    depth = deepest = 0
    for match in _BRACKETS.finditer(bare):
        run = match.group()
        depth += len(run) if run[:1] in b"[{" else -len(run)
        deepest = max(deepest, depth)
    return deepest
