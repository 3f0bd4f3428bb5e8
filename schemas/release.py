"""Release the schemas: freeze each one that changed as its next version, under the next number.

Run `python -m schemas.release` after an edit of `avro/*.avsc`. What it writes is never edited; it only ever adds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from schemas.catalog import Schema

# Far above what a registry hands out, so that a record says which of the two numbered it.
FIRST_ID = 1_900_000_001
TOP_LEVEL = (
    "SubmitTask",
    "CancelTask",
    "UpdateTask",
    "RedriveTask",
    "DiscardTask",
    "AttemptStarted",
    "AttemptSucceeded",
    "AttemptFailed",
    "AttemptSnoozed",
    "AttemptCancelled",
    "AttemptReturned",
    "AttemptCrashed",
    "AttemptCheckpointed",
    "WorkerHeartbeat",
    "ReadyTask",
    "WorkerSignal",
    "Replies",
    "ParkedTask",
    "ParkMarker",
    "Event",
    "Task",
    "EndedTask",
    "ShardCheckpoint",
    "InvalidRecord",
    "SubmitWorkflow",
    "CancelWorkflow",
    "Workflow",
    "ForwardedRequest",
    "CreateSchedule",
    "UpdateSchedule",
    "ControlSchedule",
    "RunSchedule",
    "Schedule",
    "QueuePolicy",
    "TenantPolicy",
    "ShardStats",
    "LimitPolicy",
    "LimitHeld",
    "ShardMessage",
)


def self_contained(folder: Path, name: str) -> Schema:
    """The schema of `folder/<name>.avsc` with all that it refers to, each type where it is first named."""
    return _inline(folder, name, set())


def _inline(folder: Path, schema: Schema, seen: set[str]) -> Schema:
    if isinstance(schema, list):
        return [_inline(folder, branch, seen) for branch in schema]
    if isinstance(schema, dict):
        return {key: _inline_part(folder, key, value, seen) for key, value in schema.items()}
    path = folder / f"{schema}.avsc"
    if schema in seen or not path.exists():
        return schema
    seen.add(schema)
    return _inline(folder, json.loads(path.read_text("utf-8")), seen)


def _inline_part(folder: Path, key: str, value: Schema, seen: set[str]) -> Schema:
    if key == "fields":
        return [{**field, "type": _inline(folder, field["type"], seen)} for field in value]
    return _inline(folder, value, seen) if key in ("items", "values") else value


def release(folder: Path) -> list[str]:
    """Add a version of each schema that differs from its newest one; tells which, as `<Name> <version>`."""
    ids_path = folder / "ids.json"
    ids: dict[str, dict[str, int]] = json.loads(ids_path.read_text("utf-8")) if ids_path.exists() else {}
    next_id = max((number for versions in ids.values() for number in versions.values()), default=FIRST_ID - 1) + 1
    added = []
    for name in TOP_LEVEL:
        versions = ids.setdefault(name, {})
        newest = max(map(int, versions), default=0)
        text = json.dumps(self_contained(folder, name), ensure_ascii=False, separators=(",", ":"))
        if newest and (folder / "released" / f"{name}.{newest}.avsc").read_text("utf-8") == text:
            continue
        versions[str(newest + 1)] = next_id
        next_id += 1
        (folder / "released" / f"{name}.{newest + 1}.avsc").write_text(text, "utf-8")
        added.append(f"{name} {newest + 1}")
    ids_path.write_text(json.dumps(ids, indent=2) + "\n", "utf-8")
    return added


if __name__ == "__main__":
    sys.stdout.write("\n".join(release(Path(__file__).parent / "avro") or ["nothing changed"]) + "\n")
