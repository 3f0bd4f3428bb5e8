"""JSON from outside: what is accepted can be stored, listed, replayed and read by any client.

Refused: NaN, Infinity and numbers that overflow to it, unpaired surrogates, invalid UTF-8, and nesting or digits beyond
the documented bounds, which are checked here and not left to an interpreter's own.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import msgspec

from schemas.limits import JSON_DEPTH_MAX, JSON_INTEGER_DIGITS_MAX

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKET = re.compile(rb"[^\[\]{}]+")
_TOO_MANY_DIGITS = re.compile(rb"[0-9]{%d}" % (JSON_INTEGER_DIGITS_MAX + 1))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class NotAcceptable(ValueError):
    """The bytes are not JSON, or not within the bounds; the message completes "the payload …"."""


def check_json(raw: bytes, *, depth_max: int = JSON_DEPTH_MAX) -> Any:
    """The value of a JSON text, integers exactly. Raises NotAcceptable."""
    check_bounds(raw, depth_max=depth_max)
    return decode_json(raw, Any)


def check_bounds(raw: bytes, *, depth_max: int) -> None:
    """Refuse nesting and digits beyond the bounds before a parser meets them. Raises NotAcceptable."""
    if raw.count(b"[") + raw.count(b"{") > depth_max and _depth(raw) > depth_max:
        raise NotAcceptable(f"is nested deeper than {depth_max} levels")
    if len(raw) > JSON_INTEGER_DIGITS_MAX and _TOO_MANY_DIGITS.search(_STRING.sub(b"", raw)):
        raise NotAcceptable(f"has a number of more than {JSON_INTEGER_DIGITS_MAX} digits")


def _depth(raw: bytes) -> int:
    brackets = _NOT_BRACKET.sub(b"", _STRING.sub(b"", raw))
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


def decode_json(raw: bytes, shape: Any) -> Any:
    """Decode within bounds that were checked before. Raises NotAcceptable."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        raise NotAcceptable(f"is not accepted: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotAcceptable(f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise NotAcceptable("is nested too deeply") from error


def canonical_json(value: Any) -> bytes:
    """The same bytes for the same value, whatever the order of keys and the white space were."""
    return msgspec.json.encode(value, order="deterministic")
