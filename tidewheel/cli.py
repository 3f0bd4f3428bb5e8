"""The command line. `main` is its entry point.

Exit codes: 0 it was done · 1 it was refused, or (with --wait) the task did not succeed · 2 the command was not written
as it must be · 3 the server cannot be reached. With --json there is one JSON document on stdout, and errors are JSON
documents on stderr, one a line.
"""

from __future__ import annotations

import contextlib
import json as json_text
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from random import getrandbits
from typing import Annotated, Any, NoReturn, TypeVar

import httpx
import msgspec
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from scheduler.instants import INSTANT_RULE, parse_instant
from scheduler.ports import TaskFilter
from scheduler.refusals import FieldError, Refusal, RefusalKind, Refused
from scheduler.service import TaskList
from scheduler.strict_json import NotAcceptable, check_json
from scheduler.task_view import TaskView
from schemas.errors import TidewheelIOError
from schemas.ids import NAME_RULE, is_name, uuid7
from schemas.limits import BODY_MAX, PAGE_MAX
from schemas.messages import Status
from tidewheel.backend import Doable
from tidewheel.http import HttpBackend
from tidewheel.settings import DEFAULT_PORT, ClientSettings
from tidewheel.terminal import Card, TaskTable, console, plain, show, status_text

T = TypeVar("T")

LIST_DEFAULT = 20  # tasks of a list that are on the screen at once
LOOK_EVERY_S = 2.0  # between what is told in a terminal of a task that is waited for
DATA_DEFAULT = Path(".tidewheel")


class Exit(IntEnum):
    """What the exit code says."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3


class CommandError(Exception):
    """A command cannot be done: said in one line, with what to do next, and ended with `code`."""

    def __init__(
        self,
        detail: str,
        *,
        code: Exit = Exit.REFUSED,
        kind: str = "refused",
        hint: str | None = None,
        errors: Sequence[FieldError] = (),
        task_id: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail, self.code, self.kind, self.hint = detail, code, kind, hint
        self.errors, self.task_id = tuple(errors), task_id


# --- the edge: how a command ends -------------------------------------------------------------------------------------


class _Edge(TyperGroup):
    """All commands. Whatever goes wrong in them ends here, as one line or one JSON document."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        extra["standalone_mode"] = False
        run = super().main
        sys.exit(_ended(lambda: run(given, prog_name or "tidewheel", **extra), options))


def _ended(run: Callable[[], Any], options: Sequence[str]) -> int:
    try:
        code = run()
        return code if isinstance(code, int) else Exit.OK
    except Exception as error:  # the edge: nobody else would tell the user
        if "--debug" in options or os.environ.get("TIDEWHEEL_DEBUG"):
            traceback.print_exception(error)
        told = _told(error)
        _complain(told, "--json" in options)
        return told.code


def _told(error: Exception) -> CommandError:
    if isinstance(error, CommandError):
        return error
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "tidewheel"
        hint = f"{path} --help lists what is possible"
        return CommandError(error.format_message(), code=Exit.USAGE, kind="usage", hint=hint)
    if isinstance(error, typer.Abort):
        return CommandError("interrupted", kind="interrupted")
    if isinstance(error, TidewheelIOError):
        return CommandError(str(error), kind="unable")
    detail = f"this should not have happened: {type(error).__name__}: {error}"
    return CommandError(detail, kind="internal", hint="run it again with --debug, and report what it shows")


def _complain(error: CommandError, is_json: bool) -> None:
    if is_json:
        document = {
            "kind": error.kind,
            "detail": error.detail,
            "errors": error.errors,
            "task_id": error.task_id,
            "hint": error.hint,
            "exit_code": int(error.code),
        }
        given = {name: value for name, value in document.items() if value not in (None, ())}
        sys.stderr.write(msgspec.json.encode(given).decode() + "\n")
        return
    out = console(sys.stderr)
    out.print(Text.assemble(("error: ", "bold red"), plain(error.detail)), soft_wrap=not out.is_terminal)
    if error.hint:
        out.print(Text.assemble(("   → ", "dim"), plain(error.hint)), soft_wrap=True)


def _usage(option: str, message: str, allowed: str) -> CommandError:
    field = FieldError(option, message, allowed)
    return CommandError(f"{option} {message}: {allowed}", code=Exit.USAGE, kind="usage", errors=(field,))


# --- the server -------------------------------------------------------------------------------------------------------

