"""Handlers by name, and how a task's payload becomes a handler's arguments.

A payload is a JSON object of the arguments by name. A JSON value that is not an object is the one argument of a
handler that takes one; `null` stands for no arguments where that is possible. Parameters annotated `Context` are
filled in by the worker. Every argument is converted to its annotated type, and refused if it doesn't fit. Handlers of
batches take items instead (`workers.batches`).
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from schemas.ids import NAME_RULE, is_name
from schemas.limits import DURATION_MS_MAX, PAYLOAD_MAX
from schemas.messages import Priority, RetryPolicy
from workers.batches import Batch, Items
from workers.context import Context
from workers.errors import ArgumentError, NotSerialisable, RegistrationError
from workers.values import JSON, Decode, decode_json, decoder_of, encode_json, from_json, is_fast

Function = Callable[..., Any]
_WHITESPACE = b" \t\r\n"


class ExecutorKind(StrEnum):
    """Where a handler runs."""

    ASYNC = "async"  # a coroutine on the worker's event loop
    THREAD = "thread"
    PROCESS = "process"  # the only one that can be killed


class Handler:
    """A callable that runs tasks of one type, and the defaults of such tasks."""

    __slots__ = (
        "_parameters",
        "_returns",
        "batch",
        "executor",
        "function",
        "is_coroutine",
        "items",
        "lease_ms",
        "name",
        "priority",
        "queue",
        "retry",
        "timeout_ms",
    )

    def __init__(
        self,
        function: Function,
        *,
        name: str,
        executor: ExecutorKind | str | None = None,
        queue: str = "default",
        priority: Priority | str = Priority.MEDIUM,
        retry: RetryPolicy | None = None,
        timeout_ms: int | None = None,
        lease_ms: int = 300_000,
        batch: Batch | None = None,
    ) -> None:
        """RegistrationError if the callable or an option is not allowed; by default `def` runs in a thread."""
        if not is_name(name):
            raise RegistrationError(f"task type {name!r}: a name must be {NAME_RULE}")
        if not is_name(queue):
            raise RegistrationError(f"task {name!r}: queue {queue!r} must be {NAME_RULE}")
        self.name = name
        self.function = function
        self.is_coroutine = _is_coroutine(function, name)
        self.executor = _executor_of(function, self.is_coroutine, executor, name)
        self.queue = queue
        self.priority = _one_of(Priority, priority, name, "priority")
        self.retry = retry or RetryPolicy()
        self.timeout_ms = None if timeout_ms is None else _duration(timeout_ms, name, "timeout_ms")
        self.lease_ms = _duration(lease_ms, name, "lease_ms")
        self.batch = _batch(batch, self.executor, name)
        signature = _signature(function, name)
        self.items = None if batch is None else Items(signature, name)
        self._parameters = _Parameters(signature, name) if self.items is None else None
        self._returns = signature.return_annotation if self.items is None else self.items.result_type

    def arguments(self, payload: bytes, content_type: str, context: Context) -> dict[str, Any]:
        """The arguments to call the function with. ArgumentError: the payload doesn't fit; it names the parameter.

        Not for handlers of batches, whose arguments come of `items`.
        """
        parameters = self._parameters
        assert parameters is not None
        arguments = parameters.decode(payload, content_type)
        for parameter in parameters.contexts:
            arguments[parameter] = context
        return arguments

    def payload(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The payload that calls the function with these arguments; ArgumentError if they don't fit its parameters.

        Of a task for a batch handler: its item, or the fields of the item by name.
        """
        if self.items is not None:
            return self.items.encode(args, kwargs)
        assert self._parameters is not None
        return self._parameters.encode(args, kwargs)

    def result(self, content: bytes) -> Any:
        """A stored result as what the function is annotated to return; as plain JSON if that can't be made of it."""
        if self._returns in (inspect.Signature.empty, Any):
            return decode_json(content)
        try:
            return decoder_of(self._returns)(content)
        except (TypeError, ValueError):  # for instance Iterator[int], of which there is no value in JSON
            return decode_json(content)


