"""Handlers: what may be registered, and how payloads become arguments and results become values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from schemas.limits import JSON_DEPTH_MAX, PAYLOAD_MAX
from schemas.messages import Priority, ReadyTask
from tests.samples import minimal
from workers.context import Context
from workers.errors import ArgumentError, RegistrationError
from workers.registry import ExecutorKind, Handler, Registry

JSON = "application/json"
CONTEXT = Context(minimal(ReadyTask), None, lambda ready, checkpoint: None)


class Item(pydantic.BaseModel):
    sku: str
    count: int = pydantic.Field(gt=0)


class Point(msgspec.Struct):
    x: int
    y: int


@dataclass
class Order:
    items: list[Item]
    placed_at: datetime


def arguments(function: Any, payload: bytes, content_type: str = JSON) -> dict[str, Any]:
    return Handler(function, name="t").arguments(payload, content_type, CONTEXT)


def plain(path: str, n: int = 3, *, tags: list[str] | None = None) -> None: ...
def untyped(a, b=None): ...  # type: ignore[no-untyped-def]
def one(point: Point) -> None: ...
def optional(n: int | None = 7) -> None: ...
def nothing() -> None: ...
def model(item: Item, more: list[Item] | None = None) -> None: ...
def constrained(n: Annotated[int, pydantic.Field(gt=3)]) -> None: ...
def nested(order: Order) -> None: ...
def path(where: Path, at: datetime) -> None: ...
def with_context(context: Context, n: int) -> None: ...
def anything(n: int, **rest: Any) -> None: ...
def opaque(content: bytes) -> None: ...
def odd(self: int, cls: int, __x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "payload", "expected"),
    [
        (plain, b'{"path": "/x", "n": 9, "tags": ["a"]}', {"path": "/x", "n": 9, "tags": ["a"]}),
        (plain, b' \n{"path": "/x"}', {"path": "/x"}),
        (plain, b'"/x"', None),
        (untyped, b'{"a": [1, {"b": null}], "b": 9007199254740993}', {"a": [1, {"b": None}], "b": 9007199254740993}),
        (one, b'{"point": {"x": 1, "y": 2}}', {"point": Point(1, 2)}),
        (optional, b"5", {"n": 5}),
        (optional, b"null", {}),
        (optional, b'{"n": null}', {"n": None}),
        (nothing, b"null", {}),
        (nothing, b"{}", {}),
        (nothing, b"", {}),
        (model, b'{"item": {"sku": "a", "count": 1}}', {"item": Item(sku="a", count=1)}),
        (
            model,
            b'{"item": {"sku": "a", "count": 1}, "more": [{"sku": "b", "count": 2}]}',
            {"item": Item(sku="a", count=1), "more": [Item(sku="b", count=2)]},
        ),
        (constrained, b"4", {"n": 4}),
        (
            nested,
            b'{"order": {"items": [{"sku": "a", "count": 1}], "placed_at": "2026-01-01T00:00:00Z"}}',
            {"order": Order([Item(sku="a", count=1)], datetime(2026, 1, 1, tzinfo=UTC))},
        ),
        (
            path,
            b'{"where": "/tmp/x", "at": "2026-01-01T00:00:00Z"}',
            {"where": Path("/tmp/x"), "at": datetime(2026, 1, 1, tzinfo=UTC)},
        ),
        (with_context, b'{"n": 1}', {"n": 1, "context": CONTEXT}),
        (with_context, b"1", {"n": 1, "context": CONTEXT}),
        (anything, b'{"n": 1, "z": [2]}', {"n": 1, "z": [2]}),
        (odd, b'{"self": 1, "cls": 2, "__x": 3}', {"self": 1, "cls": 2, "__x": 3}),
    ],
)
def test_a_payload_becomes_typed_arguments(function: Any, payload: bytes, expected: dict[str, Any] | None) -> None:
    if expected is None:
        with pytest.raises(ArgumentError):
            arguments(function, payload)
    else:
        assert arguments(function, payload) == expected


@pytest.mark.parametrize(
    ("function", "payload", "named"),
    [
        (plain, b'{"path": 1}', "path"),
        (plain, b'{"n": 1}', "path"),
        (plain, b'{"path": "x", "m": 1}', "`m`"),
        (plain, b'{"path": "x", "tags": ["a", 1]}', r"tags\[1\]"),
        (plain, b"[1, 2]", "path: str, n: int = 3"),
        (plain, b"null", "path"),
        (nothing, b"5", "none"),
        (nothing, b'{"n": 5}', "`n`"),
        (one, b'{"x": 1, "y": 2}', "`x`|point"),
        (model, b'{"item": {"sku": "a", "count": 0}}', "'item'(.|\n)*count"),
        (constrained, b"3", "'n'"),
        (with_context, b'{"n": 1, "context": {}}', "`context`"),
        (plain, b'{"path": "x", "n": 1e999}', "n"),
        (plain, b'{"path": NaN}', "JSON"),
        (untyped, b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", "JSON"),
        (plain, b'{"path"', "JSON"),
        (plain, b'{"path": "\xff"}', "JSON|utf"),
    ],
)
def test_wrong_arguments_are_refused_by_name(function: Any, payload: bytes, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        arguments(function, payload)


def test_other_content_goes_to_a_handler_of_bytes_only() -> None:
    assert arguments(opaque, b"\x00\xff", "application/octet-stream") == {"content": b"\x00\xff"}
    with pytest.raises(ArgumentError, match="annotated bytes"):
        arguments(plain, b"x", "text/plain")
    assert arguments(optional, b"1", "application/json; charset=utf-8") == {"n": 1}


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (plain, ("/x", 4), {"tags": ["a"]}),
        (nothing, (), {}),
        (model, (Item(sku="a", count=1),), {"more": [Item(sku="b", count=2)]}),
        (one, (Point(1, 2),), {}),
        (path, (Path("/tmp/é"), datetime(2026, 1, 1, tzinfo=UTC)), {}),
        (with_context, (5,), {}),
        (anything, (1,), {"z": 2}),
        (untyped, (2**70, 9007199254740993), {}),
        (untyped, ("\x00 \U0001f989 \\u0000", {"k\x00": 1}), {}),
    ],
)
def test_what_is_submitted_is_what_the_handler_gets(function: Any, args: Any, kwargs: Any) -> None:
    handler = Handler(function, name="t")
    received = handler.arguments(handler.payload(args, kwargs), JSON, CONTEXT)
    received.pop("context", None)
    names = [name for name in received if name not in kwargs]
    assert received == dict(zip(names, args, strict=True)) | kwargs


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((), {}, "path"),
        (("x", 1, 2, 3), {}, "too many"),
        (("x",), {"m": 1}, "'m'"),
        (("x", float("nan")), {}, "NaN"),
        (("\ud800",), {}, "surrogate"),
        (("x" * PAYLOAD_MAX,), {}, str(PAYLOAD_MAX)),
        ((object(),), {}, "object"),
    ],
)
def test_a_submission_that_cannot_be_stored_is_refused(args: Any, kwargs: Any, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        Handler(plain, name="t").payload(args, kwargs)


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False])
def test_empty_results_stay_what_they_are(value: Any) -> None:
    """C43."""
    handler = Handler(nothing_annotated, name="t")
    assert handler.result(msgspec.json.encode(value)) == value
    assert type(handler.result(msgspec.json.encode(value))) is type(value)


def nothing_annotated(): ...  # type: ignore[no-untyped-def]


def test_a_result_becomes_what_the_handler_is_annotated_to_return() -> None:
    def items() -> list[Item]:
        raise NotImplementedError

    def numbers() -> Iterator[int]:
        raise NotImplementedError

    assert Handler(items, name="t").result(b'[{"sku": "a", "count": 1}]') == [Item(sku="a", count=1)]
    assert Handler(numbers, name="t").result(b"[1]") == [1]


async def coroutine() -> None: ...
def positional(a: int, /) -> None: ...
def variadic(*a: int) -> None: ...
def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


def test_the_executor_follows_from_the_callable() -> None:
    class Callable:
        async def __call__(self, n: int) -> None: ...

    assert Handler(coroutine, name="t").executor is ExecutorKind.ASYNC
    assert Handler(Callable(), name="t").executor is ExecutorKind.ASYNC
    assert Handler(nothing, name="t").executor is ExecutorKind.THREAD
    assert Handler(nothing, name="t", executor="process", priority="high").priority is Priority.HIGH


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (nothing, {"name": "a b"}, "A-Z"),
        (nothing, {"queue": ""}, "queue"),
        (nothing, {"executor": "fiber"}, "'async', 'thread', 'process'"),
        (nothing, {"executor": "async"}, "async def"),
        (coroutine, {"executor": "thread"}, "plain `def`"),
        (lambda: None, {"executor": "process"}, "module level|<lambda>"),
        (nothing, {"priority": "urgent"}, "'high', 'medium', 'low'"),
        (nothing, {"timeout_ms": 0}, "timeout_ms"),
        (nothing, {"lease_ms": 1.5}, "lease_ms"),
        (positional, {}, "'a: int'"),
        (variadic, {}, r"\*a"),
        (generator, {}, "generator"),
        (async_generator, {}, "generator"),
        ("text", {}, "called"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_registered(function: Any, options: Any, reason: str) -> None:
    if options.get("executor") == "process":

        def local() -> None: ...

        function = local
    with pytest.raises(RegistrationError, match=reason):
        Handler(function, **{"name": "t", **options})


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    def late(x: Missing) -> None: ...  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(RegistrationError, match="Missing"):
        Handler(late, name="t")


def test_a_name_is_registered_once() -> None:
    registry = Registry()
    handler = registry.add(Handler(nothing, name="t"))
    with pytest.raises(RegistrationError, match=r"'t' is registered twice: .*nothing and .*plain"):
        registry.add(Handler(plain, name="t"))
    assert registry.get("t") is handler
    assert registry.get("u") is None
    assert registry.names() == ("t",)


def test_a_payload_at_the_depth_limit_can_be_submitted_and_one_deeper_cannot() -> None:
    """C40."""

    def nest(levels: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(levels - 1):
            value = [value]
        return value

    handler = Handler(untyped, name="t")
    handler.payload((nest(JSON_DEPTH_MAX - 1),), {})  # the object of the arguments is a level too
    with pytest.raises(ArgumentError, match=str(JSON_DEPTH_MAX)):
        handler.payload((nest(JSON_DEPTH_MAX),), {})