_OPTIONS = {  # how the fields of a request are called here
    "task_type": "TASK_TYPE",
    "payload": "PAYLOAD",
    "scheduled_at": "--at",
    "delay_seconds": "--delay",
    "task_id": "--id",
    "idempotency_key": "--key",
    "timeout_seconds": "--timeout",
    "max_retries": "--max-retries",
    "tenant_id": "--tenant",
    **{name: f"--{name}" for name in ("queue", "priority", "metadata", "status", "limit", "cursor", "reason")},
}
_HINTS = {
    RefusalKind.NOT_FOUND: "tidewheel list shows the tasks there are",
    RefusalKind.CONFLICT: "submit the same content to get that task, or choose another --id or --key",
    RefusalKind.TOO_LARGE: "put the content somewhere else and submit where it is",
    RefusalKind.OVERLOADED: "nothing happened; try again in a second",
    RefusalKind.UNAVAILABLE: "nothing happened; try again in a second, /healthz tells how the server is",
    RefusalKind.UNDECIDED: "it may have happened or not: look with tidewheel status before you try again",
}


class _Server:
    """The server's operations, with its refusals as CommandErrors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.backend = HttpBackend(_client_settings(url))

    def ask(self, operation: Doable[T], task_id: str | None = None) -> T:
        """The answer. Raises CommandError."""
        try:
            return operation.run()
        except Refused as refused:
            raise self._translated(refused, task_id) from refused
        except msgspec.MsgspecError as error:
            raise self._unreachable(f"what answers at {self.url} is no tidewheel of this release") from error

    def _translated(self, refused: Refused, task_id: str | None) -> CommandError:
        refusal = refused.refusal
        if isinstance(refused.__cause__, httpx.ConnectError):
            return self._unreachable(f"there is no server at {self.url} ({refused.__cause__})")
        if isinstance(refused.__cause__, httpx.HTTPError):
            cause = refused.__cause__
            error = self._unreachable(f"no answer from {self.url} ({str(cause) or type(cause).__name__})")
            error.hint = _HINTS[RefusalKind.UNDECIDED]
            return error
        detail = "; ".join(_field_text(error) for error in refusal.errors) or refusal.detail
        return CommandError(
            detail, kind=refusal.kind, hint=_hint(refusal, task_id), errors=refusal.errors, task_id=task_id
        )

    def _unreachable(self, detail: str) -> CommandError:
        hint = "start one with `tidewheel dev`, or name another one with --server or TIDEWHEEL_SERVER"
        return CommandError(detail, code=Exit.UNREACHABLE, kind="unreachable", hint=hint)


def _field_text(error: FieldError) -> str:
    allowed = f": {error.allowed}" if error.allowed else ""
    return f"{_OPTIONS.get(error.field, error.field)} {error.message}{allowed}"


def _hint(refusal: Refusal, task_id: str | None) -> str | None:
    if refusal.kind is RefusalKind.WRONG_STATUS and task_id is not None:
        return f"tidewheel status {task_id} tells how it stands"
    return _HINTS.get(refusal.kind)


def _client_settings(url: str) -> ClientSettings:
    try:
        return ClientSettings(server=url.rstrip("/"))
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        if name == "server":
            raise _usage("--server", f"{url!r} is no address", f"http://HOST:PORT, as http://127.0.0.1:{DEFAULT_PORT}") from error
        raise _usage(f"TIDEWHEEL_{str(name).upper()}", error.errors()[0]["msg"], "see docs/GUIDE.md") from error


@contextlib.contextmanager
def _connected(url: str) -> Iterator[_Server]:
    server = _Server(url)
    try:
        yield server
    finally:
        server.backend.close()


# --- output -----------------------------------------------------------------------------------------------------------


def _print_json(document: Any) -> None:
    content = document if isinstance(document, bytes) else msgspec.json.encode(document)
    if sys.stdout.isatty():
        content = msgspec.json.format(content, indent=2)
    sys.stdout.write(content.decode() + "\n")


def _note(*lines: str) -> None:
    """What is beside the answer goes to stderr, so that stdout can be piped."""
    out = console(sys.stderr)
    for line in lines:
        out.print(Text(plain(line), style="dim"), soft_wrap=True)


def _now_us() -> int:
    return time.time_ns() // 1000


# --- arguments --------------------------------------------------------------------------------------------------------

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION_RULE = "seconds, or with units, for example 90, 1.5s, 20m, 1h30m, 7d"


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    compact = text.replace(" ", "").lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", compact):
        return float(compact)
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise _usage(option, f"{text!r} is no duration", _DURATION_RULE)
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def _instant(option: str, text: str | None) -> str | None:
    if text is not None:
        try:
            parse_instant(text)
        except ValueError as error:
            raise _usage(option, f"{text!r} is no instant", INSTANT_RULE) from error
    return text


def _payload(text: str | None) -> bytes | None:
    if text is None:
        return None
    raw = sys.stdin.buffer.read(BODY_MAX + 1) if text == "-" else text.encode("utf-8", "surrogateescape")
    if len(raw) > BODY_MAX:
        raise CommandError(
            f"PAYLOAD has more than {BODY_MAX:,} bytes", kind="too-large", hint=_HINTS[RefusalKind.TOO_LARGE]
        )
    try:
        check_json(raw)
    except NotAcceptable as error:
        example = json_text.dumps(text, ensure_ascii=False) if text != "-" else '{"path": "a.png"}'
        rule = f"for example '{{\"path\": \"a.png\"}}'; a text needs double quotes inside single ones: '{example}'"
        if text == "-":
            rule = f"stdin must hold one JSON value, for example {example}"
        raise _usage("PAYLOAD", str(error), rule) from error
    return raw


def _metadata(pairs: Iterable[str], tenant: str | None) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise _usage("--metadata", f"{pair!r} has no name and value", "name=value, for example order=42")
        if name in metadata:
            raise _usage("--metadata", f"names {name!r} twice", "each name once")
        metadata[name] = value
    if tenant is not None:
        if metadata.get("tenant_id", tenant) != tenant:
            raise _usage("--tenant", "disagrees with --metadata tenant_id", "one of the two")
        metadata["tenant_id"] = tenant
    return metadata


def _task_id(text: str) -> str:
    if not is_name(text):
        raise _usage("TASK_ID", f"{text!r} cannot be the id of a task", NAME_RULE)
    return text


def _status(text: str | None) -> Status | None:
    allowed = [str(status) for status in Status if status is not Status.UNKNOWN]
    if text is not None and text.upper() not in allowed:
        raise _usage("--status", f"{text!r} is no status", f"one of {', '.join(allowed)}")
    return None if text is None else Status(text.upper())


# --- the commands -----------------------------------------------------------------------------------------------------

_EPILOG = (
    "Exit codes: 0 done; 1 refused, or with --wait the task did not succeed; 2 wrong usage; 3 the server cannot be reached."
)

cli = typer.Typer(
    cls=_Edge,
    name="tidewheel",
    help="Tidewheel, a durable task scheduler. Start one with `tidewheel dev`.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dlq = typer.Typer(help="Dead letters: tasks that used up their attempts.", no_args_is_help=True, rich_markup_mode=None)
cli.add_typer(dlq, name="dlq")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; errors as JSON on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Server = Annotated[str, typer.Option("--server", envvar="TIDEWHEEL_SERVER", metavar="URL", help="The scheduler's API.")]
Wait = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Wait so long for its end; exit 1 unless it succeeded.")
]
Full = Annotated[bool, typer.Option("--full", help="Shorten nothing: contents, tracebacks, attempts.")]
TaskId = Annotated[str, typer.Argument(metavar="TASK_ID", show_default=False)]
TaskIds = Annotated[list[str], typer.Argument(metavar="TASK_ID…", show_default=False)]
Limit = Annotated[int | None, typer.Option(min=1, max=PAGE_MAX, help=f"How many; {LIST_DEFAULT} by default.")]
Cursor = Annotated[str | None, typer.Option(help="Where the page before ended.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All pages.")]
_LOCAL = f"http://127.0.0.1:{DEFAULT_PORT}"


@cli.command()
def submit(
    task_type: Annotated[str, typer.Argument(metavar="TASK_TYPE", show_default=False)],
    payload: Annotated[str | None, typer.Argument(metavar="PAYLOAD", help="JSON; - reads it from stdin.")] = None,
    queue: Annotated[str | None, typer.Option()] = None,
    priority: Annotated[str | None, typer.Option(metavar="high|medium|low")] = None,
    delay: Annotated[str | None, typer.Option(metavar="DURATION", help="Due so long from now: 90, 20m, 1h30m.")] = None,
    at: Annotated[str | None, typer.Option(metavar="INSTANT", help="Due then: 2026-06-01T12:00:00Z.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: repeats within 24 h are one task.")] = None,
    task_id: Annotated[str | None, typer.Option("--id", help="The task's id; the first under an id wins.")] = None,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="Of one attempt.")] = None,
    max_retries: Annotated[int | None, typer.Option(metavar="N", help="Attempts after the first.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose task it is.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be given again.")] = None,
    wait: Wait = None,
    full: Full = False,
    server: Server = _LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Submit a task; it is durable when this returns.

    The queue, retries and timeouts that an application declares are those of its own submissions: name them here.
    """
    wait_s = _seconds("--wait", wait)
    fields: dict[str, Any] = {
        "task_type": task_type,
        "payload": _payload(payload),
        "queue": queue,
        "priority": priority,
        "delay_seconds": _seconds("--delay", delay),
        "scheduled_at": _instant("--at", at),
        "idempotency_key": key,
        # Chosen here, so that it can be told even if the answer is lost.
        "task_id": task_id if task_id is not None or key is not None else uuid7(time.time_ns() // 1_000_000, getrandbits),
        "timeout_seconds": _seconds("--timeout", timeout),
        "max_retries": max_retries,
        "metadata": _metadata(metadata or (), tenant) or None,
    }
    with _connected(server) as connected:
        given = {name: value for name, value in fields.items() if value is not None}
        submitted = connected.ask(connected.backend.submit(given), fields["task_id"])
        if wait_s is not None:
            return _waited(connected, submitted.task_id, wait_s, is_full=full, is_json=json)
    if json:
        _print_json(submitted)
    else:
        show(console(), Text.assemble(("✔ submitted ", "green"), (submitted.task_id, "bold"), "  ", status_text(submitted.status)))
        _note(f"→ tidewheel status {submitted.task_id} --wait 60")
    return Exit.OK


@cli.command()
def status(
    task_id: TaskId, wait: Wait = None, full: Full = False, server: Server = _LOCAL, json: Json = False, debug: Debug = False
) -> int:
    """Show how a task stands: its times, attempts, result or error."""
    task_id, wait_s = _task_id(task_id), _seconds("--wait", wait)
    with _connected(server) as connected:
        if wait_s is not None:
            return _waited(connected, task_id, wait_s, is_full=full, is_json=json)
        _show_task(connected.ask(connected.backend.get(task_id), task_id), is_full=full, is_json=json)
    return Exit.OK


def _show_task(task: TaskView, *, is_full: bool, is_json: bool) -> None:
    if is_json:
        _print_json(task)
    else:
        show(console(), Card(task=task, now=_now_us(), is_full=is_full))


def _waited(server: _Server, task_id: str, wait_s: float, *, is_full: bool, is_json: bool) -> int:
    task = _wait(server, task_id, wait_s, console(sys.stderr), is_json)
    _show_task(task, is_full=is_full, is_json=is_json)
    if task.completed_at is None:
        detail = f"task {task_id} is {task.status} after {wait_s:g} s; it goes on"
        raise CommandError(detail, kind="not-ended", hint="wait longer, or look again later", task_id=task_id)
    return Exit.OK if task.status is Status.SUCCEEDED else Exit.REFUSED


def _wait(server: _Server, task_id: str, wait_s: float, out: Console, is_json: bool) -> TaskView:
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


@cli.command("list")
def list_tasks(
    status: Annotated[str | None, typer.Option(help="For example RUNNING or DEAD.")] = None,
    queue: Annotated[str | None, typer.Option()] = None,
    task_type: Annotated[str | None, typer.Option("--type", help="The task type.")] = None,
    tenant: Annotated[str | None, typer.Option()] = None,
    limit: Limit = None,
    cursor: Cursor = None,
    every: All = False,
    server: Server = _LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List tasks, newest first."""
    wanted = TaskFilter(tenant_id=tenant, status=_status(status), queue=queue, task_type=task_type)
    _check_limit(limit, every)
    with _connected(server) as connected:
        backend = connected.backend
        pages = _pages(lambda size, at: connected.ask(backend.list_tasks(wanted, limit=size, cursor=at)), limit, cursor, every)
        _show_pages(pages, json, "no tasks" if wanted == TaskFilter() else "no tasks that match")
    return Exit.OK


def _check_limit(limit: int | None, every: bool) -> None:
    if every and limit is not None:
        raise _usage("--limit", "is given beside --all", "one of the two")


def _pages(
    page: Callable[[int, str | None], TaskList], limit: int | None, cursor: str | None, every: bool
) -> Iterator[TaskList]:
    size = PAGE_MAX if every else limit or LIST_DEFAULT
    while True:
        answer = page(size, cursor)
        yield answer
        cursor = answer.cursor
        if cursor is None or not every:
            return


def _show_pages(pages: Iterator[TaskList], is_json: bool, if_empty: str, *, is_dead_letters: bool = False) -> None:
    first = next(pages)
    if is_json:
        _print_pages_json(first, pages)
        return
    if not first.tasks:
        _note(if_empty)
        return
    out, last = console(), first
    table = TaskTable(out.width, first.tasks, is_dead_letters=is_dead_letters)
    show(out, table.header(), *table.rows(first.tasks, _now_us()))
    for last in pages:
        if last.tasks:
            show(out, *table.rows(last.tasks, _now_us()))
    if last.cursor is not None:
        _note(f"→ more with --all, or with --cursor {last.cursor}")


def _print_pages_json(first: TaskList, others: Iterator[TaskList]) -> None:
    """One document, written page by page: a list of everything need not fit into memory."""
    following = next(others, None)
    if following is None:
        _print_json(first)
        return
    sys.stdout.write('{"tasks":[' + _inner_json(first))
    page: TaskList | None = following
    while page is not None:
        if page.tasks:
            sys.stdout.write("," + _inner_json(page))
        page = next(others, None)
    sys.stdout.write('],"cursor":null}\n')


def _inner_json(page: TaskList) -> str:
    return msgspec.json.encode(page.tasks).decode()[1:-1]


@cli.command()
def cancel(
    task_ids: TaskIds,
    reason: Annotated[str | None, typer.Option(help="Kept with the task.")] = None,
    server: Server = _LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Stop tasks: a waiting one never starts, a running one is told to stop."""
    with _connected(server) as connected:
        backend = connected.backend
        return _each(task_ids, lambda i: connected.ask(backend.cancel(i, reason=reason), i), _cancelled_text, json)


def _cancelled_text(answer: Any) -> Text:
    is_told = answer.status is Status.RUNNING
    return Text.assemble(status_text(answer.status), f"  {answer.task_id}", ("  was told to stop" if is_told else "", "dim"))


def _each(
    task_ids: Sequence[str], act: Callable[[str], T], text: Callable[[T], Text], is_json: bool
) -> int:
    """Do it to each task; a refusal of one does not keep the others from it."""
    task_ids = [_task_id(task_id) for task_id in task_ids]
    answers: list[T] = []
    code = Exit.OK
    for task_id in task_ids:
        try:
            answer = act(task_id)
        except CommandError as error:
            if error.code is Exit.UNREACHABLE:
                raise
            _complain(error, is_json)
            code = error.code
            continue
        answers.append(answer)
        if not is_json:
            show(console(), text(answer))
    if is_json:
        _print_json({"results": answers})
    return code


@dlq.command("list")
def list_dead_letters(
    queue: Annotated[str | None, typer.Option()] = None,
    limit: Limit = None,
    cursor: Cursor = None,
    every: All = False,
    server: Server = _LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List dead letters, newest first, and why they died."""
    _check_limit(limit, every)
    with _connected(server) as connected:
        backend = connected.backend
        pages = _pages(lambda size, at: connected.ask(backend.dead_letters(queue, limit=size, cursor=at)), limit, cursor, every)
        _show_pages(pages, json, "no dead letters", is_dead_letters=True)
    return Exit.OK


@dlq.command("retry")
def retry(task_ids: TaskIds, server: Server = _LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Run dead or failed tasks again, with fresh attempts."""
    with _connected(server) as connected:
        backend = connected.backend
        return _each(task_ids, lambda i: connected.ask(backend.redrive(i), i), _redriven_text, json)


def _redriven_text(answer: Any) -> Text:
    return Text.assemble(status_text(answer.status), f"  {answer.task_id}")


@dlq.command("retry-all")
def retry_all(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", show_default=False)],
    server: Server = _LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run all dead letters of a queue again."""
    with _connected(server) as connected:
        done = connected.ask(connected.backend.redrive_all(queue))
    if json:
        _print_json(done)
        return Exit.OK
    skipped = f", {done.skipped:,} had changed meanwhile" if done.skipped else ""
    show(console(), Text(f"{done.redriven:,} dead letters of {plain(queue)} run again{skipped}"))
    if not done.is_complete:
        _note("→ there are more: run it once more")
    return Exit.OK


@dlq.command("discard")
def discard(task_ids: TaskIds, server: Server = _LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Take dead tasks out of the dead-letter queue; they stay DEAD."""
    with _connected(server) as connected:
        backend = connected.backend

        def act(task_id: str) -> dict[str, str]:
            connected.ask(backend.discard(task_id), task_id)
            return {"task_id": task_id}

        return _each(task_ids, act, lambda done: Text(f"✔ discarded  {done['task_id']}"), json)


@cli.command()
def version(json: Json = False, debug: Debug = False) -> int:
    """Show the version."""
    from tidewheel import __version__

    if json:
        _print_json({"version": __version__, "python": sys.version.partition(" ")[0]})
    else:
        show(console(), Text(f"tidewheel {__version__}"))
    return Exit.OK


def main() -> NoReturn:
    """The command `tidewheel`."""
    cli()
    raise AssertionError("a command ends by itself")