class Registry:
    """The handlers of an application, by the name of the task type. An explicit object; there is no global one."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def add(self, handler: Handler) -> Handler:
        """Take a handler in. RegistrationError: another one has its name."""
        other = self._handlers.get(handler.name)
        if other is not None:
            raise RegistrationError(
                f"task {handler.name!r} is registered twice: {_place(other.function)} and {_place(handler.function)}"
            )
        self._handlers[handler.name] = handler
        return handler

    def get(self, name: str) -> Handler | None:
        """The handler of a task type, or None."""
        return self._handlers.get(name)

    def names(self) -> tuple[str, ...]:
        """The task types, in alphabetical order."""
        return tuple(sorted(self._handlers))

    def executors(self) -> frozenset[ExecutorKind]:
        """Which executors the handlers need."""
        return frozenset(handler.executor for handler in self._handlers.values())

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)


class _Parameters:
    """The parameters of a function, compiled: one pass from JSON to typed arguments."""

    def __init__(self, signature: inspect.Signature, task: str) -> None:
        self.contexts: list[str] = []
        self._accepts_any = False
        taken: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            self._sort(parameter, taken, task)
        self._names = [parameter.name for parameter in taken]
        self._signature = signature.replace(
            parameters=[p for p in signature.parameters.values() if p.name not in self.contexts],
            return_annotation=inspect.Signature.empty,
        )
        self._is_callable_bare = all(parameter.default is not parameter.empty for parameter in taken)
        self._slow: dict[str, Decode] = {}
        self._record = self._compile(taken, task)
        self._single = self._slow.get(taken[0].name) or decoder_of(_type_of(taken[0])) if len(taken) == 1 else None
        self._takes_bytes = len(taken) == 1 and taken[0].annotation is bytes

    def _sort(self, parameter: inspect.Parameter, taken: list[inspect.Parameter], task: str) -> None:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise RegistrationError(
                f"task {task!r}: parameter {str(parameter)!r} has no name in a payload; "
                "parameters must be callable by keyword"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            self._accepts_any = True
        elif _is_context(parameter.annotation):
            self.contexts.append(parameter.name)
        elif Context in typing.get_args(parameter.annotation):
            raise RegistrationError(
                f"task {task!r}: parameter {str(parameter)!r} is for batch handlers; "
                "declare batch=Batch(…), or take a Context"
            )
        else:
            taken.append(parameter)

    def _compile(self, taken: list[inspect.Parameter], task: str) -> msgspec.json.Decoder[Any]:
        fields: list[tuple[str, Any, Any] | tuple[str, Any]] = []
        for place, parameter in enumerate(taken):
            wanted = _type_of(parameter)
            try:
                slow = None if is_fast(wanted) else decoder_of(wanted)
            except (TypeError, ValueError) as error:
                raise RegistrationError(
                    f"task {task!r}: parameter {parameter.name!r} has a type that can't come from JSON: {error}"
                ) from error
            if slow is not None:
                self._slow[parameter.name] = slow
                wanted = msgspec.Raw
            # Fields are numbered, since a parameter's name may be one that a struct can't have.
            name = f"p{place}"
            is_required = parameter.default is parameter.empty
            fields.append((name, wanted) if is_required else (name, wanted, msgspec.UNSET))
        record = msgspec.defstruct(
            "Arguments",
            fields,
            kw_only=True,
            forbid_unknown_fields=not self._accepts_any,
            rename={f"p{place}": parameter.name for place, parameter in enumerate(taken)},
        )
        return msgspec.json.Decoder(record, dec_hook=from_json)

    def decode(self, payload: bytes, content_type: str) -> dict[str, Any]:
        """The arguments in a payload, without the contexts."""
        if content_type.partition(";")[0].strip().lower() not in (JSON, ""):
            return self._opaque(payload, content_type)
        text = payload if payload[:1] == b"{" else payload.strip(_WHITESPACE)
        try:
            if text[:1] == b"{":
                return self._object(text)
            return self._value(text)
        except msgspec.ValidationError as error:
            raise ArgumentError(f"{error}; the parameters are: {self._listed()}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise ArgumentError(f"the payload is no JSON: {error}") from error

    def _object(self, text: bytes) -> dict[str, Any]:
        record = self._record.decode(text)
        values = zip(self._names, msgspec.structs.astuple(record), strict=True)
        arguments: dict[str, Any] = {name: value for name, value in values if value is not msgspec.UNSET}
        for name, decode in self._slow.items():
            if name in arguments:
                arguments[name] = self._slowly(name, decode, bytes(arguments[name]))
        if self._accepts_any:
            everything = decode_json(text)
            arguments.update({name: everything[name] for name in everything if name not in self._names})
        return arguments

    def _value(self, text: bytes) -> dict[str, Any]:
        if text in (b"null", b"") and self._is_callable_bare:
            return {}
        if self._single is None:
            raise ArgumentError(f"the payload must be a JSON object; the parameters are: {self._listed()}")
        name = self._names[0]
        if name in self._slow:
            return {name: self._slowly(name, self._single, text)}
        try:
            return {name: self._single(text)}
        except msgspec.ValidationError as error:
            raise ArgumentError(f"parameter {name!r}: {error}") from error

    def _slowly(self, name: str, decode: Decode, text: bytes) -> Any:
        try:
            return decode(text)
        except ValueError as error:  # pydantic's ValidationError is one, and so is what its validators raise
            raise ArgumentError(f"parameter {name!r}: {error}") from error

    def _opaque(self, payload: bytes, content_type: str) -> dict[str, Any]:
        if self._takes_bytes:
            return {self._names[0]: payload}
        raise ArgumentError(
            f"a payload of type {content_type!r} needs a handler with one parameter, annotated bytes; "
            f"the parameters are: {self._listed()}"
        )

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The payload for a call."""
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{error}; the parameters are: {self._listed()}") from error
        arguments = {name: bound[name] for name in self._names if name in bound}
        for name in bound.keys() - arguments.keys():  # what **kwargs took
            arguments.update(bound[name])
        try:
            return encode_json(arguments, PAYLOAD_MAX)
        except NotSerialisable as error:
            raise ArgumentError(f"the arguments can't be stored: {error}") from error

    def _listed(self) -> str:
        parameters = self._signature.parameters.values()
        return ", ".join(str(parameter) for parameter in parameters) or "none"


