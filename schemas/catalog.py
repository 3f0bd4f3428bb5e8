"""Every version of every schema that was ever released, by the number that stands in a record.

`avro/<Name>.avsc` is what people edit: one named type a file, which refers to others by name. `avro/released/` holds
what was made of it at a release (`python -m schemas.release`): self-contained, one file a version, never edited
afterwards. `avro/ids.json` gives each its number. The newest version of a name is what this code writes.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

NAMESPACE = "tidewheel"

# A schema as JSON values: a dict, a name, or the list of a union's branches.
Schema: TypeAlias = Any


class Release(NamedTuple):
    """A released version of a schema; `text` is its self-contained JSON."""

    schema_id: int
    name: str
    version: int
    text: str


@cache
def releases() -> tuple[Release, ...]:
    """All that were ever released, by id."""
    folder = files("schemas") / "avro"
    ids: dict[str, dict[str, int]] = json.loads((folder / "ids.json").read_text("utf-8"))
    found = [
        Release(schema_id, name, int(version), (folder / "released" / f"{name}.{version}.avsc").read_text("utf-8"))
        for name, versions in ids.items()
        for version, schema_id in versions.items()
    ]
    return tuple(sorted(found))


@cache
def newest() -> dict[str, Release]:
    """By name, the version that this code writes."""
    found: dict[str, Release] = {}
    for release in sorted(releases(), key=lambda one: one.version):
        found[release.name] = release
    return found


def full_name(schema: Schema) -> str:
    """The name of a named type with its namespace."""
    name = str(schema["name"])
    namespace = schema.get("namespace")
    return f"{namespace}.{name}" if namespace and "." not in name else name


def short_name(name: str) -> str:
    """A name of ours without the namespace; others as they are."""
    return name.removeprefix(f"{NAMESPACE}.")
