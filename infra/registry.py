"""A Confluent-compatible schema registry, through confluent-kafka's client. The only place that knows that client."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from schemas.errors import Fatal, Retriable, TidewheelIOError, UnknownSchema
from schemas.registry import subject_of

_RETRIES_MAX = 2  # within one call; whoever called decides about more
_LOOKUPS_MAX = 100  # at the same time
_REMEMBERED_MAX = 1_000  # ids remembered as not found
UNKNOWN_S = 60.0  # after which an id that the registry did not have is asked for again
_NOT_FOUND = 404
_TOO_MANY = 429


class RegistryIds:
    """Schema ids of the registry at `url`. Answers are cached for ever: an id never changes its meaning.

    Whoever reads records is never kept waiting: `schema` raises Retriable while a thread of this class asks. A new id
    may reach a replica of the registry after the records that bear it, so one that is not found is asked for again
    during `patience_s`; only then it counts as unknown, for `UNKNOWN_S`.
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
        self._unknown_until: dict[int, float] = {}
        self._lookups: dict[int, Future[str]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "schema-registry")
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
        """The text of any schema. Raises UnknownSchema, or Retriable while it is not known yet."""
        if not 0 < schema_id < 2**31:
            raise UnknownSchema(f"schema {schema_id}: no registry gives such an id")
        if self._now_s() < self._unknown_until.get(schema_id, 0):
            raise UnknownSchema(f"schema {schema_id} is not in the registry")
        try:
            return self._lookup(schema_id).result()
        except UnknownSchema:
            self._remember(self._unknown_until, schema_id, self._now_s() + UNKNOWN_S)
            raise

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._thread.shutdown(cancel_futures=True)
        self._client.close()

    def _lookup(self, schema_id: int) -> Future[str]:
        """The lookup that has ended; begun if it was not, and forgotten with its answer, which the codec keeps."""
        with self._lock:
            lookup = self._lookups.get(schema_id)
            if lookup is None:
                if len(self._lookups) >= _LOOKUPS_MAX:
                    raise Retriable(f"schema {schema_id} must wait: {_LOOKUPS_MAX} others are being looked up")
                lookup = self._lookups[schema_id] = self._thread.submit(self._look_up, schema_id)
            if not lookup.done():
                raise Retriable(f"schema {schema_id} is being looked up in the registry")
            del self._lookups[schema_id]
            return lookup

    def _look_up(self, schema_id: int) -> str:
        try:
            found = self._client.get_schema(schema_id)
        except Exception as error:
            if getattr(error, "http_status_code", None) == _NOT_FOUND:
                raise self._missing(schema_id) from error
            # Even a refusal may be mended without a restart: the registry's rights, not the record, are to blame.
            raise Retriable(f"schema registry: cannot look up schema {schema_id} now: {error}") from error
        if (found.schema_type or "AVRO") != "AVRO":
            raise UnknownSchema(f"schema {schema_id} is of type {found.schema_type}; only AVRO is understood")
        return str(found.schema_str)

    def _missing(self, schema_id: int) -> Retriable | UnknownSchema:
        now_s = self._now_s()
        since = self._missing_since.get(schema_id)
        if since is None:
            since = self._remember(self._missing_since, schema_id, now_s)
        if now_s < since + self._patience_s:
            return Retriable(f"schema {schema_id} is not in the registry yet")
        return UnknownSchema(f"schema {schema_id} is not in the registry")

    def _remember(self, instants: dict[int, float], schema_id: int, instant: float) -> float:
        if len(instants) >= _REMEMBERED_MAX:
            instants.clear()
        instants[schema_id] = instant
        return instant

    def _failure(self, what: str, error: Exception) -> TidewheelIOError:
        status = getattr(error, "http_status_code", None) if isinstance(error, self._error) else None
        if status is None or status >= 500 or status == _TOO_MANY:
            return Retriable(f"schema registry: cannot {what} now: {error}")
        return Fatal(f"schema registry refuses to {what}: {error}; check its compatibility setting and the credentials")
