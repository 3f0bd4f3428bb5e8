"""How the command line shows tasks to people: times, colours, cards and tables. Nothing here asks a server.

Everything that comes from tasks is shown as plain text: a control character in an error message must not reach the
terminal as one. Without a terminal there are no colours, and nothing is cut unless COLUMNS says how wide it may be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from scheduler.instants import parse_instant
from scheduler.ports import AttemptOutcome
from scheduler.task_view import AttemptView, ErrorView, TaskView
from schemas.messages import ErrorKind, Status

WIDTH_UNCUT = 1_000  # columns where there is no terminal: lines are as long as what they say
CONTENT_SHOWN_MAX = 400  # characters of a payload or result, unless all is asked for
MESSAGE_SHOWN_MAX = 300  # characters of an attempt's error, unless all is asked for
TRACEBACK_LINES_SHOWN = 12
ATTEMPTS_SHOWN = 10


class Look(NamedTuple):
    """How a status or an outcome is drawn."""

    symbol: str
    style: str


STATUS_LOOKS = {
    Status.SUBMITTED: Look("·", "blue"),
    Status.SCHEDULED: Look("◷", "blue"),
    Status.BLOCKED: Look("◌", "blue"),
    Status.PENDING: Look("○", "cyan"),
    Status.RUNNING: Look("●", "bold cyan"),
    Status.RETRYING: Look("↻", "yellow"),
    Status.SUCCEEDED: Look("✔", "green"),
    Status.FAILED: Look("✘", "red"),
    Status.DEAD: Look("✘", "bold red"),
    Status.CANCELLED: Look("⊘", "dim"),
    Status.UNKNOWN: Look("?", "magenta"),
}
_OUTCOME_LOOKS = {
    AttemptOutcome.SUCCEEDED: Look("✔", "green"),
    AttemptOutcome.FAILED: Look("✘", "red"),
    AttemptOutcome.LOST: Look("✘", "magenta"),
    AttemptOutcome.RETURNED: Look("↩", "dim"),
    AttemptOutcome.SNOOZED: Look("◷", "blue"),
    AttemptOutcome.CANCELLED: Look("⊘", "dim"),
}
_WAITING = frozenset({Status.SUBMITTED, Status.BLOCKED, Status.PENDING})
_ENDED = frozenset({Status.SUCCEEDED, Status.FAILED, Status.DEAD, Status.CANCELLED})


def console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (stdout, if None) that never guesses: no markup, no highlighting, no emoji codes."""
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a terminal that lacks a symbol gets a question mark, not a traceback
    width = None if stream.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDTH_UNCUT
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def show(out: Console, *renderables: RenderableType) -> None:
    """Print to the terminal; elsewhere without the blanks that fill lines up."""
    if out.is_terminal:
        out.print(*renderables, sep="\n", soft_wrap=False)
        return
    with out.capture() as capture:
        out.print(*renderables, sep="\n")
    out.file.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def plain(text: str) -> str:
    """The text with everything but printable characters, blanks and line ends made visible."""
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return (
        "" if character == "\r" else f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
    )


# --- times ------------------------------------------------------------------------------------------------------------


def span(microseconds: int) -> str:
    """A duration in at most two units, for example `12 ms`, `3.2 s`, `2 h 5 min`."""
    ms = max(0, microseconds) // 1000
    if ms < 1000:
        return f"{ms} ms"
    seconds = ms // 1000
    if seconds < 60:
        return f"{ms / 1000:.1f} s"
    for size, unit, smaller_size, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(seconds, size)
            return f"{whole} {unit} {rest // smaller_size} {smaller}" if rest // smaller_size else f"{whole} {unit}"
    raise AssertionError(seconds)


def about(microseconds: int) -> str:
    """A duration as one speaks of it: whole seconds, at most two units."""
    seconds = max(0, microseconds) // 1_000_000
    return f"{seconds} s" if seconds < 60 else span(microseconds)


def short_span(microseconds: int) -> str:
    """A duration in one unit, for a narrow column."""
    seconds = max(0, microseconds) // 1_000_000
    for size, unit in ((86_400, "d"), (3_600, "h")):
        if seconds >= size:
            amount = seconds / size
            return f"{amount:.1f}".removesuffix(".0") + f" {unit}" if amount < 10 else f"{amount:.0f} {unit}"
    return f"{seconds // 60} min" if seconds >= 60 else f"{seconds} s"


def relative(instant: str, now: int, show: Callable[[int], str] = about) -> str:
    """An instant as seen from `now`: `12 s ago`, `in 2 h 5 min`, `just now`."""
    distance = parse_instant(instant) - now
    if distance > 0:
        return f"in {show(distance)}"
    return f"{show(-distance)} ago" if distance <= -1_000_000 else "just now"


