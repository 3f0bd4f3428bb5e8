"""What a process of ours says of itself when it is up: where it is, what it runs, how to use it."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tidewheel.app import App
from tidewheel.embedded import Engine
from tidewheel.settings import DEFAULT_PORT
from tidewheel.terminal import plain
from workers.context import Context
from workers.registry import ExecutorKind, Handler
from workers.settings import WorkerSettings

TASK_TYPES_SHOWN = 20
_RUNS_IN = {ExecutorKind.ASYNC: "event loop", ExecutorKind.THREAD: "thread", ExecutorKind.PROCESS: "process"}
_EXAMPLES: dict[Any, Any] = {str: "…", int: 1, float: 1.5, bool: True, list: [], dict: {}}


@dataclass(frozen=True, kw_only=True)
class Banner:
    """A few lines for people; the same `facts` for programs."""

    title: str
    facts: dict[str, Any]
    lines: tuple[tuple[str, Text], ...]
    handlers: tuple[Handler, ...]
    warning: str | None = None

    @classmethod
    def of_engine(cls, engine: Engine, app: App | None, app_name: str | None) -> Banner:
        """For an engine that is up."""
        settings = engine.settings
        address = _address(settings.host, settings.port or 0)
        handlers = _sorted(app) if engine.worker is not None else ()
        facts = {
            "version": _version(),
            "api": address,
            "docs": f"{address}/docs",
            "data": str(settings.data),
            "app": app_name,
            "has_worker": engine.worker is not None,
            "task_types": [_facts(handler) for handler in handlers],
        }
        lines = (
            ("API", Text.assemble((address, "bold cyan"), f"   docs: {address}/docs")),
            ("data", Text(_short(settings.data))),
            ("worker", _worker_text(engine, app, app_name)),
            *_usage_lines(handlers, settings.port or 0),
        )
        warning = None
        if not _is_loopback(settings.host):
            warning = (
                f"there is no authentication yet: whoever can reach {settings.host}:{settings.port} "
                "can read, submit and cancel tasks"
            )
        return cls(title=f"tidewheel {_version()} is up", facts=facts, lines=lines, handlers=handlers, warning=warning)

    @classmethod
    def of_worker(cls, settings: WorkerSettings, app: App, data: Path) -> Banner:
        """For a worker that is connected."""
        handlers = _sorted(app)
        facts = {
            "version": _version(),
            "worker_id": settings.worker_id,
            "data": str(data),
            "app": settings.app,
            "queues": settings.queues,
            "task_types": [_facts(handler) for handler in handlers],
        }
        lines = (
            ("data", Text(_short(data))),
            ("worker", Text(settings.worker_id)),
            ("slots", Text(f"{settings.slots}, queues {', '.join(settings.queues)}")),
        )
        return cls(title=f"tidewheel {_version()} worker is up", facts=facts, lines=lines, handlers=handlers)

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [Text(self.title, style="bold green"), Text(), _grid(self.lines[:3])]
        if self.handlers:
            parts += [Text(), _handler_table(self.handlers)]
        if self.lines[3:]:
            parts += [Text(), _grid(self.lines[3:])]
        if self.warning:
            parts += [Text(), Padding(Text(f"warning: {self.warning}", style="bold yellow"), (0, 0, 0, 2))]
        return Group(*parts, Text(), Text("  Ctrl-C stops it in order; once more hurries.", style="dim"), Text())


def example_payload(handler: Handler) -> str:
    """A payload of the form that a handler takes: its required parameters, or all if none is required."""
    parameters = [
        parameter
        for parameter in inspect.signature(handler.function, eval_str=True).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.annotation is not Context
    ]
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    values = {parameter.name: _EXAMPLES.get(parameter.annotation) for parameter in required}
    return msgspec.json.encode(values).decode()


def _usage_lines(handlers: tuple[Handler, ...], port: int) -> Iterable[tuple[str, Text]]:
    name, payload = ("TASK_TYPE", "{…}") if not handlers else (handlers[0].name, example_payload(handlers[0]))
    argument = "" if payload == "{}" else f" {shlex.quote(payload)}"
    server = "" if port == DEFAULT_PORT else f" --server http://127.0.0.1:{port}"
    yield "submit", Text(f"tidewheel submit {name}{argument}{server}")
    yield "follow", Text(f"tidewheel list{server}")


def _worker_text(engine: Engine, app: App | None, app_name: str | None) -> Text:
    if engine.worker is not None:
        queues = ", ".join(sorted({handler.queue for handler in app.registry})) if app is not None else ""
        return Text(f"{engine.settings.slots} slots, queues {queues}")
    further = f"tidewheel worker MODULE:APP --data {shlex.quote(_short(engine.settings.data))}"
    if app is None:
        return Text(f"none, since no MODULE:APP was named: tasks wait for\n{further}", style="yellow")
    if not len(app.registry):
        return Text(f"none, since {app_name} has no task types", style="yellow")
    return Text(f"none in this process: tasks wait for\n{further}", style="yellow")


def _grid(lines: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in lines:
        grid.add_row(f"  {label}", value)
    return grid


def _handler_table(handlers: tuple[Handler, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  TASK TYPE", overflow="fold")
    for header in ("QUEUE", "PRIORITY", "RUNS IN"):
        table.add_column(header)
    for handler in handlers[:TASK_TYPES_SHOWN]:
        table.add_row(Text(f"  {handler.name}"), handler.queue, str(handler.priority), _RUNS_IN[handler.executor])
    if len(handlers) > TASK_TYPES_SHOWN:
        table.add_row(Text(f"  and {len(handlers) - TASK_TYPES_SHOWN} more", style="dim"))
    return table


def _facts(handler: Handler) -> dict[str, str]:
    return {
        "name": handler.name,
        "queue": handler.queue,
        "priority": str(handler.priority),
        "executor": str(handler.executor),
    }


def _sorted(app: App | None) -> tuple[Handler, ...]:
    return () if app is None else tuple(sorted(app.registry, key=lambda handler: handler.name))


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _short(path: Path | None) -> str:
    if path is None:
        return "in memory"
    try:
        return plain(str(path.relative_to(Path.cwd())))
    except ValueError:
        return plain(str(path))


def _version() -> str:
    from tidewheel import __version__

    return __version__
