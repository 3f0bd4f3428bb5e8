"""The application: its task types, and the way to submit them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, overload

from typing_extensions import Unpack

from scheduler.refusals import Refusal, Refused
from scheduler.submission import without_none
from schemas.messages import LimitStrategy, Priority, RetryPolicy
from tidewheel.backend import Backend, Prepared
from tidewheel.handles import TaskHandle, translated
from tidewheel.limits import AppLimits
from tidewheel.options import (
    CallOptions,
    Retry,
    ScheduleOptions,
    Seconds,
    fields_of,
    retry_fields,
    schedule_fields,
    seconds_of,
)
from tidewheel.queues import AppQueues, AppTenants
from tidewheel.schedules import AppSchedules
from tidewheel.settings import ClientSettings
from workers.batches import Batch
from workers.context import Context
from workers.errors import milliseconds
from workers.registry import ExecutorKind, Handler, Registry

if TYPE_CHECKING:
    from tidewheel.embedded import Engine

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class App:
    """Task types by name. Submissions go to the engine that runs in this process, else to the server of `settings`."""

    def __init__(self, settings: ClientSettings | None = None, *, name: str = "app") -> None:
        """`name` tells its schedules from those that other apps declare for the same scheduler."""
        self.name = name
        self.registry = Registry()
        self.schedules = AppSchedules(self)
        self.limits = AppLimits(self)
        self.queues = AppQueues(self)
        self.tenants = AppTenants(self)
        self._settings = settings
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        """Where submissions go."""
        if self._backend is None:
            from tidewheel.http import HttpBackend

            self._backend = HttpBackend(self._settings or ClientSettings())
        return self._backend

    def use(self, backend: Backend | None) -> None:
        """Send submissions there from now on; None: to the server of the settings."""
        self._backend = backend

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> TaskType[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> TaskType[P, R]: ...
    @overload
    def task(
        self,
        *,
        batch: Batch,
        name: str | None = None,
        queue: str = "default",
        priority: Priority | str = Priority.MEDIUM,
        retry: Retry | None = None,
        timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        lease: Seconds = 300.0,
        executor: ExecutorKind | str | None = None,
    ) -> _BatchDecorator: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: Priority | str = Priority.MEDIUM,
        retry: Retry | None = None,
        timeout: Seconds | None = None,
        total_timeout: Seconds | None = None,
        lease: Seconds = 300.0,
        executor: ExecutorKind | str | None = None,
    ) -> _Decorator: ...
    def task(self, *functions: Any, **options: Any) -> Any:
        """Make a function a task type. Its name is `module.function` unless one is given; names are stable strings.

        `async def` runs on the worker's event loop, `def` in a thread; `executor="process"` runs it in a process of
        its own that is killed at its timeout. `batch=Batch(size=100, wait=0.05)`: it takes a list, with an item of each
        of several tasks, and returns a list with a result for each. Durations are seconds or timedeltas. Raises
        RegistrationError.
        """
        decorator = _Decorator(self, options)
        return decorator(*functions) if functions else decorator

    def cron(self, expression: str, *, tz: str = "UTC", **options: Unpack[ScheduleOptions]) -> ScheduleDecorator:
        """Run a task type when clocks in `tz` show what the expression says: `@app.cron("0 9 * * MON-FRI", tz=…)`.

        Stands above `@app.task(…)`, or alone, with the options of a plain `@app.task`. The schedule is made when an
        embedded engine of the app starts, or by `tidewheel cron sync`. RegistrationError names what is wrong.
        """
        return ScheduleDecorator(self, {"cron_expression": expression, "timezone": tz}, options)

    def every(
        self, seconds: Seconds, *, anchor: datetime | None = None, **options: Unpack[ScheduleOptions]
    ) -> ScheduleDecorator:
        """Run a task type every so many seconds (or timedelta), on a grid that has a line at `anchor`. As `cron`."""
        return ScheduleDecorator(self, {"every_seconds": seconds_of(seconds), "anchor": anchor}, options)

    def calendar(self, *instants: datetime, **options: Unpack[ScheduleOptions]) -> ScheduleDecorator:
        """Run a task type at these instants. As `cron`."""
        return ScheduleDecorator(self, {"calendar": list(instants)}, options)

    def limit(
        self,
        name: str,
        count: int,
        *,
        per: Seconds | None = None,
        burst: int | None = None,
        key: str | None = None,
        where: Mapping[str, str] | None = None,
        strategy: LimitStrategy | str | None = None,
    ) -> None:
        """Let at most `count` attempts start in each `per` seconds (or timedelta), or, without it, run at a time.

        It counts by `key`, a template such as "{tenant_id}", and concerns the tasks with the fields of `where`, such as
        `{"queue": "mail"}`; docs/GUIDE.md tells all of it. It holds once an embedded engine of the app starts, or from
        `tidewheel limits sync` on. RegistrationError names what is wrong.
        """
        period = None if per is None else seconds_of(per)
        fields = {"count": count, "period_seconds": period, "burst": burst, "key": key, "strategy": strategy}
        self.limits.declare(name, {**fields, "where": None if where is None else dict(where)})

    def handle(self, task_id: str) -> TaskHandle[Any]:
        """A task that was submitted before, or by somebody else."""
        return TaskHandle(task_id, self.backend)

    def embedded(self, data: str | Path | None = None, **settings: Any) -> Engine:
        """A durable engine with a worker of this app in this process: `with app.embedded("data"): …`.

        Without `data` all is in memory, for tests. The settings are those of `EngineSettings`.
        """
        from tidewheel.embedded import Engine, EngineSettings

        return Engine(self, EngineSettings(data=None if data is None else Path(data), **settings))


class _Decorator:
    """`app.task(…)`, before it is given its function."""

    def __init__(self, app: App, options: dict[str, Any]) -> None:
        self._app, self._options = app, options

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> TaskType[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R]) -> TaskType[P, R]: ...
    def __call__(self, function: Callable[..., Any]) -> Any:
        options = dict(self._options)
        retry: Retry | None = options.pop("retry", None)
        timeout: Seconds | None = options.pop("timeout", None)
        total_timeout: Seconds | None = options.pop("total_timeout", None)
        handler = Handler(
            function,
            name=options.pop("name", None) or f"{function.__module__}.{function.__qualname__}",
            retry=retry.policy if retry else RetryPolicy(),
            timeout_ms=None if timeout is None else milliseconds(timeout, "timeout"),
            lease_ms=milliseconds(options.pop("lease", 300.0), "lease"),
            **options,
        )
        kind = TaskType if handler.batch is None else BatchTaskType
        return kind(self._app, self._app.registry.add(handler), function, total_timeout)


class _BatchDecorator(Protocol):
    """`app.task(batch=…)`, before it is given its function: the types alone; it is a `_Decorator`."""

    @overload
    def __call__(
        self, function: Callable[[list[T]], Coroutine[Any, Any, Sequence[R | BaseException]]], /
    ) -> BatchTaskType[T, R]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Sequence[R | BaseException]], /) -> BatchTaskType[T, R]: ...
    @overload
    def __call__(
        self, function: Callable[[list[T], list[Context]], Coroutine[Any, Any, Sequence[R | BaseException]]], /
    ) -> BatchTaskType[T, R]: ...
    @overload
    def __call__(
        self, function: Callable[[list[T], list[Context]], Sequence[R | BaseException]], /
    ) -> BatchTaskType[T, R]: ...


class ScheduleDecorator:
    """`app.cron(…)` and its like, before it is given its task type."""

    def __init__(self, app: App, rule: Mapping[str, Any], options: ScheduleOptions) -> None:
        self._app, self._rule, self._options = app, rule, options

    @overload
    def __call__(self, function: TaskType[P, R], /) -> TaskType[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> TaskType[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskType[P, R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Declare the schedule; gives the task type."""
        task_type = function if isinstance(function, TaskType) else self._app.task(function)
        self._app.schedules.declare(task_type.schedule_fields(self._rule, self._options))
        return task_type


