"""Tasks and attempts between our values and Cassandra's columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from scheduler.ports import AttemptOutcome, AttemptRow, TaskRow
from schemas.messages import Status, TaskError, TaskSpec

ENDED = frozenset({Status.SUCCEEDED, Status.FAILED, Status.DEAD, Status.CANCELLED})

_pack = msgspec.msgpack.Encoder().encode
_spec_of = msgspec.msgpack.Decoder(TaskSpec).decode
_error_of = msgspec.msgpack.Decoder(TaskError).decode


class _Form(NamedTuple):
    """How a value is written into a cell and read from one."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_FORMS = {
    "spec": _Form(_pack, _spec_of),
    "status": _Form(str, Status),
    "last_error": _Form(_pack, _error_of),
    "error": _Form(_pack, _error_of),
    "outcome": _Form(str, AttemptOutcome),
}

_KEYS = ("task_id", "created_at")
# The columns beside the keys, with what an absent cell means.
TASK_DEFAULTS: dict[str, Any] = {
    field.name: None if field.required else field.default
    for field in msgspec.structs.fields(TaskRow)
    if field.name not in (*_KEYS, "attempts")
}
ATTEMPT_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(AttemptRow) if field.name != "attempt"
}
TASK_COLUMNS = (*_KEYS, *TASK_DEFAULTS)
ATTEMPT_COLUMNS = (*_KEYS, "attempt", *ATTEMPT_DEFAULTS)
_REQUIRED = frozenset(field.name for field in msgspec.structs.fields(TaskRow) if field.required) - {*_KEYS}

Columns = dict[str, Any]


class Life(NamedTuple):
    """What a task's rows hold: `columns` and `attempts` without what is the default."""

    created_at: int
    columns: Columns
    attempts: dict[int, Columns]

    @property
    def is_ended(self) -> bool:
        """Whether its rows expire."""
        return self.columns["status"] in ENDED

    @property
    def spec(self) -> TaskSpec:
        """What was asked for."""
        spec: TaskSpec = self.columns["spec"]
        return spec

    @property
    def dead_in(self) -> str | None:
        """The queue whose dead letter it is."""
        return self.spec.queue if self.columns.get("is_dead_letter") else None

    def size(self) -> int:
        """About how many bytes of memory it takes."""
        parts = (self.spec.payload, self.columns.get("result") or b"")
        return 3_000 + sum(map(len, parts)) + 500 * len(self.attempts)


def begun(columns: Mapping[str, Any]) -> Life:
    """A life that begins with these columns. TypeError: a column is unknown or missing."""
    missing = {*_REQUIRED, "created_at"} - columns.keys()
    if missing:
        raise TypeError(f"a task begins without {', '.join(sorted(missing))}")
    values = {name: value for name, value in columns.items() if name not in _KEYS}
    return Life(columns["created_at"], merged({}, values, TASK_DEFAULTS), {})


def merged(old: Columns, new: Mapping[str, Any], defaults: Mapping[str, Any]) -> Columns:
    """The old columns under the new ones, without defaults. TypeError: there is no such column."""
    unknown = new.keys() - defaults.keys()
    if unknown:
        raise TypeError(f"the view has no column {', '.join(sorted(unknown))}")
    both = old | dict(new)
    return {name: value for name, value in both.items() if value != defaults[name]}


def cell(name: str, value: Any) -> Any:
    """What is written into a cell."""
    form = _FORMS.get(name)
    return value if form is None or value is None else form.write(value)


def life_of(task: Sequence[Any], attempts: Sequence[Sequence[Any]]) -> Life | None:
    """What was read, TASK_COLUMNS and ATTEMPT_COLUMNS; None if it expired, or never began."""
    columns = _read(TASK_COLUMNS[2:], task[2:])
    if not columns.keys() >= _REQUIRED:
        return None
    own = {row[2]: _read(ATTEMPT_COLUMNS[3:], row[3:]) for row in attempts if row[1] == task[1]}
    return Life(task[1], columns, own)


def row_of(task_id: str, life: Life) -> TaskRow:
    """The task as readers see it, its attempts in order."""
    attempts = tuple(AttemptRow(attempt=number, **life.attempts[number]) for number in sorted(life.attempts))
    return TaskRow(task_id=task_id, created_at=life.created_at, **life.columns, attempts=attempts)


def _read(names: Sequence[str], cells: Sequence[Any]) -> Columns:
    columns = {}
    for name, value in zip(names, cells, strict=True):
        if value is not None:
            form = _FORMS.get(name)
            columns[name] = value if form is None else form.read(value)
    return columns
