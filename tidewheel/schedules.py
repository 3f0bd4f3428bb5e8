"""The schedules that an application declares in its code, and what it can do with schedules by their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from scheduler.ports import ScheduleFilter
from scheduler.refusals import RefusalKind, Refused
from scheduler.schedule_submission import ScheduleSubmission, named_schedule_id
from scheduler.schedule_view import CreatedSchedule, ScheduleView
from scheduler.submission import validated
from schemas.limits import PAGE_MAX
from tidewheel.backend import Doable, ScheduleBackend
from tidewheel.errors import NotSubmitted, ScheduleNotFound, TidewheelError
from workers.errors import RegistrationError

if TYPE_CHECKING:
    from tidewheel.app import App
    from tidewheel.handles import TaskHandle

T = TypeVar("T")


# What is not declared is as if it was never given; whether it is paused is for operators to say.
_DEFAULTS = dict.fromkeys(ScheduleSubmission.model_fields.keys() - {"name", "cron_id", "enabled"})


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a synchronisation did, by name. `gone` are declared by the app no more; they still fire: delete them."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class AppSchedules:
    """The schedules that an app declares, and what can be done with schedules by their ids.

    Calls block; they raise NotSubmitted, or ScheduleNotFound.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._declared: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._declared)

    def __iter__(self) -> Iterator[str]:
        """The names of those that are declared."""
        return iter(self._declared)

    def declare(self, fields: Mapping[str, Any]) -> None:
        """Keep a schedule for the next `sync`. RegistrationError: it is wrong, or its name is taken."""
        fields = {**fields, "declared_by": self._app.name}
        try:
            submission = validated(ScheduleSubmission, fields)
        except Refused as refused:
            raise RegistrationError(f"schedule {fields.get('name')!r}: {refused}") from refused
        if submission.name in self._declared:
            raise RegistrationError(f"schedule {submission.name!r} is declared twice: give one another name=")
        self._declared[submission.name] = fields

    def sync(self) -> SyncReport:
        """Make and change schedules so that they are as declared. None is deleted, and whether one is paused stays."""
        done: dict[str, list[str]] = {"created": [], "changed": [], "unchanged": []}
        for name, fields in self._declared.items():
            done[self._synced(fields)].append(name)
        gone = [one.name for one in self._of_this_app() if one.name not in self._declared]
        return SyncReport(**{what: tuple(names) for what, names in done.items()}, gone=tuple(sorted(gone)))

    def _synced(self, fields: Mapping[str, Any]) -> str:
        schedule_id = validated(ScheduleSubmission, fields).schedule_id
        try:
            known = self._backend.get(schedule_id).run()
        except Refused as refused:
            if refused.refusal.kind is not RefusalKind.NOT_FOUND:
                raise translated_of_schedule(refused) from refused
            self.create(fields)
            return "created"
        changed = self.update(schedule_id, {**_DEFAULTS, **fields})
        return "unchanged" if changed.updated_at == known.updated_at else "changed"

    def _of_this_app(self) -> Iterator[ScheduleView]:
        cursor: str | None = None
        wanted = ScheduleFilter(declared_by=self._app.name)
        while True:
            page = self._run(partial(self._backend.list_schedules, wanted, limit=PAGE_MAX, cursor=cursor))
            yield from page.schedules
            cursor = page.cursor
            if cursor is None:
                return

    # --- by id --------------------------------------------------------------------------------------------------------

    def id_of(self, name: str, tenant_id: str = "default") -> str:
        """The id of the schedule that has this name in a tenant, unless it was made with an id of its own."""
        return named_schedule_id(tenant_id, name)

    def create(self, fields: Mapping[str, Any]) -> CreatedSchedule:
        """Make a schedule from the fields of POST /api/v1/cron-tasks; `payload` is JSON as bytes."""
        return self._run(lambda: self._backend.create(fields))

    def get(self, schedule_id: str) -> ScheduleView:
        """How a schedule stands."""
        return self._run(lambda: self._backend.get(schedule_id))

    def update(self, schedule_id: str, fields: Mapping[str, Any]) -> ScheduleView:
        """Change a schedule; absent fields stay, None stands for the default."""
        return self._run(lambda: self._backend.update(schedule_id, fields))

    def pause(self, schedule_id: str, reason: str | None = None) -> ScheduleView:
        """Let it fire no more until it is resumed."""
        return self._run(lambda: self._backend.pause(schedule_id, reason=reason))

    def resume(self, schedule_id: str) -> ScheduleView:
        """Let it fire again; what was missed is decided by its misfire policy."""
        return self._run(lambda: self._backend.resume(schedule_id))

    def delete(self, schedule_id: str) -> None:
        """Make an end of it; its runs go on."""
        self._run(lambda: self._backend.delete(schedule_id))

    def trigger(self, schedule_id: str) -> TaskHandle[Any]:
        """Run it now; the task of the run."""
        return self._app.handle(self._run(lambda: self._backend.trigger(schedule_id)).task_id)

    def backfill(self, schedule_id: str, first: datetime, last: datetime, runs_max: int = 100) -> tuple[str, ...]:
        """Run those nominal times of a range that have no run; the ids of their tasks."""
        fields = {"from": first, "to": last, "max": runs_max}
        return self._run(lambda: self._backend.backfill(schedule_id, fields)).runs

    @property
    def _backend(self) -> ScheduleBackend:
        return self._app.backend.schedules

    def _run(self, operation: Callable[[], Doable[T]]) -> T:
        try:
            return operation().run()
        except Refused as refused:
            raise translated_of_schedule(refused) from refused


def translated_of_schedule(refused: Refused) -> TidewheelError:
    """The SDK's exception for a refusal."""
    if refused.refusal.kind is RefusalKind.NOT_FOUND:
        return ScheduleNotFound(refused.refusal.detail)
    return NotSubmitted(refused.refusal)
