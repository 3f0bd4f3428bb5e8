"""The commands for schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from scheduler.instants import parse_instant
from scheduler.ports import ScheduleFilter
from scheduler.refusals import RefusalKind
from scheduler.schedule_submission import PREVIEW_DEFAULT, named_schedule_id
from scheduler.schedule_view import RunView, ScheduleList, ScheduleStatus, ScheduleView
from schemas.ids import NAME_RULE, is_name
from tidewheel.backend import Doable
from tidewheel.cli.apps import AppToLoad, show_report, synced
from tidewheel.cli.arguments import (
    All,
    Cursor,
    Debug,
    Json,
    Limit,
    Server,
    instant,
    metadata_of,
    payload_of,
    seconds,
)
from tidewheel.cli.client import LOCAL, Client, connected_to
from tidewheel.cli.edge import CommandError, Exit, note, print_json, usage
from tidewheel.cli.lazy import group
from tidewheel.cli.listing import check_limit, each, now_us, pages_of
from tidewheel.terminal import Look, about, console, local_time, plain, relative, show, status_text

T = TypeVar("T")

RUNS_SHOWN = 5
DEFAULT_TENANT = "default"
_LOOKS = {
    ScheduleStatus.ACTIVE: Look("●", "green"),
    ScheduleStatus.PAUSED: Look("‖", "yellow"),
    ScheduleStatus.ENDED: Look("◌", "dim"),
    ScheduleStatus.FLAGGED: Look("✘", "red"),
}
_HINTS = {
    RefusalKind.NOT_FOUND: "tidewheel cron list shows the schedules there are",
    RefusalKind.CONFLICT: "change it with tidewheel cron update, or choose another name",
    RefusalKind.WRONG_STATUS: "look how it stands: tidewheel cron show",
    RefusalKind.VERSION_MISMATCH: "look what became of it: tidewheel cron show",
    RefusalKind.UNDECIDED: "it may have happened or not: look with tidewheel cron show before you try again",
}

Id = Annotated[str, typer.Argument(metavar="CRON_ID", help="Its id or its name.", show_default=False)]
Ids = Annotated[list[str], typer.Argument(metavar="CRON_ID…", help="Their ids or names.", show_default=False)]
Tenant = Annotated[str, typer.Option(help="Whose it is, if it is named by its name.")]
Cron = Annotated[str | None, typer.Option("--cron", metavar="EXPRESSION", help="For example '0 9 * * MON-FRI'.")]
Every = Annotated[str | None, typer.Option(metavar="DURATION", help="In place of --cron: so often.")]
On = Annotated[list[str] | None, typer.Option(metavar="INSTANT", help="In place of --cron: then. Repeatable.")]
Zone = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="For example Europe/Paris; UTC by default.")]
Gap = Annotated[str | None, typer.Option(metavar="once|shift|skip", help="Of times that no clock shows.")]
Fold = Annotated[str | None, typer.Option(metavar="first|second|both", help="Of times that clocks show twice.")]
From = Annotated[str | None, typer.Option("--from", metavar="INSTANT", help="No nominal time before.")]
Until = Annotated[str | None, typer.Option(metavar="INSTANT", help="No nominal time from then on.")]
Queue = Annotated[str | None, typer.Option()]
Priority = Annotated[str | None, typer.Option(metavar="high|medium|low")]
Retries = Annotated[int | None, typer.Option(metavar="N", help="Attempts after the first.")]
Timeout = Annotated[str | None, typer.Option(metavar="DURATION", help="Of one attempt.")]
Overlap = Annotated[
    str | None, typer.Option(metavar="skip|queue|cancel_running|allow", help="When the run before is not over.")
]
Misfire = Annotated[str | None, typer.Option(metavar="none|latest|all", help="Of times that were missed.")]
MisfireMax = Annotated[int | None, typer.Option(metavar="N", help="With --misfire all: at most so many.")]
Lateness = Annotated[str | None, typer.Option(metavar="DURATION", help="What was missed longer ago never runs.")]
Jitter = Annotated[str | None, typer.Option(metavar="DURATION", help="Runs are due up to so much later.")]


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    task_type: Annotated[str, typer.Argument(metavar="TASK_TYPE", show_default=False)],
    payload: Annotated[str | None, typer.Argument(metavar="PAYLOAD", help="JSON; - reads it from stdin.")] = None,
    cron: Cron = None,
    every: Every = None,
    on: On = None,
    tz: Zone = None,
    overlap: Overlap = None,
    misfire: Misfire = None,
    misfire_max: MisfireMax = None,
    max_lateness: Lateness = None,
    jitter: Jitter = None,
    gap: Gap = None,
    fold: Fold = None,
    start: From = None,
    until: Until = None,
    queue: Queue = None,
    priority: Priority = None,
    max_retries: Retries = None,
    timeout: Timeout = None,
    paused: Annotated[bool, typer.Option("--paused", help="It fires once it is resumed.")] = False,
    cron_id: Annotated[str | None, typer.Option("--id", help="Its id; by default made of tenant and name.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose it is.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be given again.")] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Make a schedule that submits a task again and again. The same command twice makes one."""
    fields = {
        "name": name,
        "task_type": task_type,
        "payload": payload_of(payload),
        "cron_id": cron_id,
        "enabled": False if paused else None,
        "metadata": metadata_of(metadata or (), tenant) or None,
        **_rule(cron, every, on, tz, gap, fold, start, until),
        **_policies(overlap, misfire, misfire_max, max_lateness, jitter),
        **_task(queue, priority, max_retries, timeout),
    }
    with connected_to(server) as connected:
        made = _ask(connected, connected.backend.schedules.create(_given(fields)))
    if json:
        print_json(made)
        return Exit.OK
    show(console(), Text.assemble(("✔ scheduled ", "green"), (made.cron_id, "bold"), "  ", _status_text(made.status)))
    if made.next_fire_time is not None:
        note(f"→ fires next {local_time(made.next_fire_time)}, {relative(made.next_fire_time, now_us())}")
    elif made.status is ScheduleStatus.ENDED:
        note("→ it never fires: its rule has no nominal time from now on; change that with tidewheel cron update")
    return Exit.OK


