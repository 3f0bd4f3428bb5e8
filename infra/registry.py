"""A Confluent-compatible schema registry, through confluent-kafka's client. The only place that knows that client."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from schemas.errors import Fatal, Retriable, TidewheelIOError, UnknownSchema
from schemas.registry import subject_of

_RETRIES_MAX = 2  # within one call; whoever called decides about more
_MISSING_MAX = 1_000  # ids remembered as not found
_NOT_FOUND = 404
_TOO_MANY = 429


class RegistryIds:
    """Schema ids of the registry at `url`. Answers are cached for ever: an id never changes its meaning.

    A new id may reach a replica of the registry after the records that bear it. So one that is not found is asked for
    again during `patience_s`, each time with Retriable; only then it counts as unknown.
    """

    def __init__(
        self,
        url: str,
        settings: Mapping[str, str | float] | None = None,
        *,
        timeout_s: float = 5.0,
        patience_s: float = 3.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings` are more of the client's, such as `basic.auth.user.info`. ValueError: it does not like one."""
        self._patience_s = patience_s
        self._now_s = now_s
        self._missing_since: dict[int, float] = {}
        with warnings.catch_warnings(record=True):  # of what the client imports, nothing that we could act upon
            from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
        self._schema = Schema
        self._error: type[Exception] = SchemaRegistryError
        given = {"timeout": timeout_s, "max.retries": _RETRIES_MAX} | dict(settings or {})
        self._client: Any = SchemaRegistryClient(given | {"url": url})

    def register(self, name: str, text: str) -> int:
        """The id of a schema of ours, registered under its full name. Raises Retriable or Fatal."""
        subject = subject_of(name)
        try:
            return int(self._client.register_schema(subject, self._schema(text, "AVRO")))
        except Exception as error:
            raise self._failure(f"register {subject}", error) from error

    def schema(self, schema_id: int) -> str:
        """The text of any schema. Raises UnknownSchema, Retriable or Fatal."""
        if not 0 < schema_id < 2**31:
            raise UnknownSchema(f"schema {schema_id}: no registry gives such an id")
        try:
            found = self._client.get_schema(schema_id)
        except Exception as error:
            if getattr(error, "http_status_code", None) == _NOT_FOUND:
                raise self._missing(schema_id) from error
            raise self._failure(f"look up schema {schema_id}", error) from error
        if (found.schema_type or "AVRO") != "AVRO":
            raise UnknownSchema(f"schema {schema_id} is of type {found.schema_type}; only AVRO is understood")
        return str(found.schema_str)

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._client.close()

    def _missing(self, schema_id: int) -> Retriable | UnknownSchema:
        if len(self._missing_since) >= _MISSING_MAX:
            self._missing_since.clear()
        now_s = self._now_s()
        if now_s < self._missing_since.setdefault(schema_id, now_s) + self._patience_s:
            return Retriable(f"schema {schema_id} is not in the registry yet")
        return UnknownSchema(f"schema {schema_id} is not in the registry")

    def _failure(self, what: str, error: Exception) -> TidewheelIOError:
        status = getattr(error, "http_status_code", None) if isinstance(error, self._error) else None
        if status is None or status >= 500 or status == _TOO_MANY:
            return Retriable(f"schema registry: cannot {what} now: {error}")
        return Fatal(f"schema registry refuses to {what}: {error}; check its compatibility setting and the credentials")
