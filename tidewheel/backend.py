"""What the SDK and the command line need of a scheduler, wherever it runs; and the one in this process."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from scheduler.limit_service import LimitList, LimitService, LimitView, declaration_of
from scheduler.ports import ScheduleFilter, TaskFilter
from scheduler.queue_service import (
    QueueChange,
    QueueList,
    QueueService,
    QueueView,
    TenantChange,
    TenantList,
    TenantView,
)
from scheduler.refusals import Refusal
from scheduler.schedule_service import Created, ScheduleService
from scheduler.schedule_submission import Backfill, Preview, ScheduleChange, ScheduleSubmission
from scheduler.schedule_view import (
    BackfilledRuns,
    CreatedSchedule,
    PreviewView,
    RunList,
    ScheduleList,
    ScheduleView,
    TriggeredRun,
)
from scheduler.service import (
    CancelView,
    ChangedView,
    PurgeView,
    RedriveAllView,
    Submitted,
    SubmittedView,
    TaskList,
    TaskService,
)
from scheduler.submission import Submission, Template, Update, validated
from scheduler.task_view import TaskView

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Doable(Protocol[T_co]):
    """Something to be done once: `run` it, or `await` it. Raises `scheduler.refusals.Refused`."""

    def run(self) -> T_co:
        """Do it in the calling thread and wait for the end."""

    def __await__(self) -> Generator[Any, None, T_co]: ...


class Backend(Protocol):
    """A scheduler as its clients see it. Fields are those of a submission in REST; the payload is JSON bytes."""

    @property
    def schedules(self) -> ScheduleBackend:
        """What can be asked of schedules."""

    @property
    def queues(self) -> QueueBackend:
        """What can be asked of queues and tenants."""

    @property
    def limits(self) -> LimitBackend:
        """What can be asked of limits."""

    def prepare(self, fields: Mapping[str, Any]) -> Prepared:
        """Ready to submit with these fields again and again."""

    def get(self, task_id: str) -> Doable[TaskView]:
        """How a task stands."""

    def wait(self, task_id: str, timeout_s: float) -> Doable[TaskView]:
        """The same once it has ended, or after `timeout_s`."""

    def list_tasks(self, wanted: TaskFilter, *, limit: int, cursor: str | None = None) -> Doable[TaskList]:
        """A page of tasks, newest first."""

    def update(self, task_id: str, fields: Mapping[str, Any]) -> Doable[ChangedView]:
        """Change a waiting task."""

    def cancel(self, task_id: str, *, reason: str | None = None) -> Doable[CancelView]:
        """Stop a task."""

    def dead_letters(self, queue: str | None, *, limit: int, cursor: str | None = None) -> Doable[TaskList]:
        """A page of the dead-letter queue."""

    def redrive(self, task_id: str) -> Doable[ChangedView]:
        """Run a dead or failed task again."""

    def purge(self, queue: str, *, confirmed: str, reason: str | None = None) -> Doable[PurgeView]:
        """Cancel all tasks of a queue that wait."""

    def redrive_all(self, queue: str) -> Doable[RedriveAllView]:
        """Run all dead ones of a queue again."""

    def discard(self, task_id: str) -> Doable[None]:
        """Take a dead task out of the dead-letter queue."""


class ScheduleBackend(Protocol):
    """Schedules of a scheduler as its clients see them. Fields are those of REST; the payload is JSON bytes."""

    def create(self, fields: Mapping[str, Any]) -> Doable[CreatedSchedule]:
        """Make a schedule; a repeat gives the first one."""

    def get(self, schedule_id: str) -> Doable[ScheduleView]:
        """How a schedule stands."""

    def list_schedules(self, wanted: ScheduleFilter, *, limit: int, cursor: str | None = None) -> Doable[ScheduleList]:
        """A page of schedules."""

    def update(self, schedule_id: str, fields: Mapping[str, Any]) -> Doable[ScheduleView]:
        """Change a schedule."""

    def pause(self, schedule_id: str, *, reason: str | None = None) -> Doable[ScheduleView]:
        """Let it fire no more until it is resumed."""

    def resume(self, schedule_id: str) -> Doable[ScheduleView]:
        """Let it fire again."""

    def delete(self, schedule_id: str) -> Doable[None]:
        """Make an end of it; its runs go on."""

    def trigger(self, schedule_id: str) -> Doable[TriggeredRun]:
        """Run it now."""

    def backfill(self, schedule_id: str, fields: Mapping[str, Any]) -> Doable[BackfilledRuns]:
        """Run those nominal times of a range (`from`, `to`) that have no run."""

    def runs(self, schedule_id: str, *, limit: int) -> Doable[RunList]:
        """What became of the latest nominal times."""

    def preview(self, fields: Mapping[str, Any]) -> Doable[PreviewView]:
        """The next nominal times of a rule."""


class QueueBackend(Protocol):
    """Queues and tenants of a scheduler as its operators see them."""

    def queue(self, queue: str) -> Doable[QueueView]:
        """What was said of a queue."""

    def queues(self) -> Doable[QueueList]:
        """All queues of which something was said."""

    def pause(self, queue: str, *, reason: str | None = None) -> Doable[QueueView]:
        """Let its tasks wait; those that run go on."""

    def resume(self, queue: str) -> Doable[QueueView]:
        """Let its tasks go out again."""

    def tenant(self, tenant_id: str) -> Doable[TenantView]:
        """What was said of a tenant."""

    def tenants(self) -> Doable[TenantList]:
        """All tenants of which something was said."""

    def set_queue(self, queue: str, fields: Mapping[str, Any]) -> Doable[QueueView]:
        """Let other bounds hold for a queue; absent fields stay, None stands for the default."""

    def set_tenant(self, tenant_id: str, fields: Mapping[str, Any]) -> Doable[TenantView]:
        """Let a tenant have another share or other bounds; absent fields stay, None stands for the default."""


class LimitBackend(Protocol):
    """Limits of a scheduler."""

    def limit(self, name: str) -> Doable[LimitView]:
        """How a limit stands."""

    def limits(self) -> Doable[LimitList]:
        """All limits."""

    def set_limit(self, name: str, fields: Mapping[str, Any]) -> Doable[LimitView]:
        """Let a limit hold from now on, with the fields of a declaration."""

    def remove_limit(self, name: str) -> Doable[None]:
        """Let a limit hold no more."""


class Prepared(Protocol):
    """The fields of a submission but for the payload, checked once."""

    def submit(self, payload: bytes) -> Doable[SubmittedView]:
        """Accept a task with this payload, durably."""

    def submit_many(self, payloads: Sequence[bytes]) -> Doable[list[SubmittedView | Refusal]]:
        """Accept or refuse one for each payload, in their order."""


class _Mapped(Doable[T]):
    """A doable whose result is put another way."""

    def __init__(self, doable: Doable[Any], change: Any) -> None:
        self._doable, self._change = doable, change

    def run(self) -> T:
        result: T = self._change(self._doable.run())
        return result

    def __await__(self) -> Generator[Any, None, T]:
        result: T = self._change((yield from self._doable.__await__()))
        return result


class _LocalPrepared:
    """Submissions to the service of this process."""

    def __init__(self, service: TaskService, template: Template) -> None:
        self._service, self._template = service, template

    def submit(self, payload: bytes) -> Doable[SubmittedView]:
        """Accept a task with this payload, durably."""
        return _Mapped(self._service.submit(self._template.with_payload(payload)), _view)

    def submit_many(self, payloads: Sequence[bytes]) -> Doable[list[SubmittedView | Refusal]]:
        """Accept or refuse one for each payload, in their order."""
        return _Mapped(self._service.submit_many([self._template.with_payload(p) for p in payloads]), _views)


def _view(submitted: Submitted) -> SubmittedView:
    return submitted.view


def _views(results: Sequence[Submitted | Refusal]) -> list[SubmittedView | Refusal]:
    return [one.view if isinstance(one, Submitted) else one for one in results]


class LocalSchedules:
    """The service of this process."""

    def __init__(self, service: ScheduleService) -> None:
        self._service = service
        self.get = service.get
        self.list_schedules = service.list_schedules
        self.pause = service.pause
        self.resume = service.resume
        self.delete = service.delete
        self.trigger = service.trigger
        self.runs = service.runs

    def create(self, fields: Mapping[str, Any]) -> Doable[CreatedSchedule]:
        """Make a schedule; a repeat gives the first one."""
        return _Mapped(self._service.create(validated(ScheduleSubmission, fields)), _created)

    def update(self, schedule_id: str, fields: Mapping[str, Any]) -> Doable[ScheduleView]:
        """Change a schedule."""
        return self._service.update(schedule_id, ScheduleChange(fields))

    def backfill(self, schedule_id: str, fields: Mapping[str, Any]) -> Doable[BackfilledRuns]:
        """Run those nominal times of a range that have no run."""
        return self._service.backfill(schedule_id, validated(Backfill, fields))

    def preview(self, fields: Mapping[str, Any]) -> Doable[PreviewView]:
        """The next nominal times of a rule."""
        return self._service.preview(validated(Preview, fields))


class LocalQueues:
    """Queues and tenants of this process."""

    def __init__(self, service: QueueService) -> None:
        self._service = service
        self.queue, self.queues = service.queue, service.queues
        self.pause, self.resume = service.pause, service.resume
        self.tenant, self.tenants = service.tenant, service.tenants

    def set_queue(self, queue: str, fields: Mapping[str, Any]) -> Doable[QueueView]:
        """Let other bounds hold for a queue."""
        return self._service.set_queue(queue, validated(QueueChange, fields))

    def set_tenant(self, tenant_id: str, fields: Mapping[str, Any]) -> Doable[TenantView]:
        """Let a tenant have another share or other bounds."""
        return self._service.set_tenant(tenant_id, validated(TenantChange, fields))


class LocalLimits:
    """Limits of this process."""

    def __init__(self, service: LimitService) -> None:
        self._service = service
        self.limit = service.limit
        self.limits = service.limits
        self.remove_limit = service.remove_limit

    def set_limit(self, name: str, fields: Mapping[str, Any]) -> Doable[LimitView]:
        """Let a limit hold from now on."""
        return self._service.set_limit(name, declaration_of(fields))


def _created(created: Created) -> CreatedSchedule:
    return created.view


class LocalBackend:
    """The service of this process."""

    def __init__(self, service: TaskService) -> None:
        self._service = service
        self.schedules = LocalSchedules(service.schedules)
        self.queues: QueueBackend = LocalQueues(service.queues)
        self.limits: LimitBackend = LocalLimits(service.limits)
        self.get = service.get
        self.wait = service.wait
        self.list_tasks = service.list_tasks
        self.cancel = service.cancel
        self.dead_letters = service.dead_letters
        self.redrive = service.redrive
        self.purge = service.purge
        self.redrive_all = service.redrive_all
        self.discard = service.discard

    def prepare(self, fields: Mapping[str, Any]) -> Prepared:
        """Ready to submit with these fields again and again. Raises Refused if they are wrong."""
        return _LocalPrepared(self._service, Template(validated(Submission, fields)))

    def update(self, task_id: str, fields: Mapping[str, Any]) -> Doable[ChangedView]:
        """Change a waiting task."""
        return self._service.update(task_id, validated(Update, fields))
