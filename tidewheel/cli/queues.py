"""The commands for queues and tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from scheduler.core.policies import WEIGHT_MAX
from scheduler.queue_service import QueueView, TenantView
from schemas.ids import NAME_RULE, is_name
from tidewheel.cli.arguments import Debug, Json, Server, seconds
from tidewheel.cli.client import LOCAL, connected_to
from tidewheel.cli.edge import Exit, note, print_json, usage
from tidewheel.cli.lazy import group
from tidewheel.cli.listing import each, now_us
from tidewheel.terminal import console, plain, relative, show

DEFAULT = "default"  # takes a word back
WIDE = 110  # columns from which on more is shown
Names = Annotated[list[str], typer.Argument(metavar="QUEUE…", show_default=False)]


def list_queues(server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Show what waits and runs in each queue, and which are paused."""
    with connected_to(server) as connected:
        found = connected.ask(connected.backend.queues.queues())
    if json:
        print_json(found)
        return Exit.OK
    if found.queues:
        out = console()
        show(out, _queue_table(found.queues, out.width))
        _tell_reasons(found.queues)
    else:
        note("nothing waits or runs, and no queue is paused")
    _tell_missing(found.shards_heard, found.shards)
    return Exit.OK


def pause(
    queues: Names,
    reason: Annotated[str | None, typer.Option(help="Shown to whoever looks at the queue.")] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Let tasks of queues wait until they are resumed. What runs goes on."""
    with connected_to(server) as connected:
        act = connected.backend.queues.pause
        return each(queues, lambda name: connected.ask(act(name, reason=reason)), _line, json, checked=_queue_name)


def resume(queues: Names, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Let tasks of queues go out again."""
    with connected_to(server) as connected:
        act = connected.backend.queues.resume
        return each(queues, lambda name: connected.ask(act(name)), _line, json, checked=_queue_name)


def list_tenants(server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Show what waits and runs of each tenant, and its share of the starts."""
    with connected_to(server) as connected:
        found = connected.ask(connected.backend.queues.tenants())
    if json:
        print_json(found)
        return Exit.OK
    if found.tenants:
        show(console(), _tenant_table(found.tenants))
    else:
        note("nothing waits or runs, and no tenant has a weight")
    _tell_missing(found.shards_heard, found.shards)
    return Exit.OK


def set_tenant(
    tenant_id: Annotated[str, typer.Argument(metavar="TENANT", show_default=False)],
    weight: Annotated[
        str | None, typer.Option(metavar="N", help=f"Its share, from 1 to {WEIGHT_MAX:,}; 1 by default.")
    ] = None,
    submits_per_s: Annotated[
        str | None, typer.Option("--submits-per-s", metavar="N", help="Submissions a second, over ten seconds.")
    ] = None,
    pending_max: Annotated[str | None, typer.Option(metavar="N", help="How many of its tasks may wait.")] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Let a tenant have another share of the starts, or other bounds. `default` takes a word back."""
    fields = _fields(
        {"--weight": weight, "--submits-per-s": submits_per_s, "--pending-max": pending_max},
    )
    with connected_to(server) as connected:
        found = connected.ask(connected.backend.queues.set_tenant(tenant_id, fields))
    if json:
        print_json(found)
    else:
        bounds = f"submits/s {_bound(found.submits_per_s)}, waiting {_bound(found.pending_max)}"
        show(console(), Text(f"✔ {plain(found.tenant_id)}: weight {found.weight:,}, {bounds}"))
    return Exit.OK


def set_queue(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", show_default=False)],
    pending_max: Annotated[str | None, typer.Option(metavar="N", help="How many of its tasks may wait.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="high|medium|low", help="Of tasks that name none.", show_default=False)
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Of an attempt of tasks that name none.")
    ] = None,
    total_timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="The same of a whole task.")] = None,
    max_attempts: Annotated[str | None, typer.Option(metavar="N", help="The same for attempts.")] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Make a queue known, or let other bounds or defaults hold for it. `default` takes a word back."""
    fields: dict[str, Any] = dict(_fields({"--pending-max": pending_max})) if pending_max is not None else {}
    defaults: dict[str, Any] = {
        "priority": priority,
        "timeout_seconds": timeout if timeout in (None, DEFAULT) else seconds("--timeout", timeout),
        "total_timeout_seconds": (
            total_timeout if total_timeout in (None, DEFAULT) else seconds("--total-timeout", total_timeout)
        ),
    }
    defaults = {name: None if value == DEFAULT else value for name, value in defaults.items() if value is not None}
    if max_attempts is not None:
        defaults |= _fields({"--max-attempts": max_attempts})
    if defaults:
        fields["defaults"] = defaults
    with connected_to(server) as connected:
        found = connected.ask(connected.backend.queues.set_queue(_queue_name(queue), fields))
    if json:
        print_json(found)
    else:
        show(console(), Text(f"✔ {plain(found.queue)}: waiting {_bound(found.pending_max)}{_defaults(found)}"))
    return Exit.OK


def _defaults(view: QueueView) -> str:
    """What holds for tasks that do not say it themselves."""
    given = view.defaults
    parts = {
        "priority": given.priority,
        "timeout": None if given.timeout_seconds is None else f"{given.timeout_seconds:g} s",
        "total timeout": None if given.total_timeout_seconds is None else f"{given.total_timeout_seconds:g} s",
        "attempts": given.max_attempts,
    }
    told = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f"; by default {told}" if told else ""


def drain(queues: Names, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Let queues take no new tasks; those that they have go on."""
    return _set_drained(queues, server, json, is_drained=True)


def open_again(queues: Names, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Let queues that were drained take new tasks again."""
    return _set_drained(queues, server, json, is_drained=False)


def _set_drained(queues: Sequence[str], server: str, json: bool, *, is_drained: bool) -> int:
    with connected_to(server) as connected:
        act = connected.backend.queues.set_queue
        fields = {"is_drained": is_drained}
        return each(queues, lambda name: connected.ask(act(name, fields)), _line, json, checked=_queue_name)


def purge(
    queue: Annotated[str, typer.Argument(metavar="QUEUE", show_default=False)],
    confirm: Annotated[str, typer.Option(metavar="QUEUE", help="Its name once more.", show_default=False)],
    reason: Annotated[str | None, typer.Option(help="Shown with each of its tasks.")] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Cancel all tasks of a queue that wait. What runs goes on."""
    if confirm != _queue_name(queue):
        raise usage("--confirm", f"{confirm!r} is not the name of the queue", queue)
    with connected_to(server) as connected:
        done = connected.ask(connected.backend.purge(queue, confirmed=confirm, reason=reason))
    if json:
        print_json(done)
        return Exit.OK
    skipped = f", {done.skipped:,} had changed meanwhile" if done.skipped else ""
    show(console(), Text(f"✔ cancelled in {plain(queue)}: {done.cancelled:,}{skipped}"))
    if not done.is_complete:
        note("→ there may be more: run it once more")
    return Exit.OK


def _fields(options: Mapping[str, str | None]) -> dict[str, int | None]:
    """Fields by name from options that are numbers, or the word `default`."""
    fields: dict[str, int | None] = {}
    for option, text in options.items():
        if text is None:
            continue
        if text != DEFAULT and not text.isdecimal():
            raise usage(option, f"{text!r} is no number", "a whole number, or default")
        fields[option.removeprefix("--").replace("-", "_")] = None if text == DEFAULT else int(text)
    if not fields:
        raise usage(next(iter(options)), "is missing", f"at least one of {', '.join(options)}")
    return fields


def _bound(value: int | None) -> str:
    return "as the settings say" if value is None else f"at most {value:,}"


def _queue_name(name: str) -> str:
    if not is_name(name):
        raise usage("QUEUE", "is not accepted", NAME_RULE)
    return name


def _state(view: QueueView) -> Text:
    """What holds it up, if anything does."""
    holds = {"‖ paused": view.is_paused, "◌ drained": view.is_drained, "▲ crowded": view.is_crowded}
    held = [text for text, is_so in holds.items() if is_so]
    return Text(", ".join(held), "yellow") if held else Text("● open", "green")


def _line(view: QueueView) -> Text:
    counts = f"  {view.pending:,} wait, {view.running:,} run"
    return Text.assemble(_state(view), f"  {plain(view.queue)}", (counts, "dim"))


def _queue_table(queues: Sequence[QueueView], width: int) -> Table:
    """`SOON` are due within a minute, `AFTER` is how long those waited that started in the last second."""
    is_wide = width >= WIDE
    more = ("SOON", "AFTER") if is_wide else ()
    table = _table("QUEUE", "", "WAIT", "LIMITED", "RUN", "STARTS/S", *more, "OLDEST", "HIGH/MEDIUM/LOW")
    now = now_us()
    for one in queues:
        by_priority = " / ".join(f"{each.pending:,}" for each in one.priorities)
        oldest = "" if one.oldest_at is None else relative(one.oldest_at, now)
        counts = (f"{one.pending:,}", f"{one.throttled:,}", f"{one.running:,}", f"{one.started_per_s:,.1f}")
        after = "" if one.waited_ms is None else f"{one.waited_ms:,.0f} ms"
        more = (f"{one.due_soon:,}", after) if is_wide else ()
        table.add_row(plain(one.queue), _state(one), *counts, *more, oldest, by_priority)
    return table


def _tell_reasons(queues: Sequence[QueueView]) -> None:
    """Why queues are paused: below the table, where there is room for a sentence."""
    for one in queues:
        if one.is_paused and one.pause_reason:
            note(f"→ {plain(one.queue)} is paused: {plain(one.pause_reason)}")


def _tenant_table(tenants: Sequence[TenantView]) -> Table:
    table = _table("TENANT", "WEIGHT", "WAIT", "RUN", "STARTS/S", "SUBMITS/S", "MAY WAIT")
    for one in tenants:
        counts = (f"{one.weight:,}", f"{one.pending:,}", f"{one.running:,}", f"{one.started_per_s:,.1f}")
        bounds = ("" if bound is None else f"≤ {bound:,}" for bound in (one.submits_per_s, one.pending_max))
        table.add_row(plain(one.tenant_id), *counts, *bounds)
    return table


def _table(name: str, *headers: str) -> Table:
    """In a narrow terminal the names are folded; figures are never cut."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(name, overflow="fold", min_width=12)
    for header in headers:
        is_number = header in ("WEIGHT", "WAIT", "LIMITED", "SOON", "RUN", "AFTER", "STARTS/S", "SUBMITS/S", "MAY WAIT")
        is_whole = header != ""
        table.add_column(
            header,
            justify="right" if is_number else "left",
            no_wrap=is_whole,
            min_width=len(header) if is_whole else len("◌ drained"),
        )
    return table


def _tell_missing(heard: int, shards: int) -> None:
    if heard < shards:
        note(f"→ counts of {heard} of {shards} shards: the others were not heard of lately")


queues = group(
    "Queues: what waits and runs in them; pause and resume them.",
    {
        "list": list_queues,
        "set": set_queue,
        "pause": pause,
        "resume": resume,
        "drain": drain,
        "open": open_again,
        "purge": purge,
    },
)
tenants = group("Tenants: what waits and runs of them, and their shares.", {"list": list_tenants, "set": set_tenant})
