"""Old and new schemas together: what the rules allow, and what a reader makes of a newer writer's records."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from io import BytesIO
from itertools import combinations
from typing import Any

import fastavro
import pytest

from schemas.catalog import Release, Schema, full_name, newest, releases, short_name
from schemas.codec import Codec
from schemas.errors import Retriable, Undecodable, UnknownSchema
from schemas.messages import (
    AttemptStarted,
    Event,
    Message,
    Priority,
    ReadyTask,
    Status,
    Task,
    TaskStarted,
    WorkerSignal,
)
from tests.samples import full, minimal, named_samples, plain

# --- the rules --------------------------------------------------------------------------------------------------------


def breaches(old: Schema, new: Schema) -> list[str]:
    """Why `new` may not follow `old`; each must be able to read what the other wrote."""
    before, after = _types(old), _types(new)
    found = [f"{name} was removed" for name in before if name not in after]
    for name, schema in before.items():
        if name in after:
            found += _type_breaches(name, schema, after[name])
    return found


def _type_breaches(name: str, old: Schema, new: Schema) -> list[str]:
    if old["type"] == "enum":
        found = [] if new["symbols"][: len(old["symbols"])] == old["symbols"] else [f"{name}: symbols only grow"]
        has_default = old.get("default") is not None and old["default"] == new.get("default")
        return found if has_default else [*found, f"{name}: an enumeration keeps its default"]
    fields = {field["name"]: field for field in new["fields"]}
    aliases = {alias: field["name"] for field in new["fields"] for alias in field.get("aliases", [])}
    found, kept = [], set()
    for field in old["fields"]:
        now = fields.get(aliases.get(field["name"], field["name"]))
        if now is None or (now["name"] != field["name"] and "default" not in field):
            found.append(f"{name}.{field['name']} was removed or renamed without an alias and a default")
            continue
        kept.add(now["name"])
        if not _may_follow(_mention(field["type"]), _mention(now["type"])):
            found.append(f"{name}.{field['name']} changed its type")
        if "default" in field and "default" not in now:
            found.append(f"{name}.{field['name']} lost its default")
    return found + [f"{name}.{one} was added without a default" for one in fields if _is_bare(fields[one], kept)]


def _may_follow(old: Schema, new: Schema) -> bool:
    """The same type, or the bodies of an event with more of them."""
    is_grown = isinstance(old, list) and isinstance(new, list) and "null" not in old
    return bool(new[: len(old)] == old if is_grown else new == old)


def _is_bare(field: Schema, kept: set[str]) -> bool:
    return field["name"] not in kept and "default" not in field


def _mention(schema: Schema) -> Schema:
    if isinstance(schema, list):
        return [_mention(one) for one in schema]
    if isinstance(schema, str):
        return short_name(schema)
    if "name" in schema:
        return short_name(full_name(schema))
    return {key: _mention(value) if key in ("items", "values") else value for key, value in schema.items()}


def _types(schema: Schema) -> dict[str, Schema]:
    """All named types that a schema defines."""
    if isinstance(schema, list):
        return {name: of for one in schema for name, of in _types(one).items()}
    if not isinstance(schema, dict):
        return {}
    found = {short_name(full_name(schema)): schema} if "name" in schema else {}
    for inner in (*(f["type"] for f in schema.get("fields", [])), schema.get("items"), schema.get("values")):
        found |= _types(inner)
    return found


def test_every_release_keeps_to_the_rules() -> None:
    for old, new in combinations(releases(), 2):
        if old.name == new.name:
            assert breaches(json.loads(old.text), json.loads(new.text)) == [], f"{old.name} {old.version}→{new.version}"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: s["fields"].pop(0), "request_id was removed"),
        (lambda s: s["fields"].append({"name": "more", "type": "long"}), "more was added without a default"),
        (lambda s: s["fields"][0].update(name="other"), "request_id was removed or renamed"),
        (lambda s: s["fields"][0].update(type="bytes"), "request_id changed its type"),
        (lambda s: s["fields"][3].pop("default"), "task_id lost its default"),
        (lambda s: _types(s)["Priority"]["symbols"].insert(0, "now"), "Priority: symbols only grow"),
        (lambda s: _types(s)["Priority"].pop("default"), "Priority: an enumeration keeps its default"),
        (lambda s: s["fields"].append({"name": "more", "type": "long", "default": 0}), None),
        (lambda s: _types(s)["Priority"]["symbols"].append("idle"), None),
    ],
)
def test_the_rules_have_teeth(change: Callable[[Schema], Any], complaint: str | None) -> None:
    old = json.loads(newest()["SubmitTask"].text)
    new = copy.deepcopy(old)
    change(new)
    found = breaches(old, new)
    assert complaint in found[0] if complaint else not found


def _bodies(release: Release) -> list[Schema]:
    """The kinds of events that a release knows. Whoever reads with it by force does not get past another kind."""
    fields = {field["name"]: field["type"] for field in json.loads(release.text).get("fields", ())}
    return fields["body"] if release.name == "Event" else []


@pytest.mark.parametrize("release", releases(), ids=lambda one: f"{one.name}.{one.version}")
def test_a_general_reader_of_any_release_reads_what_is_written_today(release: Release) -> None:
    writer = fastavro.parse_schema(json.loads(newest()[release.name].text))
    reader = fastavro.parse_schema(json.loads(release.text))
    kinds = {short_name(body["name"]) for body in _bodies(release)}
    for message in named_samples().values():
        is_known = not isinstance(message, Event) or type(message.body).__name__ in kinds
        if type(message).__name__ == release.name and is_known:
            value = Codec.builtin().encode(message)
            assert fastavro.schemaless_reader(BytesIO(value[5:]), writer, reader)


# --- a newer writer ---------------------------------------------------------------------------------------------------


class Numbers:
    """A registry in memory: what is registered, and foreign schemas by their id."""

    def __init__(self, foreign: dict[int, str] | None = None) -> None:
        self.texts = dict(foreign or {})
        self.is_down = False
        self.lookups = 0

    def register(self, name: str, text: str) -> int:
        for schema_id, known in self.texts.items():
            if known == text:
                return schema_id
        schema_id = max(self.texts, default=100) + 1
        self.texts[schema_id] = text
        return schema_id

    def schema(self, schema_id: int) -> str:
        self.lookups += 1
        if self.is_down:
            raise Retriable("no answer")
        try:
            return self.texts[schema_id]
        except KeyError:
            raise UnknownSchema(f"{schema_id} is not registered") from None


def written(schema: Schema, datum: Any, schema_id: int = 7) -> bytes:
    out = BytesIO()
    out.write(b"\0" + schema_id.to_bytes(4, "big"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), datum)
    return out.getvalue()


def newer(name: str) -> Any:
    return json.loads(newest()[name].text)


def test_a_newer_writers_field_is_passed_over_and_an_unknown_symbol_becomes_the_default() -> None:
    schema = newer("Task")
    schema["fields"].insert(2, {"name": "color", "type": ["null", "string"], "default": None})
    types = _types(schema)
    types["Status"]["symbols"].append("PAUSED")
    types["Priority"]["symbols"].append("idle")
    types["ErrorKind"]["symbols"].append("evicted")
    task = full(Task)
    datum = plain(task) | {"color": "red", "status": "PAUSED"}
    datum["spec"] |= {"priority": "idle"}
    datum["last_error"] |= {"kind": "evicted"}
    codec = Codec(Numbers({7: json.dumps(schema)}))

    seen = codec.decode(written(schema, datum))

    assert isinstance(seen, Task)
    assert seen.status is Status.UNKNOWN  # and so it is written back: not as something that it never was
    assert seen.spec.priority is Priority.MEDIUM
    assert seen.last_error is not None and seen.last_error.kind == "unknown"
    assert codec.decode(codec.encode(seen)) == seen
    assert (seen.checkpoint, seen.version, seen.spec.retry) == (task.checkpoint, task.version, task.spec.retry)


def test_an_older_writers_missing_fields_have_their_defaults() -> None:
    schema = newer("WorkerSignal")
    schema["fields"] = [field for field in schema["fields"] if field["name"] != "grace_ms"]
    signal = minimal(WorkerSignal)
    datum = {name: value for name, value in plain(signal).items() if name != "grace_ms"}
    assert Codec(Numbers({7: json.dumps(schema)})).decode(written(schema, datum)) == signal


@pytest.mark.parametrize("of", [WorkerSignal, ReadyTask])
def test_a_release_without_epochs_tells_none(of: type[Message]) -> None:
    first = next(one for one in releases() if (one.name, one.version) == (of.__name__, 1))
    message = full(of, epoch=0)
    datum = {name: value for name, value in plain(message).items() if name != "epoch"}
    assert Codec.builtin().decode(written(json.loads(first.text), datum, first.schema_id)) == message


def test_a_log_that_mixes_versions_is_read_as_one() -> None:
    schema = newer("Event")
    _types(schema)["TaskStarted"]["fields"].append({"name": "node", "type": "string", "default": ""})
    event = minimal(Event, body=full(TaskStarted))
    datum = plain(event)
    datum["body"][1]["node"] = "n1"
    codec = Codec(Numbers({7: json.dumps(schema)}))
    log = [codec.encode(event), written(schema, datum), Codec.builtin().encode(event), written(schema, datum)]
    assert [codec.decode(value) for value in log] == [event] * 4


def test_a_kind_of_event_that_only_a_newer_version_knows_is_an_unknown_schema() -> None:
    schema = newer("Event")
    body = next(field for field in schema["fields"] if field["name"] == "body")
    body["type"].append({"type": "record", "name": "TaskPaused", "namespace": "tidewheel", "fields": []})
    datum = plain(minimal(Event, body=minimal(TaskStarted))) | {"body": ("tidewheel.TaskPaused", {})}
    codec = Codec(Numbers({7: json.dumps(schema)}))
    with pytest.raises(UnknownSchema):
        codec.decode(written(schema, datum))


def test_broken_bytes_of_another_version_are_named_as_broken() -> None:
    schema = newer("AttemptStarted")
    schema["fields"].append({"name": "more", "type": {"type": "array", "items": "string"}, "default": []})
    codec = Codec(Numbers({7: json.dumps(schema)}))
    whole = written(schema, plain(full(AttemptStarted)) | {"more": ["a", "b"]})
    assert codec.decode(whole) == full(AttemptStarted)
    for broken in (*(whole[:n] for n in range(5, len(whole))), whole + b"\0", whole[:5] + b"\xff" * 9 + b"\x01"):
        with pytest.raises(Undecodable):
            codec.decode(broken)


def test_an_alias_renames_a_field() -> None:
    schema = newer("AttemptStarted")
    schema["fields"][0].update(name="task", aliases=["task_id"])
    # The newer reader finds the old name by the alias; an older reader does not know it, which is why a rename
    # needs a default in the older version too (see `breaches`).
    old = fastavro.parse_schema(newer("AttemptStarted"))
    value = Codec.builtin().encode(full(AttemptStarted))
    seen: Any = fastavro.schemaless_reader(BytesIO(value[5:]), old, fastavro.parse_schema(schema))
    assert seen["task"] == full(AttemptStarted).task_id


# --- the registry's part ----------------------------------------------------------------------------------------------


def test_with_a_registry_its_ids_are_written_and_the_built_in_ones_still_read() -> None:
    registry = Numbers()
    codec = Codec(registry)
    for message in named_samples().values():
        value = codec.encode(message)
        assert registry.texts[int.from_bytes(value[1:5], "big")] == newest()[type(message).__name__].text
        assert codec.decode(value) == message
        assert codec.decode(Codec.builtin().encode(message)) == message
    assert registry.lookups == 0


def test_an_outage_is_no_fault_of_the_record() -> None:
    registry = Numbers({7: json.dumps(newer("AttemptStarted"))})
    codec = Codec(registry)
    value = written(newer("AttemptStarted"), plain(full(AttemptStarted)))
    registry.is_down = True
    with pytest.raises(Retriable):
        codec.decode(value)
    registry.is_down = False
    assert codec.decode(value) == codec.decode(value) == full(AttemptStarted)
    assert registry.lookups == 2


@pytest.mark.parametrize("text", ['"string"', "{", '{"type":"record","name":"Order","fields":[]}', '{"type":"array"}'])
def test_another_systems_record_is_an_unknown_schema(text: str) -> None:
    with pytest.raises(UnknownSchema):
        Codec(Numbers({7: text})).decode(b"\0\0\0\0\7abc")
