"""The commands that submit tasks, show them and stop them."""

from __future__ import annotations

import sys
import time
from random import getrandbits
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from scheduler.ports import TaskFilter
from scheduler.submission import without_none
from scheduler.task_view import TaskView
from schemas.ids import uuid7
from schemas.messages import Status
from tidewheel.cli.arguments import (
    All,
    Cursor,
    Debug,
    Full,
    Json,
    Limit,
    Server,
    TaskId,
    TaskIds,
    Wait,
    instant,
    metadata_of,
    payload_of,
    seconds,
    status_of,
    task_id_of,
)
from tidewheel.cli.client import LOCAL, Client, connected_to
from tidewheel.cli.edge import CommandError, Exit, note, print_json, usage
from tidewheel.cli.listing import check_limit, each, now_us, pages_of, show_pages
from tidewheel.terminal import Card, console, show, status_text

LOOK_EVERY_S = 2.0  # between what is told in a terminal of a task that is waited for


def submit(
    task_type: Annotated[str, typer.Argument(metavar="TASK_TYPE", show_default=False)],
    payload: Annotated[str | None, typer.Argument(metavar="PAYLOAD", help="JSON; - reads it from stdin.")] = None,
    queue: Annotated[str | None, typer.Option()] = None,
    priority: Annotated[str | None, typer.Option(metavar="high|medium|low")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Due so long from now: 90, 20m, 1h30m.")] = None,
    at: Annotated[str | None, typer.Option(metavar="INSTANT", help="Due then: 2026-06-01T12:00:00Z.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: repeats within 24 h are one task.")] = None,
    task_id: Annotated[str | None, typer.Option("--id", help="The task's id; the first under an id wins.")] = None,
    unique: Annotated[str | None, typer.Option(metavar="KEY", help="One task stands for all under this key.")] = None,
    unique_for: Annotated[
        str | None, typer.Option(metavar="waiting|live|DURATION", help="So long; until it has ended by default.")
    ] = None,
    debounce: Annotated[str | None, typer.Option(metavar="KEY", help="The last one under this key is run.")] = None,
    quiet: Annotated[str | None, typer.Option(metavar="DURATION", help="Once none has come for so long.")] = None,
    at_latest: Annotated[str | None, typer.Option(metavar="DURATION", help="Or so long after the first.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="Of one attempt.")] = None,
    max_retries: Annotated[int | None, typer.Option(metavar="N", help="Attempts after the first.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose task it is.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be given again.")] = None,
    wait: Wait = None,
    full: Full = False,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Submit a task; it is durable when this returns.

    The queue, retries and timeouts that an application declares are those of its own submissions: name them here.
    """
    wait_s = seconds("--wait", wait)
    fields: dict[str, Any] = {
        "task_type": task_type,
        "payload": payload_of(payload),
        "queue": queue,
        "priority": priority,
        "delay_seconds": seconds("--delay", delay),
        "scheduled_at": instant("--at", at),
        "idempotency_key": key,
        "task_id": _own_id(key, unique, debounce) if task_id is None else task_id,
        "unique": _unique(unique, unique_for),
        "debounce": _debounce(debounce, quiet, at_latest),
        "timeout_seconds": seconds("--timeout", timeout),
        "max_retries": max_retries,
        "metadata": metadata_of(metadata or (), tenant) or None,
    }
    with connected_to(server) as connected:
        given = {name: value for name, value in fields.items() if value is not None}
        submitted = connected.ask(connected.backend.submit(given), fields["task_id"])
        if wait_s is not None:
            return _waited(connected, submitted.task_id, wait_s, is_full=full, is_json=json)
    if json:
        print_json(submitted)
    else:
        show(
            console(),
            Text.assemble(("✔ submitted ", "green"), (submitted.task_id, "bold"), "  ", status_text(submitted.status)),
        )
        note(f"→ to wait: tidewheel status {submitted.task_id} --wait 60{connected.options}")
    return Exit.OK


def _own_id(*keys: str | None) -> str | None:
    """An id chosen here, so that it can be told even if the answer is lost; None: it is made of a key."""
    return uuid7(time.time_ns() // 1_000_000, getrandbits) if all(key is None for key in keys) else None


def _unique(key: str | None, how_long: str | None) -> dict[str, Any] | None:
    if key is None:
        if how_long is not None:
            raise usage("--unique-for", "is of no use alone", "with --unique KEY")
        return None
    if how_long is None or how_long in ("waiting", "live"):
        return {"key": key, **({} if how_long is None else {"scope": how_long})}
    return {"key": key, "seconds": seconds("--unique-for", how_long)}


def _debounce(key: str | None, quiet: str | None, at_latest: str | None) -> dict[str, Any] | None:
    if (key is None) != (quiet is None):
        raise usage("--quiet" if key is None else "--debounce", "is of no use alone", "--debounce KEY --quiet DURATION")
    if key is None:
        if at_latest is not None:
            raise usage("--at-latest", "is of no use alone", "with --debounce KEY --quiet DURATION")
        return None
    fields = {"key": key, "seconds": seconds("--quiet", quiet), "max_seconds": seconds("--at-latest", at_latest)}
    return without_none(fields)


def status(
    task_id: TaskId,
    wait: Wait = None,
    full: Full = False,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show how a task stands: its times, attempts, result or error."""
    task_id, wait_s = task_id_of(task_id), seconds("--wait", wait)
    with connected_to(server) as connected:
        if wait_s is not None:
            return _waited(connected, task_id, wait_s, is_full=full, is_json=json)
        _show_task(connected, connected.ask(connected.backend.get(task_id), task_id), is_full=full, is_json=json)
    return Exit.OK


def _show_task(server: Client, task: TaskView, *, is_full: bool, is_json: bool) -> None:
    if is_json:
        print_json(task)
    else:
        show(console(), Card(task=task, now=now_us(), is_full=is_full, options=server.options))


def _waited(server: Client, task_id: str, wait_s: float, *, is_full: bool, is_json: bool) -> int:
    task = _wait(server, task_id, wait_s, console(sys.stderr), is_json)
    _show_task(server, task, is_full=is_full, is_json=is_json)
    if task.completed_at is None:
        detail = f"task {task_id} is {task.status} after {wait_s:g} s; it goes on"
        raise CommandError(detail, kind="not-ended", hint="wait longer, or look again later", task_id=task_id)
    return Exit.OK if task.status is Status.SUCCEEDED else Exit.REFUSED


def _wait(server: Client, task_id: str, wait_s: float, out: Console, is_json: bool) -> TaskView:
    if is_json or not out.is_terminal:
        return server.ask(server.backend.wait(task_id, wait_s), task_id)
    give_up_at = time.monotonic() + wait_s
    with out.status(Text(f"waiting for {task_id}")) as line:
        while True:
            left_s = max(0.0, give_up_at - time.monotonic())
            task = server.ask(server.backend.wait(task_id, min(left_s, LOOK_EVERY_S)), task_id)
            if task.completed_at is not None or left_s <= LOOK_EVERY_S:
                return task
            line.update(Text.assemble(status_text(task.status), f"  {task_id}  up to {left_s:.0f} s more"))


def list_tasks(
    status: Annotated[str | None, typer.Option(help="For example RUNNING or DEAD.")] = None,
    queue: Annotated[str | None, typer.Option()] = None,
    task_type: Annotated[str | None, typer.Option("--type", help="The task type.")] = None,
    tenant: Annotated[str | None, typer.Option()] = None,
    limit: Limit = None,
    cursor: Cursor = None,
    every: All = False,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List tasks, newest first."""
    wanted = TaskFilter(tenant_id=tenant, status=status_of(status), queue=queue, task_type=task_type)
    check_limit(limit, every)
    with connected_to(server) as connected:
        backend = connected.backend
        pages = pages_of(
            lambda size, at: connected.ask(backend.list_tasks(wanted, limit=size, cursor=at)), limit, cursor, every
        )
        show_pages(pages, json, "no tasks" if wanted == TaskFilter() else "no tasks that match")
    return Exit.OK


def cancel(
    task_ids: TaskIds,
    reason: Annotated[str | None, typer.Option(help="Kept with the task.")] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Stop tasks: a waiting one never starts, a running one is told to stop."""
    with connected_to(server) as connected:
        backend = connected.backend
        return each(task_ids, lambda i: connected.ask(backend.cancel(i, reason=reason), i), _cancelled_text, json)


def _cancelled_text(answer: Any) -> Text:
    is_told = answer.status is Status.RUNNING
    return Text.assemble(
        status_text(answer.status), f"  {answer.task_id}", ("  was told to stop" if is_told else "", "dim")
    )
