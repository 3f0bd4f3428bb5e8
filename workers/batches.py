"""What a batch is: how many tasks one call of a handler takes, and how their payloads become its list.

    @app.task(batch=Batch(size=100, wait=0.05))
    def insert(rows: list[Row]) -> list[int]: ...

The payload of each task is one item of the list. Items are converted to the annotated type one by one, so that one
that doesn't fit is refused alone.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from schemas.limits import PAYLOAD_MAX
from workers.context import Context
from workers.errors import ArgumentError, NotSerialisable, RegistrationError, milliseconds
from workers.settings import SLOTS_MAX
from workers.values import JSON, decoder_of, encode_json

WAIT_MS_MAX = 10_000  # a shard sends again, as a suspect, what nobody has started for 30 s


class Batch:
    """A handler takes up to `size` tasks in one call; the first of them waits at most `wait` for the others.

    `wait` is in seconds, or a timedelta. ValueError names the field that is not allowed.
    """

    __slots__ = ("size", "wait_ms")

    def __init__(self, size: int, *, wait: float | timedelta) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= SLOTS_MAX:
            raise ValueError(f"size: {size!r} is not allowed; a whole number from 1 to {SLOTS_MAX}")
        if isinstance(wait, bool) or not isinstance(wait, int | float | timedelta):
            raise ValueError(f"wait: {wait!r} is not allowed; seconds or a timedelta")
        wait_ms = milliseconds(wait, "wait")
        if wait_ms > WAIT_MS_MAX:
            raise ValueError(f"wait: {wait!r} is not allowed; at most {WAIT_MS_MAX // 1000} seconds")
        self.size = size
        self.wait_ms = wait_ms

    def __repr__(self) -> str:
        return f"Batch(size={self.size}, wait={self.wait_ms / 1000:g})"


class Items:
    """The list that a batch handler takes, compiled: from the payload of each task to an item of it, and back."""

    def __init__(self, signature: inspect.Signature, task: str) -> None:
        """RegistrationError: the parameters, or what it is annotated to return, are not those of a batch handler."""
        self._list, self._contexts = _parameters(signature, task)
        self._type = _element(signature.parameters[self._list].annotation)
        try:
            self._decode = decoder_of(self._type)
        except (TypeError, ValueError) as error:
            raise RegistrationError(
                f"task {task!r}: parameter {self._list!r} has items of a type that can't come from JSON: {error}"
            ) from error
        self.result_type = _result_type(signature.return_annotation, task)

    def item(self, payload: bytes, content_type: str) -> Any:
        """The item that a task brings. ArgumentError: the payload doesn't fit."""
        if content_type.partition(";")[0].strip().lower() not in (JSON, ""):
            if self._type is bytes:
                return payload
            raise ArgumentError(f"a payload of type {content_type!r} needs a batch handler that takes list[bytes]")
        try:
            return self._decode(payload)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"an item of parameter {self._list!r}: {error}") from error

    def arguments(self, items: Sequence[Any], contexts: Sequence[Context]) -> dict[str, Any]:
        """The arguments to call the function with."""
        arguments: dict[str, Any] = {self._list: list(items)}
        if self._contexts is not None:
            arguments[self._contexts] = list(contexts)
        return arguments

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The payload of one task: its item, or the fields of it by name. ArgumentError if it is no such item."""
        if len(args) + bool(kwargs) > 1:
            raise ArgumentError(f"a task brings one item for {self._list!r}, or the fields of it by name")
        try:
            payload = encode_json(args[0] if args else kwargs, PAYLOAD_MAX)
        except NotSerialisable as error:
            raise ArgumentError(f"the item can't be stored: {error}") from error
        self.item(payload, JSON)
        return payload


def _parameters(signature: inspect.Signature, task: str) -> tuple[str, str | None]:
    """The names of the list of items, and of the list of contexts if there is one."""
    lists: list[str] = []
    contexts: list[str] = []
    for parameter in signature.parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not is_named or not _is_list(parameter.annotation):
            raise RegistrationError(
                f"task {task!r}: parameter {str(parameter)!r} is not allowed in a batch handler; it takes one "
                "annotated list[…] of what one task brings, and at most one annotated list[Context]"
            )
        (contexts if _element(parameter.annotation) is Context else lists).append(parameter.name)
    if len(lists) != 1 or len(contexts) > 1:
        raise RegistrationError(
            f"task {task!r}: a batch handler takes one list of items, and at most one of contexts, not {signature}"
        )
    return lists[0], contexts[0] if contexts else None


def _is_list(annotation: Any) -> bool:
    plain = typing.get_origin(annotation) or annotation
    return plain in (inspect.Parameter.empty, Any, list, collections.abc.Sequence)


def _element(annotation: Any) -> Any:
    elements = typing.get_args(annotation)
    return elements[0] if elements else Any


def _result_type(annotation: Any, task: str) -> Any:
    """What a task's result is: an element of the list, unless that is an exception."""
    if not _is_list(annotation):
        raise RegistrationError(
            f"task {task!r}: a batch handler returns a list with a result for each item, "
            f"and can't be annotated to return {inspect.formatannotation(annotation)}"
        )
    element = _element(annotation)
    if typing.get_origin(element) not in (typing.Union, types.UnionType):
        return element
    kept = [one for one in typing.get_args(element) if not (isinstance(one, type) and issubclass(one, BaseException))]
    return typing.Union[tuple(kept)] if kept else Any  # noqa: UP007 - the members are only known now
