"""The schema files say what the messages are, are explained, and only ever grow."""

from __future__ import annotations

import enum
import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas import messages, release
from schemas.catalog import Schema, newest, releases
from schemas.messages import EventBody, Message

FOLDER = Path(release.__file__).parent / "avro"
FILES = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.avsc"))}
RECORDS = {name: schema for name, schema in FILES.items() if schema["type"] == "record"}
ENUMS = {name: schema for name, schema in FILES.items() if schema["type"] == "enum"}
PRIMITIVES: dict[type, str] = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}


def test_each_message_and_enumeration_has_its_file_and_no_other_is_there() -> None:
    found = {
        name
        for name, of in vars(messages).items()
        if isinstance(of, type) and of.__module__ == messages.__name__ and of is not Message
    }
    assert found == set(FILES)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_fields_of_its_message(name: str) -> None:
    of = getattr(messages, name)
    expected = [(field.name, _avro(field.type), _default(field)) for field in msgspec.structs.fields(of)]
    found = [(field["name"], field["type"], field.get("default", ...)) for field in RECORDS[name]["fields"]]
    assert found == expected


@pytest.mark.parametrize("name", ENUMS)
def test_an_enumeration_has_the_symbols_of_its_members_and_a_default(name: str) -> None:
    members = [member.value for member in getattr(messages, name)]
    assert ENUMS[name]["symbols"] == members
    unknown = [member for member in members if member.lower() == "unknown"]
    assert ENUMS[name]["default"] in (unknown or members)


@pytest.mark.parametrize("name", FILES)
def test_all_is_explained(name: str) -> None:
    schema = FILES[name]
    for doc in (schema["doc"], *(field["doc"] for field in schema.get("fields", []))):
        assert len(doc) > 5 and doc[0].isupper() and doc.endswith((".", "?")), doc
    for field in schema.get("fields", []):
        if field["name"].endswith("_at") or field["name"] == "at":
            assert "microseconds" in field["doc"], f"{name}.{field['name']}"
        if field["name"].endswith("_ms"):
            assert "milliseconds" in field["doc"], f"{name}.{field['name']}"


def test_what_is_edited_is_released() -> None:
    for name, latest in newest().items():
        edited = release.self_contained(FOLDER, name)
        assert json.loads(latest.text) == edited, f"{name} was edited: run python -m schemas.release"
    assert set(newest()) == set(release.TOP_LEVEL)


def test_versions_count_from_one_and_every_id_is_given_once() -> None:
    ids = [one.schema_id for one in releases()]
    assert len(set(ids)) == len(ids) and min(ids) == release.FIRST_ID
    for name, latest in newest().items():
        assert [one.version for one in releases() if one.name == name] == list(range(1, latest.version + 1))
    files = {path.name for path in (FOLDER / "released").iterdir()}
    assert files == {f"{one.name}.{one.version}.avsc" for one in releases()}


def test_a_release_adds_what_changed_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "released").mkdir()
    for name, schema in FILES.items():
        (tmp_path / f"{name}.avsc").write_text(json.dumps(schema), "utf-8")
    first = release.release(tmp_path)
    assert first == [f"{name} 1" for name in release.TOP_LEVEL]
    before = {path: path.read_text("utf-8") for path in (tmp_path / "released").iterdir()}
    assert release.release(tmp_path) == []

    changed = FILES["RetryPolicy"]
    more = {**changed, "fields": [*changed["fields"], {"name": "more", "type": "long", "default": 0, "doc": "More."}]}
    (tmp_path / "RetryPolicy.avsc").write_text(json.dumps(more), "utf-8")
    added = release.release(tmp_path)
    assert "SubmitTask 2" in added and "Event 2" in added and "ReadyTask 2" not in added
    assert {path: path.read_text("utf-8") for path in before} == before
    ids = json.loads((tmp_path / "ids.json").read_text("utf-8"))
    numbers = [number for versions in ids.values() for number in versions.values()]
    assert len(set(numbers)) == len(numbers) == len(first) + len(added)


def _avro(kind: Any) -> Schema:
    if kind == EventBody:
        return [of.__name__ for of in typing.get_args(kind)]
    arguments = typing.get_args(kind)
    if type(None) in arguments:
        (inner,) = (one for one in arguments if one is not type(None))
        return ["null", _avro(inner)]
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": _avro(arguments[0])}
    if typing.get_origin(kind) is dict:
        return {"type": "map", "values": _avro(arguments[1])}
    return PRIMITIVES.get(kind) or kind.__name__


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return ...
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return list(value) if isinstance(value, tuple) else value