class TaskType(Generic[P, R]):
    """A function that can be submitted; called as it is, it is the plain function."""

    def __init__(
        self, app: App, handler: Handler, function: Callable[..., Any], total_timeout: Seconds | None = None
    ) -> None:
        self.handler = handler
        self._app = app
        self._function = function
        self._fields = _defaults(handler, total_timeout)
        self._plain: Submitter[P, R] = Submitter(app, handler, self._fields)
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function here and now, without the scheduler."""
        return self._function(*args, **kwargs)

    @property
    def name(self) -> str:
        """The task type's name."""
        return self.handler.name

    def schedule_fields(self, rule: Mapping[str, Any], options: ScheduleOptions) -> dict[str, Any]:
        """The fields of a schedule that submits this task type by a rule. Raises ArgumentError, RegistrationError."""
        fields = schedule_fields({"name": self.name, **options})
        payload = self.handler.payload((), options.get("arguments", {}))
        return {**self._fields, **fields, **without_none(rule), "payload": payload}

    def options(self, **options: Unpack[CallOptions]) -> Submitter[P, R]:
        """The same task type with options for one submission: `send.options(priority="high", delay=60).submit(…)`."""
        return Submitter(self._app, self.handler, {**self._fields, **fields_of(options)})

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Accept the task durably; blocks until it is. Raises NotSubmitted, ArgumentError."""
        return self._plain.submit(*args, **kwargs)

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Accept the task durably. Raises NotSubmitted, ArgumentError."""
        return await self._plain.asubmit(*args, **kwargs)

    def submit_many(self, calls: Iterable[dict[str, Any]]) -> list[TaskHandle[R]]:
        """Accept a task for each dict of arguments by name. Raises NotSubmitted for the first that was refused."""
        return self._plain.submit_many(calls)

    async def asubmit_many(self, calls: Iterable[dict[str, Any]]) -> list[TaskHandle[R]]:
        """Accept a task for each dict of arguments by name. Raises NotSubmitted for the first that was refused."""
        return await self._plain.asubmit_many(calls)