# --- types ------------------------------------------------------------------------------------------------------------


def _type_of(parameter: inspect.Parameter) -> Any:
    return Any if parameter.annotation is parameter.empty else parameter.annotation


def _is_context(annotation: Any) -> bool:
    if annotation is Context:
        return True
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and set(typing.get_args(annotation)) == {Context, type(None)}


# --- callables --------------------------------------------------------------------------------------------------------


def _signature(function: Function, task: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError as error:
        raise RegistrationError(
            f"task {task!r}: an annotation can't be resolved: {error}; "
            "import or define the type at module level, outside of `if TYPE_CHECKING`"
        ) from error
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"task {task!r}: {function!r} has no signature: {error}") from error


def _is_coroutine(function: Function, task: str) -> bool:
    if not callable(function):
        raise RegistrationError(f"task {task!r}: {function!r} can't be called")
    plain = function.func if isinstance(function, functools.partial) else function
    called = plain if inspect.isroutine(plain) or inspect.isclass(plain) else type(plain).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise RegistrationError(f"task {task!r}: a generator can't be a task; return its values as a list")
    return inspect.iscoroutinefunction(called)


def _executor_of(
    function: Function, is_coroutine: bool, executor: ExecutorKind | str | None, task: str
) -> ExecutorKind:
    if executor is None:
        return ExecutorKind.ASYNC if is_coroutine else ExecutorKind.THREAD
    kind = _one_of(ExecutorKind, executor, task, "executor")
    if kind is ExecutorKind.ASYNC and not is_coroutine:
        raise RegistrationError(f"task {task!r}: executor 'async' needs an `async def`; use 'thread' or 'process'")
    if kind is ExecutorKind.THREAD and is_coroutine:
        raise RegistrationError(f"task {task!r}: executor 'thread' needs a plain `def`; use 'async' or 'process'")
    if kind is ExecutorKind.PROCESS and "<locals>" in getattr(function, "__qualname__", ""):
        raise RegistrationError(
            f"task {task!r}: {_place(function)} is defined inside a function, so that another process can't import "
            "it; define it at module level, or use executor 'thread'"
        )
    return kind


def _batch(batch: Batch | None, executor: ExecutorKind, task: str) -> Batch | None:
    if batch is None:
        return None
    if not isinstance(batch, Batch):
        raise RegistrationError(f"task {task!r}: batch {batch!r} is not allowed; a Batch(size=…, wait=…)")
    if executor is ExecutorKind.PROCESS:
        raise RegistrationError(
            f"task {task!r}: batch is not allowed with executor 'process', which runs one task at a time; "
            "use 'thread' or 'async'"
        )
    return batch


_E = typing.TypeVar("_E", bound=StrEnum)


def _one_of(kinds: type[_E], value: str, task: str, field: str) -> _E:
    try:
        return kinds(value)
    except ValueError:
        allowed = ", ".join(repr(str(kind)) for kind in kinds)
        raise RegistrationError(f"task {task!r}: {field} {value!r} is not allowed; one of {allowed}") from None


def _duration(value: int, task: str, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= DURATION_MS_MAX:
        raise RegistrationError(
            f"task {task!r}: {field} {value!r} is not allowed; whole milliseconds from 1 to {DURATION_MS_MAX}"
        )
    return value


def _place(function: Function) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