def update(
    cron_id: Id,
    payload: Annotated[str | None, typer.Option(metavar="JSON", help="What the handler is given.")] = None,
    task_type: Annotated[str | None, typer.Option("--type", help="The task type.")] = None,
    cron: Cron = None,
    every: Every = None,
    on: On = None,
    tz: Zone = None,
    overlap: Overlap = None,
    misfire: Misfire = None,
    misfire_max: MisfireMax = None,
    max_lateness: Lateness = None,
    jitter: Jitter = None,
    gap: Gap = None,
    fold: Fold = None,
    start: From = None,
    until: Until = None,
    queue: Queue = None,
    priority: Priority = None,
    max_retries: Retries = None,
    timeout: Timeout = None,
    expected_version: Annotated[int | None, typer.Option(metavar="N", help="Refuse if it has another one.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Change a schedule; what is not named stays. Nominal times up to now count as decided."""
    fields = {
        "task_type": task_type,
        "payload": payload_of(payload),
        **_rule(cron, every, on, tz, gap, fold, start, until),
        **_policies(overlap, misfire, misfire_max, max_lateness, jitter),
        **_task(queue, priority, max_retries, timeout),
    }
    if not _given(fields):
        raise usage("OPTIONS", "name nothing to change", "what is to change, for example --cron '0 9 * * *'")
    fields["expected_version"] = expected_version
    with connected_to(server) as connected:
        act = connected.backend.schedules.update
        changed = _ask_of(connected, _id_of(cron_id), tenant, lambda i: act(i, _given(fields)))
    _show_one(changed, (), json)
    return Exit.OK


def list_schedules(
    tenant: Annotated[str | None, typer.Option()] = None,
    paused: Annotated[
        bool | None, typer.Option("--paused/--not-paused", help="Only those that are, or are not.")
    ] = None,
    declared_by: Annotated[str | None, typer.Option(metavar="APP", help="Only those that this app declared.")] = None,
    limit: Limit = None,
    cursor: Cursor = None,
    every: All = False,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List schedules."""
    check_limit(limit, every)
    wanted = ScheduleFilter(tenant_id=tenant, is_paused=paused, declared_by=declared_by)
    with connected_to(server) as connected:
        schedules = connected.backend.schedules
        pages = list(
            pages_of(
                lambda size, at: _ask(connected, schedules.list_schedules(wanted, limit=size, cursor=at)),
                limit,
                cursor,
                every,
            )
        )
    found = [one for page in pages for one in page.schedules]
    if json:
        print_json(ScheduleList(schedules=found, cursor=pages[-1].cursor))
    elif not found:
        note("no schedules" if wanted == ScheduleFilter() else "no schedules that match")
    else:
        show(console(), _table(found))
        if pages[-1].cursor is not None:
            note(f"→ more with --all, or with --cursor {pages[-1].cursor}")
    return Exit.OK


def show_schedule(
    cron_id: Id, tenant: Tenant = DEFAULT_TENANT, server: Server = LOCAL, json: Json = False, debug: Debug = False
) -> int:
    """Show a schedule: its rule, when it fires next, what it did."""
    with connected_to(server) as connected:
        schedules = connected.backend.schedules
        found = _ask_of(connected, _id_of(cron_id), tenant, schedules.get)
        runs = () if json else _ask(connected, schedules.runs(found.cron_id, limit=RUNS_SHOWN)).runs
    _show_one(found, runs, json)
    return Exit.OK


def pause(
    cron_ids: Ids,
    reason: Annotated[str | None, typer.Option(help="Kept with the schedule.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Let schedules fire no more until they are resumed."""
    with connected_to(server) as connected:
        act = connected.backend.schedules.pause
        return _each(connected, cron_ids, tenant, lambda i: act(i, reason=reason), _line, json)


def resume(
    cron_ids: Ids, tenant: Tenant = DEFAULT_TENANT, server: Server = LOCAL, json: Json = False, debug: Debug = False
) -> int:
    """Let schedules fire again; what was missed is decided by their misfire policies."""
    with connected_to(server) as connected:
        return _each(connected, cron_ids, tenant, connected.backend.schedules.resume, _line, json)


def delete(
    cron_ids: Ids, tenant: Tenant = DEFAULT_TENANT, server: Server = LOCAL, json: Json = False, debug: Debug = False
) -> int:
    """Make an end of schedules; their runs go on."""
    with connected_to(server) as connected:

        def act(meant: str) -> dict[str, str]:
            _ask_of(connected, meant, tenant, connected.backend.schedules.delete)
            return {"cron_id": meant}

        return each(cron_ids, act, lambda done: Text(f"✔ deleted  {done['cron_id']}"), json, checked=_id_of)


def trigger(
    cron_ids: Ids, tenant: Tenant = DEFAULT_TENANT, server: Server = LOCAL, json: Json = False, debug: Debug = False
) -> int:
    """Run schedules now, beside their nominal times."""
    with connected_to(server) as connected:
        act = connected.backend.schedules.trigger
        return _each(connected, cron_ids, tenant, act, lambda run: Text(f"✔ triggered  {run.task_id}"), json)


def backfill(
    cron_id: Id,
    first: Annotated[str, typer.Option("--from", metavar="INSTANT", help="The first instant of the range.")],
    last: Annotated[str, typer.Option("--to", metavar="INSTANT", help="Its last one.")],
    most: Annotated[int, typer.Option("--max", metavar="N", help="More runs than this are refused.")] = 100,
    tenant: Tenant = DEFAULT_TENANT,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run those nominal times of a range that have no run. Repeated, it runs nothing twice."""
    fields = {"from": instant("--from", first), "to": instant("--to", last), "max": most}
    with connected_to(server) as connected:
        act = connected.backend.schedules.backfill
        done = _ask_of(connected, _id_of(cron_id), tenant, lambda i: act(i, fields))
    if json:
        print_json(done)
    elif not done.runs:
        note("every nominal time of the range has its run")
    else:
        show(console(), *(Text(f"✔ submitted  {task_id}") for task_id in done.runs))
    return Exit.OK


def preview(
    cron: Annotated[str | None, typer.Argument(metavar="EXPRESSION", show_default=False)] = None,
    every: Every = None,
    on: On = None,
    tz: Zone = None,
    gap: Gap = None,
    fold: Fold = None,
    after: Annotated[str | None, typer.Option(metavar="INSTANT", help="Times later than this; now by default.")] = None,
    count: Annotated[int, typer.Option(metavar="N", help="How many.")] = PREVIEW_DEFAULT,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show when a rule would fire. Nothing is made."""
    fields = {**_rule(cron, every, on, tz, gap, fold, None, None), "start": instant("--after", after), "count": count}
    with connected_to(server) as connected:
        found = _ask(connected, connected.backend.schedules.preview(_given(fields)))
    if json:
        print_json(found)
        return Exit.OK
    if not found.next:
        note("it never fires")
    now = now_us()
    show(
        console(),
        *(Text.assemble(time, (f"  {local_time(time)}  {relative(time, now)}", "dim")) for time in found.next),
    )
    return Exit.OK


def sync(
    app: AppToLoad,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Make and change schedules so that they are as an application declares them. None is deleted."""
    report = synced(app, server, lambda loaded: loaded.schedules.sync())
    show_report(report, is_json=json)
    if report.gone and not json:
        note("→ those that are gone from the code still fire; tidewheel cron delete ends them")
    return Exit.OK


# --- fields -----------------------------------------------------------------------------------------------------------


def _rule(
    cron: str | None,
    every: str | None,
    on: Sequence[str] | None,
    tz: str | None,
    gap: str | None,
    fold: str | None,
    start: str | None,
    until: str | None,
) -> dict[str, Any]:
    return {
        "cron_expression": cron,
        "every_seconds": seconds("--every", every),
        "calendar": [instant("--on", at) for at in on or ()] or None,
        "timezone": tz,
        "gap_policy": gap,
        "fold_policy": fold,
        "start_at": instant("--from", start),
        "end_at": instant("--until", until),
    }


def _policies(
    overlap: str | None, misfire: str | None, misfire_max: int | None, max_lateness: str | None, jitter: str | None
) -> dict[str, Any]:
    return {
        "overlap_policy": overlap,
        "misfire_policy": misfire,
        "misfire_max": misfire_max,
        "max_lateness_seconds": seconds("--max-lateness", max_lateness),
        "jitter_seconds": seconds("--jitter", jitter),
    }


def _task(queue: str | None, priority: str | None, max_retries: int | None, timeout: str | None) -> dict[str, Any]:
    return {
        "queue": queue,
        "priority": priority,
        "max_retries": max_retries,
        "timeout_seconds": seconds("--timeout", timeout),
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _id_of(text: str) -> str:
    if not is_name(text):
        raise usage("CRON_ID", f"{text!r} cannot be the id or name of a schedule", NAME_RULE)
    return text


def _ask(server: Client, operation: Doable[T]) -> T:
    try:
        return server.ask(operation)
    except CommandError as error:
        for kind, hint in _HINTS.items():
            if error.kind == kind:
                error.hint = hint
        raise


def _ask_of(server: Client, meant: str, tenant: str, operation: Callable[[str], Doable[T]]) -> T:
    """The answer of the schedule that has this id, or else this name in the tenant. Raises CommandError."""
    for schedule_id in (meant, named_schedule_id(tenant, meant)):
        try:
            return _ask(server, operation(schedule_id))
        except CommandError as error:
            if error.kind != RefusalKind.NOT_FOUND:
                raise
            refused = error
    refused.detail = f"no schedule has the id {meant!r}, and none in the tenant {tenant!r} has that name"
    raise refused


def _each(
    server: Client,
    meant: Sequence[str],
    tenant: str,
    operation: Callable[[str], Doable[T]],
    text: Callable[[T], Text],
    is_json: bool,
) -> int:
    return each(meant, lambda one: _ask_of(server, one, tenant, operation), text, is_json, checked=_id_of)


# --- how they are shown -----------------------------------------------------------------------------------------------


def _status_text(status: ScheduleStatus) -> Text:
    look = _LOOKS[status]
    return Text(f"{look.symbol} {status}", style=look.style)


def _line(schedule: ScheduleView) -> Text:
    return Text.assemble(_status_text(schedule.status), f"  {schedule.cron_id}  {plain(schedule.name)}")


def _rule_text(schedule: ScheduleView) -> str:
    if schedule.cron_expression is not None:
        zone = "" if schedule.timezone == "UTC" else f"  {schedule.timezone}"
        return plain(f"{schedule.cron_expression}{zone}")
    if schedule.every_seconds is not None:
        return f"every {about(round(schedule.every_seconds * 1_000_000))}"
    return f"{len(schedule.calendar or ())} instants"


def _table(found: Iterable[ScheduleView]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("SCHEDULE", no_wrap=True)
    for header in ("STATUS", "NAME", "RULE", "NEXT"):
        table.add_column(header, overflow="fold", no_wrap=header == "NEXT")
    now = now_us()
    for one in found:
        following = "-" if one.next_fire_time is None else relative(one.next_fire_time, now)
        table.add_row(one.cron_id, _status_text(one.status), plain(one.name), _rule_text(one), following)
    return table


def _show_one(schedule: ScheduleView, runs: Sequence[RunView], is_json: bool) -> None:
    if is_json:
        print_json(schedule)
        return
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for label, value in _facts(schedule):
        facts.add_row(f"  {label}", value)
    for run in runs:
        if run.status is None and parse_instant(run.nominal_time) < parse_instant(schedule.created_at):
            continue  # nobody could have expected that one
        status = Text("no run", "dim") if run.status is None else status_text(run.status)
        facts.add_row("  run", Text.assemble(run.nominal_time, "  ", status))
    headline = Text.assemble(_status_text(schedule.status), "  ", (plain(schedule.name), "bold"))
    show(console(), headline, Text(schedule.cron_id, style="bold"), Text(), facts)


def _facts(schedule: ScheduleView) -> Iterable[tuple[str, Text]]:
    counts = schedule.counts
    yield "rule", Text(_rule_text(schedule))
    yield "task", Text(plain(f"{schedule.task_type}  {bytes(schedule.payload).decode()}"))
    yield "queue", Text(plain(f"{schedule.queue} · {schedule.priority} priority · tenant {schedule.tenant_id}"))
    yield "overlap", Text(schedule.overlap_policy)
    yield "misfire", Text(schedule.misfire_policy)
    for label, time in (("next", schedule.next_fire_time), ("last", schedule.last_fire_time)):
        if time is not None:
            yield label, Text.assemble(local_time(time), (f"   {relative(time, now_us())}", "dim"))
    yield "fired", Text(f"{counts.fired:,}, {counts.skipped:,} skipped, {counts.missed:,} missed")
    if schedule.pause_reason:
        yield "reason", Text(plain(schedule.pause_reason))
    if schedule.problem:
        yield "problem", Text(plain(schedule.problem), "red")
    if schedule.declared_by:
        yield "declared", Text(plain(f"in the code of {schedule.declared_by}"))
    yield "version", Text(f"{schedule.version}, zones of {schedule.tzdata}")


cron = group(
    "Schedules: what runs again and again.",
    {
        "create": create,
        "list": list_schedules,
        "show": show_schedule,
        "update": update,
        "pause": pause,
        "resume": resume,
        "delete": delete,
        "trigger": trigger,
        "backfill": backfill,
        "preview": preview,
        "sync": sync,
    },
)
