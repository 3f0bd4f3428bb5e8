"""Messages to test with: fixed ones of every kind, and strategies that make any."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from schemas import messages
from schemas.catalog import newest
from schemas.messages import Event, EventBody, Message

BODIES: tuple[type[Message], ...] = typing.get_args(EventBody)
TOPIC_TYPES: tuple[type[Message], ...] = tuple(getattr(messages, name) for name in newest())

_INSTANT = 1_764_547_200_000_000  # 2025-12-01T00:00Z
_PLAIN: dict[type, tuple[Any, Any]] = {  # a small value and one that shows more
    str: ("a", "Zürich 🦉"),
    int: (0, _INSTANT),
    float: (0.0, -1.5),
    bool: (False, True),
    bytes: (b"", b"\x00\xff null"),
}
_STRATEGIES: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=80),
    int: st.integers(-(2**63), 2**63 - 1) | st.integers(-70, 70),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=300),
}


def minimal(of: type[Message], **given: Any) -> Any:
    """A message with nothing but what it must have."""
    required = {f.name: f.type for f in msgspec.structs.fields(of) if f.required and f.name not in given}
    return of(**given, **{name: _value(kind, is_full=False) for name, kind in required.items()})


def full(of: type[Message], **given: Any) -> Any:
    """A message with a value in every field."""
    kinds = {f.name: f.type for f in msgspec.structs.fields(of) if f.name not in given}
    return of(**given, **{name: _value(kind, is_full=True) for name, kind in kinds.items()})


def named_samples() -> dict[str, Message]:
    """Two messages of each type that is written to a topic, and of each kind of event, by a stable name."""
    samples: dict[str, Message] = {}
    for of in TOPIC_TYPES:
        if of is not Event:
            samples[f"{of.__name__}.minimal"] = minimal(of)
            samples[f"{of.__name__}.full"] = full(of)
    for body in BODIES:
        samples[f"Event.{body.__name__}.minimal"] = minimal(Event, body=minimal(body))
        samples[f"Event.{body.__name__}.full"] = full(Event, body=full(body))
    return samples


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that messages are made of."""
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            return st.one_of([strategy(one) for one in arguments])
        case origin if origin is tuple:
            return st.lists(strategy(arguments[0]), max_size=3).map(tuple)
        case origin if origin is dict:
            return st.dictionaries(st.text(max_size=10), strategy(arguments[1]), max_size=3)
    if kind is type(None):
        return st.none()
    if kind in _STRATEGIES:
        return _STRATEGIES[kind]
    if issubclass(kind, enum.Enum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{f.name: strategy(f.type) for f in msgspec.structs.fields(kind)})


def plain(value: Any) -> Any:
    """What a general Avro reader gives for a value: dicts, lists, and (name, dict) for an event's body."""
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return (f"tidewheel.{type(value).__name__}", fields) if type(value) in BODIES else fields
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def _value(kind: Any, *, is_full: bool) -> Any:
    arguments = [one for one in typing.get_args(kind) if one is not type(None)]
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            return _value(arguments[0], is_full=is_full) if is_full or len(arguments) > 1 else None
        case origin if origin is tuple:
            return (_value(arguments[0], is_full=True),) * 2 if is_full else ()
        case origin if origin is dict:
            return {"k": _value(arguments[1], is_full=True), "ü": _value(arguments[1], is_full=True)} if is_full else {}
    if kind in _PLAIN:
        return _PLAIN[kind][is_full]
    if issubclass(kind, enum.Enum):
        return list(kind)[1 if is_full else 0]
    return full(kind) if is_full else minimal(kind)
