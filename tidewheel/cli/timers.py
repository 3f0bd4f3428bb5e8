"""`tidewheel timers`: what waits for its time, by level of the delay wheel and by hours ahead, and how late it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import httpx
import msgspec
import typer
from rich.text import Text

from scheduler.instants import parse_instant
from scheduler.timer_report import LatenessView, TimersView, WindowView, sum_of_timers
from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.client import LOCAL, client_settings, unreachable
from tidewheel.cli.edge import CommandError, Exit, print_json
from tidewheel.terminal import about, console, local_time, plain, relative, show, span

TIMEOUT_S = 10.0
BAR_WIDTH = 32
PATHS = ("/api/v1/timers", "/timers")  # of an API in whose process there are shards; of the health port of a scheduler
HOUR_US = 3_600_000_000
HOURS = (1, 2, 4, 8, 16, 24, 48, 96, 192, 384, 768)  # bounds of what is counted together

Servers = Annotated[
    list[str],
    typer.Option(
        "--server",
        envvar="TIDEWHEEL_SERVER",
        metavar="URL",
        help="An API with shards in its process, or the health port of a scheduler. Repeatable: they are added up.",
    ),
]
Windows = Annotated[bool, typer.Option("--windows", help="Each window of each level.")]


class Row(NamedTuple):
    """A line with a bar."""

    label: str
    tasks: int
    remark: str = ""


def timers(
    server: Servers = [LOCAL],  # noqa: B006 - never changed; the form that Typer knows
    windows: Windows = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show what waits for its time, when the next is due, and how late the last ones were.

    Of a cluster name the health port of each scheduler: --server http://HOST:PORT, once for each.
    """
    view = sum_of_timers([_read(client_settings(url).server) for url in server])
    if json:
        print_json(view)
    else:
        show(console(), *_lines(view, is_each=windows))
    return Exit.OK


def _read(url: str) -> TimersView:
    try:
        for path in PATHS:
            answer = httpx.get(url + path, timeout=TIMEOUT_S)
            if answer.is_success:
                return msgspec.json.decode(answer.content, type=TimersView)
            if answer.status_code != httpx.codes.NOT_FOUND:
                break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(f"no answer from {url} ({str(error) or type(error).__name__})") from error
    except msgspec.MsgspecError as error:
        raise unreachable(f"what answers at {url} is no tidewheel of this release") from error
    hint = "name the health port of each scheduler with --server"
    raise CommandError(f"{url} has no shards: it answered {answer.status_code}", kind="no-shards", hint=hint)


# --- what is shown ----------------------------------------------------------------------------------------------------


def _lines(view: TimersView, *, is_each: bool) -> Iterable[Text]:
    now = parse_instant(view.read_at)
    yield from _facts(view, now)
    if view.waiting:
        yield Text()
        yield from _bars("WHERE", _by_level(view.windows, now))
        yield Text()
        rows = [_window_row(one, now) for one in view.windows] if is_each else _by_hours(view.windows, now)
        yield from _bars("WINDOW" if is_each else "DUE", rows)


def _facts(view: TimersView, now: int) -> Iterable[Text]:
    shards = "1 shard" if view.shards == 1 else f"{view.shards:,} shards"
    yield _fact("waiting", f"about {view.waiting:,}, in {shards}")
    if view.overdue:
        yield _fact("overdue", f"{view.overdue:,} in memory are due and not released yet", "yellow")
    yield _fact("next due", _moment(view.next_release_at, now, "nothing in memory"))
    yield _fact("next slot", _moment(view.next_slot_at, now, "no shard is loaded here"))
    yield _fact("lateness", _lateness(view.releases, "released"))
    fires = f"; {_lateness(view.fires, 'fired')}" if view.fires.count else ""
    yield _fact("schedules", f"{view.schedules:,}{fires}")


def _fact(name: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<11}", "dim"), (plain(text), style))


def _moment(instant: str | None, now: int, otherwise: str) -> str:
    return otherwise if instant is None else f"{relative(instant, now)}, at {local_time(instant)}"


def _lateness(view: LatenessView, what: str) -> str:
    if view.p50_ms is None or view.p99_ms is None or view.max_ms is None:
        return f"none {what} yet"
    p50, p99, most = (
        f"{value:.1f} ms" if value < 100 else span(round(value * 1_000))
        for value in (view.p50_ms, view.p99_ms, view.max_ms)
    )
    return f"p50 {p50}, p99 {p99}, at most {most}, of the last {view.count:,} {what}"


def _by_level(windows: Sequence[WindowView], now: int) -> Iterable[Row]:
    levels: dict[int | None, list[WindowView]] = {}
    for one in windows:
        levels.setdefault(one.level, []).append(one)
    for level, found in levels.items():
        last = max(one.ends_at for one in found)
        yield Row(_level(level), sum(one.tasks for one in found), f"the last {_ahead(last, now)}")


def _by_hours(windows: Sequence[WindowView], now: int) -> Iterable[Row]:
    """By when their windows begin: a window may last longer than what is counted together."""
    counts = [0] * (len(HOURS) + 1)
    for one in windows:
        ahead = parse_instant(one.begins_at) - now
        counts[next((number for number, hours in enumerate(HOURS) if ahead < hours * HOUR_US), len(HOURS))] += one.tasks
    labels = [
        f"in {low}-{high} h" if high <= 24 else f"in {low // 24}-{high // 24} d"
        for low, high in zip((0, *HOURS), HOURS, strict=False)
    ] + [f"after {HOURS[-1] // 24} d"]
    last = max((number for number, count in enumerate(counts) if count), default=-1)
    return [Row(label, count) for label, count in zip(labels, counts, strict=True)][: last + 1]


def _window_row(one: WindowView, now: int) -> Row:
    width = parse_instant(one.ends_at) - parse_instant(one.begins_at)
    return Row(f"{_level(one.level)}  {_ahead(one.begins_at, now)}", one.tasks, f"lasts {about(width)}")


def _level(level: int | None) -> str:
    return "memory " if level is None else f"level {level}"


def _ahead(instant: str, now: int) -> str:
    return relative(instant, now)


def _bars(header: str, rows: Iterable[Row]) -> Iterable[Text]:
    rows = list(rows)
    most = max((row.tasks for row in rows), default=0)
    width = max((len(row.label) for row in rows), default=0)
    digits = max((len(f"{row.tasks:,}") for row in rows), default=0)
    yield Text(f"{header:<{max(width, len(header))}}  {'TASKS':>{max(5, digits)}}", style="dim")
    for row in rows:
        bar = "█" * (-(-row.tasks * BAR_WIDTH // most) if most else 0)
        remark = f"  {row.remark}" if row.remark else ""
        yield Text.assemble(
            f"{row.label:<{max(width, len(header))}}  {row.tasks:>{max(5, digits)},}  ", (bar, "cyan"), (remark, "dim")
        )
