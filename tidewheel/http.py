"""The scheduler behind a REST API, as a backend: the same operations, answers and refusals as in process."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from random import getrandbits
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from scheduler.instants import INSTANT_RULE, format_instant, instant_of
from scheduler.limit_service import LimitList, LimitView
from scheduler.ports import ScheduleFilter, TaskFilter
from scheduler.queue_service import QueueList, QueueView, TenantList, TenantView
from scheduler.refusals import FieldError, Refusal, RefusalKind, Refused, invalid, not_found, schedule_not_found
from scheduler.schedule_view import (
    BackfilledRuns,
    CreatedSchedule,
    PreviewView,
    RunList,
    ScheduleList,
    ScheduleView,
    TriggeredRun,
)
from scheduler.service import CancelView, ChangedView, PurgeView, RedriveAllView, SubmittedView, TaskList
from scheduler.task_view import TaskView
from schemas.ids import NAME_RULE, is_name, uuid7
from schemas.limits import BULK_MAX
from schemas.messages import Status
from tidewheel.settings import ClientSettings

T = TypeVar("T")

CONNECT_RETRIES = 2  # httpx tries again only where nothing was sent yet
POLL_S_FIRST, POLL_S_MAX = 0.01, 0.5  # between looks at a task that is waited for


class HttpCall(Generic[T]):
    """One request: `run` it, or `await` it."""

    def __init__(
        self, backend: HttpBackend, method: str, path: str, read: Callable[[bytes], T], **options: Any
    ) -> None:
        self._backend, self._read = backend, read
        self._request = {"method": method, "url": path, **options}

    def run(self) -> T:
        """Do it in the calling thread and wait for the end."""
        with _unavailable_if_lost(self._backend.server):
            return self._answer(self._backend.client().request(**self._request))

    def __await__(self) -> Generator[Any, None, T]:
        return self._run_async().__await__()

    async def _run_async(self) -> T:
        with _unavailable_if_lost(self._backend.server):
            return self._answer(await self._backend.async_client().request(**self._request))

    def _answer(self, response: httpx.Response) -> T:
        if response.is_success:
            return self._read(response.content)
        raise Refused(_refusal_of(response))


class HttpWait:
    """A task that is waited for: asked for again and again, ever more seldom."""

    def __init__(self, backend: HttpBackend, task_id: str, timeout_s: float) -> None:
        self._backend, self._task_id = backend, task_id
        self._give_up_at = time.monotonic() + timeout_s
        self._pause_s = POLL_S_FIRST

    def run(self) -> TaskView:
        """Wait in the calling thread."""
        while True:
            view = self._backend.get(self._task_id).run()
            pause_s = self._next_pause(view)
            if pause_s is None:
                return view
            time.sleep(pause_s)

    def __await__(self) -> Generator[Any, None, TaskView]:
        return self._run_async().__await__()

    async def _run_async(self) -> TaskView:
        while True:
            view = await self._backend.get(self._task_id)
            pause_s = self._next_pause(view)
            if pause_s is None:
                return view
            await asyncio.sleep(pause_s)

    def _next_pause(self, view: TaskView) -> float | None:
        left_s = self._give_up_at - time.monotonic()
        if view.is_final or left_s <= 0:
            return None
        self._pause_s, pause_s = min(POLL_S_MAX, self._pause_s * 1.5), self._pause_s
        return min(pause_s, left_s)


class HttpBackend:
    """A server's REST API. Threads share one connection pool; each event loop has its own."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._client: httpx.Client | None = None
        self._async_clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}

    @property
    def schedules(self) -> HttpSchedules:
        """What can be asked of schedules."""
        return HttpSchedules(self)

    @property
    def queues(self) -> HttpQueues:
        """What can be asked of queues and tenants."""
        return HttpQueues(self)

    @property
    def limits(self) -> HttpLimits:
        """What can be asked of limits."""
        return HttpLimits(self)

    @property
    def server(self) -> str:
        """The URL of the server."""
        return self._settings.server

    def client(self) -> httpx.Client:
        """The client of blocking calls."""
        if self._client is None:
            self._client = httpx.Client(
                base_url=self._settings.server,
                timeout=self._settings.timeout_s,
                transport=httpx.HTTPTransport(retries=CONNECT_RETRIES),
            )
        return self._client

    def async_client(self) -> httpx.AsyncClient:
        """The client of the running loop."""
        loop = asyncio.get_running_loop()
        self._async_clients = {other: client for other, client in self._async_clients.items() if not other.is_closed()}
        if loop not in self._async_clients:
            self._async_clients[loop] = httpx.AsyncClient(
                base_url=self._settings.server,
                timeout=self._settings.timeout_s,
                transport=httpx.AsyncHTTPTransport(retries=CONNECT_RETRIES),
            )
        return self._async_clients[loop]

    def close(self) -> None:
        """Close the connections of blocking calls; idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def prepare(self, fields: Mapping[str, Any]) -> HttpPrepared:
        """Ready to submit with these fields again and again; the server checks them."""
        return HttpPrepared(self, fields)

    def submit(self, fields: Mapping[str, Any]) -> HttpCall[SubmittedView]:
        """Accept a task with these fields of a submission, durably."""
        return self.call("POST", "/api/v1/tasks", SubmittedView, content=_encoded(_identified(fields)))

    def submit_many(self, submissions: Sequence[Mapping[str, Any]]) -> HttpBulk:
        """Accept or refuse each, in their order; more than a bulk call takes go in several."""
        items = [_identified(fields) for fields in submissions]
        return HttpBulk([self._bulk(items[i : i + BULK_MAX]) for i in range(0, len(items), BULK_MAX)])

    def _bulk(self, items: Sequence[Mapping[str, Any]]) -> HttpCall[list[SubmittedView | Refusal]]:
        content = _encoded({"tasks": [_jsonable(item) for item in items]})
        return HttpCall(self, "POST", "/api/v1/tasks/bulk", _bulk_results, content=content, headers=_JSON)

    def get(self, task_id: str) -> HttpCall[TaskView]:
        """How a task stands."""
        return self.call("GET", _path(task_id), TaskView)

    def wait(self, task_id: str, timeout_s: float) -> HttpWait:
        """The same once it has ended, or after `timeout_s`."""
        return HttpWait(self, task_id, timeout_s)

    def list_tasks(self, wanted: TaskFilter, *, limit: int, cursor: str | None = None) -> HttpCall[TaskList]:
        """A page of tasks, newest first."""
        params: dict[str, Any] = {
            name: value for name, value in msgspec.structs.asdict(wanted).items() if value is not None
        }
        params.pop("is_dead_letter", None)
        for name in ("created_from", "created_to"):
            if name in params:
                params[name] = format_instant(params[name])
        return self.call("GET", "/api/v1/tasks", TaskList, params=_page(params, limit, cursor))

    def update(self, task_id: str, fields: Mapping[str, Any]) -> HttpCall[ChangedView]:
        """Change a waiting task."""
        return self.call("PATCH", _path(task_id), ChangedView, content=_encoded(fields))

    def cancel(self, task_id: str, *, reason: str | None = None) -> HttpCall[CancelView]:
        """Stop a task."""
        content = _encoded({} if reason is None else {"reason": reason})
        return self.call("POST", f"{_path(task_id)}/cancel", CancelView, content=content)

    def dead_letters(self, queue: str | None, *, limit: int, cursor: str | None = None) -> HttpCall[TaskList]:
        """A page of the dead-letter queue."""
        params = {} if queue is None else {"queue": queue}
        return self.call("GET", "/api/v1/dlq", TaskList, params=_page(params, limit, cursor))

    def redrive(self, task_id: str) -> HttpCall[ChangedView]:
        """Run a dead or failed task again."""
        return self.call("POST", f"{_path(task_id, 'dlq')}/retry", ChangedView)

    def purge(self, queue: str, *, confirmed: str, reason: str | None = None) -> HttpCall[PurgeView]:
        """Cancel all tasks of a queue that wait; the server takes up to 30 s for it."""
        content = _encoded({"confirm": confirmed, "reason": reason})
        return self.call("POST", f"{_queue_path(queue)}/purge", PurgeView, content=content, timeout=60.0)

    def redrive_all(self, queue: str) -> HttpCall[RedriveAllView]:
        """Run all dead ones of a queue again; the server takes up to 30 s for it."""
        params = {"queue": queue}
        return self.call("POST", "/api/v1/dlq/retry-all", RedriveAllView, params=params, timeout=60.0)

    def discard(self, task_id: str) -> HttpCall[None]:
        """Take a dead task out of the dead-letter queue."""
        return HttpCall(self, "DELETE", _path(task_id, "dlq"), lambda _: None)

    def call(self, method: str, path: str, answer: type[T], **options: Any) -> HttpCall[T]:
        """One request; with `content` its body is JSON."""
        if "content" in options:
            options["headers"] = _JSON
        return HttpCall(self, method, path, partial(msgspec.json.decode, type=answer), **options)


class HttpSchedules:
    """Schedules of a server."""

    def __init__(self, backend: HttpBackend) -> None:
        self._backend = backend

    def create(self, fields: Mapping[str, Any]) -> HttpCall[CreatedSchedule]:
        """Make a schedule; a repeat gives the first one."""
        return self._backend.call("POST", _SCHEDULES, CreatedSchedule, content=_encoded(fields))

    def get(self, schedule_id: str) -> HttpCall[ScheduleView]:
        """How a schedule stands."""
        return self._backend.call("GET", _schedule_path(schedule_id), ScheduleView)

    def list_schedules(
        self, wanted: ScheduleFilter, *, limit: int, cursor: str | None = None
    ) -> HttpCall[ScheduleList]:
        """A page of schedules."""
        given = {"tenant_id": wanted.tenant_id, "paused": wanted.is_paused, "declared_by": wanted.declared_by}
        params = {name: value for name, value in given.items() if value is not None}
        return self._backend.call("GET", _SCHEDULES, ScheduleList, params=_page(params, limit, cursor))

    def update(self, schedule_id: str, fields: Mapping[str, Any]) -> HttpCall[ScheduleView]:
        """Change a schedule."""
        return self._backend.call("PATCH", _schedule_path(schedule_id), ScheduleView, content=_encoded(fields))

    def pause(self, schedule_id: str, *, reason: str | None = None) -> HttpCall[ScheduleView]:
        """Let it fire no more until it is resumed."""
        content = _encoded({} if reason is None else {"reason": reason})
        return self._backend.call("POST", f"{_schedule_path(schedule_id)}/pause", ScheduleView, content=content)

    def resume(self, schedule_id: str) -> HttpCall[ScheduleView]:
        """Let it fire again."""
        return self._backend.call("POST", f"{_schedule_path(schedule_id)}/resume", ScheduleView)

    def delete(self, schedule_id: str) -> HttpCall[None]:
        """Make an end of it; its runs go on."""
        return HttpCall(self._backend, "DELETE", _schedule_path(schedule_id), lambda _: None)

    def trigger(self, schedule_id: str) -> HttpCall[TriggeredRun]:
        """Run it now."""
        return self._backend.call("POST", f"{_schedule_path(schedule_id)}/trigger", TriggeredRun)

    def backfill(self, schedule_id: str, fields: Mapping[str, Any]) -> HttpCall[BackfilledRuns]:
        """Run those nominal times of a range (`from`, `to`) that have no run."""
        path = f"{_schedule_path(schedule_id)}/backfill"
        return self._backend.call("POST", path, BackfilledRuns, content=_encoded(fields))

    def runs(self, schedule_id: str, *, limit: int) -> HttpCall[RunList]:
        """What became of the latest nominal times."""
        return self._backend.call("GET", f"{_schedule_path(schedule_id)}/runs", RunList, params={"limit": limit})

    def preview(self, fields: Mapping[str, Any]) -> HttpCall[PreviewView]:
        """The next nominal times of a rule."""
        return self._backend.call("POST", f"{_SCHEDULES}/preview", PreviewView, content=_encoded(fields))


class HttpQueues:
    """Queues and tenants of a server."""

    def __init__(self, backend: HttpBackend) -> None:
        self._backend = backend

    def queue(self, queue: str) -> HttpCall[QueueView]:
        """What was said of a queue."""
        return self._backend.call("GET", _queue_path(queue), QueueView)

    def queues(self) -> HttpCall[QueueList]:
        """All queues of which something was said."""
        return self._backend.call("GET", _QUEUES, QueueList)

    def pause(self, queue: str, *, reason: str | None = None) -> HttpCall[QueueView]:
        """Let its tasks wait; those that run go on."""
        content = _encoded({} if reason is None else {"reason": reason})
        return self._backend.call("POST", f"{_queue_path(queue)}/pause", QueueView, content=content)

    def resume(self, queue: str) -> HttpCall[QueueView]:
        """Let its tasks go out again."""
        return self._backend.call("POST", f"{_queue_path(queue)}/resume", QueueView)

    def tenant(self, tenant_id: str) -> HttpCall[TenantView]:
        """What was said of a tenant."""
        return self._backend.call("GET", _tenant_path(tenant_id), TenantView)

    def tenants(self) -> HttpCall[TenantList]:
        """All tenants of which something was said."""
        return self._backend.call("GET", _TENANTS, TenantList)

    def set_queue(self, queue: str, fields: Mapping[str, Any]) -> HttpCall[QueueView]:
        """Let other bounds hold for a queue; absent fields stay, None stands for the default."""
        return self._backend.call("PATCH", _queue_path(queue), QueueView, content=_encoded(fields))

    def set_tenant(self, tenant_id: str, fields: Mapping[str, Any]) -> HttpCall[TenantView]:
        """Let a tenant have another share or other bounds; absent fields stay, None stands for the default."""
        return self._backend.call("PATCH", _tenant_path(tenant_id), TenantView, content=_encoded(fields))


class HttpLimits:
    """Limits of a server."""

    def __init__(self, backend: HttpBackend) -> None:
        self._backend = backend

    def limit(self, name: str) -> HttpCall[LimitView]:
        """How a limit stands."""
        return self._backend.call("GET", _limit_path(name), LimitView)

    def limits(self) -> HttpCall[LimitList]:
        """All limits."""
        return self._backend.call("GET", _LIMITS, LimitList)

    def set_limit(self, name: str, fields: Mapping[str, Any]) -> HttpCall[LimitView]:
        """Let a limit hold from now on, with the fields of a declaration."""
        return self._backend.call("PUT", _limit_path(name), LimitView, content=_encoded(fields))

    def remove_limit(self, name: str) -> HttpCall[None]:
        """Let a limit hold no more."""
        return HttpCall(self._backend, "DELETE", _limit_path(name), lambda _: None)


class HttpPrepared:
    """Submissions with the same fields."""

    def __init__(self, backend: HttpBackend, fields: Mapping[str, Any]) -> None:
        self._backend, self._fields = backend, fields

    def submit(self, payload: bytes) -> HttpCall[SubmittedView]:
        """Accept a task with this payload, durably."""
        return self._backend.submit({**self._fields, "payload": payload})

    def submit_many(self, payloads: Sequence[bytes]) -> HttpBulk:
        """Accept or refuse one for each payload, in their order."""
        return self._backend.submit_many([{**self._fields, "payload": payload} for payload in payloads])


class HttpBulk:
    """Bulk calls one after the other."""

    def __init__(self, calls: Sequence[HttpCall[list[SubmittedView | Refusal]]]) -> None:
        self._calls = calls

    def run(self) -> list[SubmittedView | Refusal]:
        """Do them in the calling thread."""
        return [result for call in self._calls for result in call.run()]

    def __await__(self) -> Generator[Any, None, list[SubmittedView | Refusal]]:
        return self._run_async().__await__()

    async def _run_async(self) -> list[SubmittedView | Refusal]:
        results: list[SubmittedView | Refusal] = []
        for call in self._calls:
            results.extend(await call)
        return results


_JSON = {"content-type": "application/json"}


def _identified(fields: Mapping[str, Any]) -> dict[str, Any]:
    # With an id chosen here a repeated POST is the same task, so that a lost answer can be asked for again.
    if fields.keys() & {"task_id", "idempotency_key", "unique", "debounce"}:
        return dict(fields)
    return {**fields, "task_id": uuid7(time.time_ns() // 1_000_000, getrandbits)}


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(_jsonable(fields))


def _jsonable(fields: Mapping[str, Any]) -> dict[str, Any]:
    jsonable: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "payload" and isinstance(value, bytes):
            jsonable[name] = msgspec.Raw(value)
        elif isinstance(value, datetime):
            jsonable[name] = _instant(name, value)
        elif name == "calendar" and isinstance(value, list):
            jsonable[name] = [_instant(name, one) if isinstance(one, datetime) else one for one in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise invalid(name, "must be a finite number")  # JSON has none; null would mean that it is not given
        else:
            jsonable[name] = value
    return jsonable


def _instant(field: str, when: datetime) -> str:
    try:
        return format_instant(instant_of(when))
    except ValueError as error:
        raise invalid(field, str(error), INSTANT_RULE) from error


def _path(task_id: str, collection: str = "tasks") -> str:
    if not is_name(task_id):
        raise not_found(task_id)  # no task can be called so, and what is asked for could be another path
    return f"/api/v1/{collection}/{task_id}"


_SCHEDULES = "/api/v1/cron-tasks"
_QUEUES = "/api/v1/queues"
_TENANTS = "/api/v1/tenants"
_LIMITS = "/api/v1/limits"


def _queue_path(queue: str) -> str:
    if not is_name(queue):
        raise invalid("queue", "is not accepted", NAME_RULE)
    return f"{_QUEUES}/{queue}"


def _limit_path(name: str) -> str:
    if not is_name(name):
        raise invalid("name", "is not accepted", NAME_RULE)
    return f"{_LIMITS}/{name}"


def _tenant_path(tenant_id: str) -> str:
    if not is_name(tenant_id):
        raise invalid("tenant_id", "is not accepted", NAME_RULE)
    return f"{_TENANTS}/{tenant_id}"


def _schedule_path(schedule_id: str) -> str:
    if not is_name(schedule_id):
        raise schedule_not_found(schedule_id)
    return f"{_SCHEDULES}/{schedule_id}"


def _page(params: dict[str, Any], limit: int, cursor: str | None) -> dict[str, Any]:
    params["limit"] = limit
    if cursor is not None:
        params["cursor"] = cursor
    return params


class _Problem(msgspec.Struct):
    type: str = ""
    title: str = ""
    detail: str = ""
    errors: tuple[FieldError, ...] = ()
    task_status: Status | None = None


class _BulkItem(msgspec.Struct):
    task: SubmittedView | None = None
    error: _Problem | None = None


class _BulkAnswer(msgspec.Struct):
    results: list[_BulkItem]


def _bulk_results(content: bytes) -> list[SubmittedView | Refusal]:
    answer = msgspec.json.decode(content, type=_BulkAnswer)
    return [item.task or _refusal(item.error or _Problem(), 0) for item in answer.results]


def _refusal_of(response: httpx.Response) -> Refusal:
    try:
        problem = msgspec.json.decode(response.content, type=_Problem)
    except msgspec.DecodeError:
        problem = _Problem(detail=f"the server answered {response.status_code} {response.reason_phrase}")
    return _refusal(problem, response.status_code)


def _refusal(problem: _Problem, status: int) -> Refusal:
    name = problem.type.rpartition("/")[2].rpartition(":")[2]
    fallback = RefusalKind.UNAVAILABLE if status >= 500 else RefusalKind.INVALID
    kind = RefusalKind(name) if name in RefusalKind.__members__.values() else fallback
    return Refusal(kind, problem.detail or problem.title, problem.errors, problem.task_status)


@contextmanager
def _unavailable_if_lost(server: str) -> Iterator[None]:
    """A transport error becomes a refusal that says what to do."""
    try:
        yield
    except httpx.HTTPError as error:
        kind = RefusalKind.UNAVAILABLE if isinstance(error, httpx.ConnectError) else RefusalKind.UNDECIDED
        reason = str(error) or type(error).__name__
        detail = f"no answer from {server}: {reason}; is the scheduler running, and TIDEWHEEL_SERVER right?"
        raise Refused(Refusal(kind, detail)) from error