class BatchTaskType(TaskType[[T], R], Generic[T, R]):
    """A function of a list, of which each task brings one item; called as it is, it is the plain function."""

    def __call__(self, items: list[T], *args: Any) -> Any:  # type: ignore[override] # a submission brings one of them
        """Call the function here and now, without the scheduler."""
        return self._function(items, *args)

    def submit_many(self, calls: Iterable[T | dict[str, Any]]) -> list[TaskHandle[R]]:
        """Accept a task for each item. Raises NotSubmitted for the first that was refused."""
        return self._plain.submit_many(calls)

    async def asubmit_many(self, calls: Iterable[T | dict[str, Any]]) -> list[TaskHandle[R]]:
        """Accept a task for each item. Raises NotSubmitted for the first that was refused."""
        return await self._plain.asubmit_many(calls)


class Submitter(Generic[P, R]):
    """A task type with the options of a submission; may be kept and used again."""

    def __init__(self, app: App, handler: Handler, fields: dict[str, Any]) -> None:
        self._app, self._handler, self._fields = app, handler, fields
        self._prepared: tuple[Backend, Prepared] | None = None

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Accept the task durably; blocks until it is. Raises NotSubmitted, ArgumentError."""
        payload = self._handler.payload(args, kwargs)
        try:
            return self._handle(self._ready().submit(payload).run().task_id)
        except Refused as refused:
            raise translated(refused) from refused

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]:
        """Accept the task durably. Raises NotSubmitted, ArgumentError."""
        payload = self._handler.payload(args, kwargs)
        try:
            return self._handle((await self._ready().submit(payload)).task_id)
        except Refused as refused:
            raise translated(refused) from refused

    def submit_many(self, calls: Iterable[Any]) -> list[TaskHandle[R]]:
        """Accept a task for each dict of arguments by name, or for each item of a batch.

        Raises NotSubmitted for the first that was refused.
        """
        payloads = self._payloads(calls)
        try:
            return self._handles(self._ready().submit_many(payloads).run())
        except Refused as refused:
            raise translated(refused) from refused

    async def asubmit_many(self, calls: Iterable[Any]) -> list[TaskHandle[R]]:
        """Accept a task for each dict of arguments by name, or for each item of a batch.

        Raises NotSubmitted for the first that was refused.
        """
        payloads = self._payloads(calls)
        try:
            return self._handles(await self._ready().submit_many(payloads))
        except Refused as refused:
            raise translated(refused) from refused

    def _payloads(self, calls: Iterable[Any]) -> list[bytes]:
        payload = self._handler.payload
        if self._handler.batch is not None:
            return [payload((item,), {}) for item in calls]
        return [payload((), arguments) for arguments in calls]

    def _ready(self) -> Prepared:
        backend = self._app.backend
        if self._prepared is None or self._prepared[0] is not backend:
            self._prepared = backend, backend.prepare(self._fields)
        return self._prepared[1]

    def _handle(self, task_id: str) -> TaskHandle[R]:
        return TaskHandle(task_id, self._app.backend, self._handler)

    def _handles(self, results: Sequence[Any]) -> list[TaskHandle[R]]:
        for result in results:
            if isinstance(result, Refusal):
                raise translated(Refused(result))
        return [self._handle(result.task_id) for result in results]


def _defaults(handler: Handler, total_timeout: Seconds | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"task_type": handler.name, **retry_fields(handler.retry)}
    if handler.queue != "default":
        fields["queue"] = handler.queue
    if handler.priority is not Priority.MEDIUM:
        fields["priority"] = str(handler.priority)
    if handler.timeout_ms is not None:
        fields["timeout_seconds"] = handler.timeout_ms / 1000
    if handler.lease_ms != 300_000:
        fields["lease_seconds"] = handler.lease_ms / 1000
    if total_timeout is not None:
        seconds = total_timeout.total_seconds() if isinstance(total_timeout, timedelta) else total_timeout
        fields["total_timeout_seconds"] = seconds
    return fields