def local_time(instant: str) -> str:
    """An instant to the millisecond in the zone of this machine, with its offset."""
    when = datetime.fromisoformat(instant).astimezone()
    offset = when.strftime("%z")
    zone = "UTC" if offset == "+0000" else f"{offset[:3]}:{offset[3:5]}"
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d} {zone}"


def clock_time(instant: str, beside: str) -> str:
    """The time of the day of an instant; with its date if that is not the date of the instant `beside`."""
    when, other = (datetime.fromisoformat(text).astimezone() for text in (instant, beside))
    time = f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}"
    return time if when.date() == other.date() else f"{when:%m-%d} {time}"


# --- the card of a task -----------------------------------------------------------------------------------------------


def status_text(status: Status) -> Text:
    """A status with its symbol, in its colour."""
    look = STATUS_LOOKS[status]
    return Text(f"{look.symbol} {status}", style=look.style)


@dataclass(frozen=True, kw_only=True)
class Card:
    """Everything about one task, for reading. With `is_full` nothing is shortened."""

    task: TaskView
    now: int
    is_full: bool = False
    options: str = ""  # that a command needs to reach the same server

    def __rich__(self) -> Group:
        task = self.task
        parts: list[RenderableType] = [self._headline(), Text(plain(task.task_id), style="bold"), Text()]
        parts.append(self._facts())
        if task.attempt_history:
            parts += [Text(), self._attempts()]
        if task.error is not None and task.error.traceback:
            parts += [Text(), *self._traceback(task.error.traceback)]
        if hint := next_step(task, self.options):
            parts += [Text(), Text.assemble(("→ ", "dim"), (hint, "dim"))]
        return Group(*parts)

    def _headline(self) -> Text:
        task = self.task
        headline = Text.assemble(
            status_text(task.status), "  ", (plain(task.task_type or "(type not known yet)"), "bold")
        )
        if when := _moment(task, self.now, about):
            headline.append(f"  {when}", "dim")
        if task.cancel_requested_at is not None and task.status not in _ENDED:
            headline.append("  told to stop", "yellow")
        return headline

    def _facts(self) -> Table:
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for label, value in (*self._origin(), *self._times(), *self._figures(), *self._contents()):
            facts.add_row(f"  {label}", value)
        return facts

    def _origin(self) -> Iterable[tuple[str, RenderableType]]:
        task = self.task
        where = [plain(task.queue)] if task.queue else []
        where += [f"{task.priority} priority"] if task.priority else []
        where += [f"tenant {plain(task.tenant_id)}"] if task.tenant_id not in (None, "default") else []
        if where:
            yield "queue", Text(" · ".join(where))
        if task.idempotency_key is not None:
            yield "key", Text(plain(task.idempotency_key))
        metadata = {name: value for name, value in task.metadata.items() if name != "tenant_id"}
        if metadata:
            yield "metadata", Text("\n".join(plain(f"{name}={value}") for name, value in metadata.items()))

    def _times(self) -> Iterable[tuple[str, RenderableType]]:
        task = self.task
        yield "created", self._time(task.created_at)
        if task.scheduled_at is not None and task.scheduled_at != task.created_at:
            yield "due", self._time(task.scheduled_at)
        if task.next_run_at is not None and task.next_run_at != task.scheduled_at:
            yield "next run", self._time(task.next_run_at)
        if task.started_at is not None:
            yield "started", self._time(task.started_at)
        if task.cancel_requested_at is not None:
            yield "cancel", self._time(task.cancel_requested_at)
        if task.completed_at is not None:
            took = "" if task.duration_ms is None else f"took {span(task.duration_ms * 1000)}"
            yield "ended", self._time(task.completed_at, took)
        if task.cancel_reason:
            yield "reason", Text(plain(task.cancel_reason))

    def _time(self, instant: str, remark: str = "") -> Text:
        text = Text.assemble(local_time(instant), (f"   {relative(instant, self.now)}", "dim"))
        return text.append(f", {remark}", "dim") if remark else text

    def _figures(self) -> Iterable[tuple[str, RenderableType]]:
        task = self.task
        if task.attempts:
            crashes = f", {task.crash_count} lost with their worker" if task.crash_count else ""
            yield "attempts", Text(f"{tries(task)}{crashes}")
        if task.status is Status.RUNNING and task.worker_id:
            yield "worker", Text(plain(task.worker_id))

    def _contents(self) -> Iterable[tuple[str, RenderableType]]:
        task = self.task
        payload = self._content(bytes(task.payload), task.payload_base64, task.payload_content_type)
        if payload is not None:
            yield "payload", payload
        if task.is_partial:
            yield "note", Text("it ended a moment ago; ask again for its result and attempts", style="yellow")
        elif task.has_result:
            result = self._content(bytes(task.result), task.result_base64, task.result_content_type)
            yield "result", result or Text("null", style="dim")
        elif task.status is Status.SUCCEEDED:
            yield "result", Text("not kept any more", style="dim")
        if task.error is not None and all(attempt.error != task.error for attempt in task.attempt_history):
            yield "error", Text(error_line(task.error), style="red")

    def _content(self, json: bytes, base64: str | None, content_type: str | None) -> Text | None:
        if base64 is not None:
            return Text(f"{self._shortened(base64)} (base64, {plain(content_type or 'of an unknown type')})")
        if json in (b"null", b""):
            return None
        return Text(self._shortened(plain(msgspec.json.format(json, indent=-1).decode())))

    def _shortened(self, text: str, most: int = CONTENT_SHOWN_MAX) -> str:
        if self.is_full or len(text) <= most:
            return text
        return f"{text[:most]}… ({len(text):,} characters; --full shows all)"

    def _attempts(self) -> Group:
        history = self.task.attempt_history
        shown = history if self.is_full else history[-ATTEMPTS_SHOWN:]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("  #", justify="right", no_wrap=True)
        for header in ("OUTCOME", "STARTED", "TOOK"):
            table.add_column(header, no_wrap=True)
        table.add_column("WORKER, ERROR", overflow="fold")
        said: str | None = None
        for attempt in shown:
            error = None if attempt.error is None else error_line(attempt.error)
            table.add_row(*self._attempt(attempt, "the same error" if error and error == said else error))
            said = error
        if len(shown) == len(history):
            return Group(table)
        return Group(
            Text(f"  {len(history) - len(shown)} earlier attempts are left out; --full shows them", "dim"), table
        )

    def _attempt(self, attempt: AttemptView, error: str | None) -> tuple[RenderableType, ...]:
        look = Look("●", "bold cyan") if attempt.outcome is None else _OUTCOME_LOOKS[attempt.outcome]
        started = "-" if attempt.started_at is None else clock_time(attempt.started_at, self.task.created_at)
        details = Text(plain(attempt.worker_id or "-"), style="dim")
        if error is not None:
            details.append("\n" + self._shortened(error, MESSAGE_SHOWN_MAX), "red")
        outcome = Text(f"{look.symbol} {attempt.outcome or 'running'}", look.style)
        return Text(str(attempt.attempt)), outcome, Text(started), Text(self._took(attempt)), details

    def _took(self, attempt: AttemptView) -> str:
        if attempt.started_at is None:
            return "-"
        end = self.now if attempt.finished_at is None else parse_instant(attempt.finished_at)
        return span(end - parse_instant(attempt.started_at))

    def _traceback(self, traceback: str) -> Iterable[RenderableType]:
        lines = plain(traceback).rstrip().splitlines()
        if not self.is_full and len(lines) > TRACEBACK_LINES_SHOWN:
            yield Text(f"  {len(lines) - TRACEBACK_LINES_SHOWN} lines are left out; --full shows them", "dim")
            lines = lines[-TRACEBACK_LINES_SHOWN:]
        yield Padding(Text("\n".join(lines), "dim"), (0, 0, 0, 2))


