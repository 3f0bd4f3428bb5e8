"""Where schema ids come from, and the answers by which the built-in ones can be read like those of a registry.

A standard Avro deserializer needs no more than the read endpoints of a Confluent-compatible registry: `answer` has them
for the schemas built in.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias
from urllib.parse import unquote

from schemas.catalog import NAMESPACE, Release, releases

Body: TypeAlias = Any  # JSON values


class SchemaIds(Protocol):
    """A registry of schemas; `infra.registry` speaks to real ones."""

    def register(self, name: str, text: str) -> int:
        """The id of a schema of ours, which is registered if it is new. Retriable: no answer. Fatal: refused."""

    def schema(self, schema_id: int) -> str:
        """The JSON text of any schema. UnknownSchema: there is none. Retriable: no answer."""


def subject_of(name: str) -> str:
    """The subject of a schema of ours: the record's full name (RecordNameStrategy)."""
    return f"{NAMESPACE}.{name}"


def answer(path: str) -> tuple[int, Body]:
    """Status and JSON body of `GET <path>` on the read endpoints; the query string is not part of `path`."""
    match [unquote(part) for part in path.strip("/").split("/")]:
        case ["schemas", "types"]:
            return 200, ["AVRO"]
        case ["schemas", "ids", schema_id]:
            return _found(schema_by_id(schema_id), _NO_SCHEMA)
        case ["schemas", "ids", schema_id, "schema"]:
            found = schema_by_id(schema_id)
            return _found(found and found["schema"], _NO_SCHEMA)
        case ["schemas", "ids", schema_id, "versions"]:
            return _found(versions_of_id(schema_id), _NO_SCHEMA)
        case ["subjects"]:
            return 200, subjects()
        case ["subjects", subject, "versions"]:
            return _found(versions_of(subject), _NO_SUBJECT)
        case ["subjects", subject, "versions", version]:
            if version not in ("latest", "-1") and _number(version) is None:
                return 422, _INVALID_VERSION
            return _found(schema_of(subject, version), _NO_VERSION if versions_of(subject) else _NO_SUBJECT)
    return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}


_NO_SUBJECT = {"error_code": 40401, "message": "Subject not found."}
_NO_VERSION = {"error_code": 40402, "message": "Version not found."}
_NO_SCHEMA = {"error_code": 40403, "message": "Schema not found."}
_INVALID_VERSION = {
    "error_code": 42202,
    "message": "The specified version is not a valid version id; allowed are 1 to 2147483647 and 'latest'.",
}


def schema_by_id(schema_id: str) -> Body | None:
    """Answer of /schemas/ids/{id}."""
    number = _number(schema_id)
    return next(({"schema": one.text} for one in releases() if one.schema_id == number), None)


def versions_of_id(schema_id: str) -> Body | None:
    """Answer of /schemas/ids/{id}/versions: which subjects have the schema."""
    number = _number(schema_id)
    found = [one for one in releases() if one.schema_id == number]
    return [{"subject": subject_of(one.name), "version": one.version} for one in found] or None


def subjects() -> Body:
    """Answer of /subjects."""
    return sorted({subject_of(one.name) for one in releases()})


def versions_of(subject: str) -> Body | None:
    """Answer of /subjects/{subject}/versions."""
    return [one.version for one in _releases_of(subject)] or None


def schema_of(subject: str, version: str) -> Body | None:
    """Answer of /subjects/{subject}/versions/{version}, with `latest` or -1 for the newest."""
    found = _releases_of(subject)
    wanted = found[-1:] if version in ("latest", "-1") else [one for one in found if one.version == _number(version)]
    for one in wanted:
        return {"subject": subject, "version": one.version, "id": one.schema_id, "schema": one.text}
    return None


def _releases_of(subject: str) -> list[Release]:
    return sorted((one for one in releases() if subject_of(one.name) == subject), key=lambda one: one.version)


def _number(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) <= 10
    return int(text) if is_number and 0 < int(text) < 2**31 else None


def _found(body: Body | None, error: Body) -> tuple[int, Body]:
    return (404, error) if body is None else (200, body)