def error_line(error: ErrorView) -> str:
    """An error as one would say it, without its traceback."""
    kind = "" if error.kind is ErrorKind.RAISED else f" ({error.kind})"
    name = error.type.removeprefix("builtins.")
    return plain(f"{name}: {error.message}{kind}" if error.message else f"{name}{kind}")


def tries(task: TaskView) -> str:
    """How many attempts began, of how many."""
    return f"{task.attempts}" if task.max_attempts is None else f"{task.attempts} of {task.max_attempts}"


def next_step(task: TaskView, options: str = "") -> str | None:
    """What one would do now with a task that stands so; `options` goes to the end of the command."""
    if task.status in (Status.FAILED, Status.DEAD):
        return f"to run it again: tidewheel dlq retry {task.task_id}{options}"
    if task.status in _ENDED:
        return None
    return f"to wait: tidewheel status {task.task_id} --wait 60{options}"


def _moment(task: TaskView, now: int, show: Callable[[int], str]) -> str:
    """The one time that matters of a task that stands so."""
    if task.completed_at is not None:
        return relative(task.completed_at, now, show)
    if task.status is Status.RUNNING and task.started_at is not None:
        return f"for {show(now - parse_instant(task.started_at))}"
    next_at = task.next_run_at or task.scheduled_at
    if task.status in _WAITING or next_at is None:
        return f"waits {show(now - max(parse_instant(at) for at in (task.created_at, task.scheduled_at) if at))}"
    return relative(next_at, now, show)


# --- lists ------------------------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    header: str
    width: int
    cell: Callable[[TaskView, int], Text]


_GAP = 2
_ID_WIDTH = 36  # of a UUID
_TYPE_WIDTH_MIN, _TYPE_WIDTH_MAX = 15, 40
_STATUS = _Column("STATUS", 11, lambda task, _: status_text(task.status))
_WHEN = _Column("WHEN", 12, lambda task, now: Text(_moment(task, now, short_span)))
_TRIES = _Column("TRIES", 7, lambda task, _: Text(tries(task) if task.attempts else "", "dim"))
_TENANT = _Column("TENANT", 12, lambda task, _: Text(plain(task.tenant_id or "")))
_OPTIONAL = (  # as many as there is room for, in this order
    _Column("QUEUE", 14, lambda task, _: Text(plain(task.queue or ""))),
    _Column("PRIORITY", 8, lambda task, _: Text(task.priority or "")),
    _TENANT,
)
_ERROR = _Column("ERROR", 40, lambda task, _: Text("" if task.error is None else _one_line(task.error), "red"))


class TaskTable:
    """A list of tasks in columns that fit the width, the same ones for every page.

    Of dead letters it says why they died instead of their status, in a line of its own if there is no room beside.
    """

    def __init__(self, width: int, first_page: Sequence[TaskView], *, is_dead_letters: bool = False) -> None:
        self._width = width
        self._is_uncut = width >= WIDTH_UNCUT
        ids = max((len(task.task_id) for task in first_page), default=_ID_WIDTH)
        self._id_width = max(4, ids if self._is_uncut else min(ids, _ID_WIDTH))
        fixed = (_WHEN, _TRIES) if is_dead_letters else (_STATUS, _WHEN)
        left = width - self._id_width - sum(_GAP + column.width for column in fixed)
        kind = _type_column(first_page, left - _GAP, self._is_uncut)
        left -= _GAP + kind.width
        optional = [column for column in _OPTIONAL if column is not _TENANT or _has_tenants(first_page)]
        wanted = (_ERROR, *optional) if is_dead_letters else (_TRIES, *optional, _ERROR)
        extra = list(_fitting(wanted, left))
        if _ERROR in extra:  # the longest one goes last, and takes what is left
            extra.remove(_ERROR)
            extra.append(_ERROR)
        self._columns = (fixed[0], kind, *fixed[1:], *extra) if not is_dead_letters else (kind, *fixed, *extra)
        self._has_errors_below = is_dead_letters and _ERROR not in extra

    def header(self) -> Text:
        """The names of the columns."""
        cells = [self._fitted(Text(column.header), column.width) for column in self._columns]
        return self._row("TASK", cells, "dim")

    def rows(self, tasks: Iterable[TaskView], now: int) -> Iterable[Text]:
        """The lines of a page."""
        for task in tasks:
            cells = [self._fitted(column.cell(task, now), column.width) for column in self._columns]
            yield self._row(plain(task.task_id), cells, "")
            if self._has_errors_below and task.error is not None:
                yield self._cut(Text(f"  {_one_line(task.error)}", "red"))

    def _row(self, task_id: str, cells: Sequence[Text], style: str) -> Text:
        # An id is never cut, for it is copied: one that is too long has a line of its own.
        first = task_id.ljust(self._id_width)
        if len(task_id) > self._id_width:
            first = f"{task_id}\n{'':{self._id_width}}"
        row = Text(first, style=style)
        for cell in cells:
            row.append(" " * _GAP).append_text(cell)
        row.rstrip()
        return row if "\n" in first else self._cut(row)

    def _fitted(self, cell: Text, width: int) -> Text:
        if self._is_uncut:
            cell.pad_right(max(0, width - cell.cell_len))
        elif cell.cell_len != width and width < _ERROR.width:
            cell.truncate(width, overflow="ellipsis", pad=True)
        return cell

    def _cut(self, line: Text) -> Text:
        if not self._is_uncut:
            line.truncate(self._width, overflow="ellipsis")
        return line


def _type_column(tasks: Sequence[TaskView], room: int, is_uncut: bool) -> _Column:
    longest = max(4, max((len(task.task_type or "") for task in tasks), default=4))
    width = longest if is_uncut else min(longest, max(_TYPE_WIDTH_MIN, min(_TYPE_WIDTH_MAX, room)))

    def cell(task: TaskView, _: int) -> Text:
        name = plain(task.task_type or "")  # the end of a dotted name tells more than its beginning
        return Text(name if is_uncut or len(name) <= width else f"…{name[len(name) - width + 1 :]}")

    return _Column("TYPE", width, cell)


def _fitting(columns: Iterable[_Column], room: int) -> Iterable[_Column]:
    for column in columns:
        if room < column.width + _GAP:
            return
        room -= column.width + _GAP
        yield column


def _has_tenants(tasks: Sequence[TaskView]) -> bool:
    return any(task.tenant_id not in (None, "default") for task in tasks)


def _one_line(error: ErrorView) -> str:
    return " ".join(error_line(error).split())
