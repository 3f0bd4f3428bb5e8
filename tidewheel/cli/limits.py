"""The commands for limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from scheduler.core.limit_keys import FIELDS_RULE
from scheduler.limit_service import LimitView
from scheduler.submission import without_none
from schemas.ids import NAME_RULE, is_name
from schemas.messages import LimitStrategy
from tidewheel.cli.apps import AppToLoad, show_report, synced
from tidewheel.cli.arguments import Debug, Json, Server, pairs_of, seconds
from tidewheel.cli.client import LOCAL, connected_to
from tidewheel.cli.edge import CommandError, Exit, note, print_json, usage
from tidewheel.cli.lazy import group
from tidewheel.terminal import console, plain, show

_HINT = "tidewheel limits list shows the limits there are"
Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


def list_limits(server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Show all limits."""
    with connected_to(server) as connected:
        found = connected.ask(connected.backend.limits.limits())
    if json:
        print_json(found)
    elif found.limits:
        show(console(), _table(found.limits))
    else:
        note("there are no limits")
    return Exit.OK


def show_limit(name: Name, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Show a limit, and what waits for it and is held of it by key."""
    with connected_to(server) as connected:
        try:
            found = connected.ask(connected.backend.limits.limit(_checked(name)))
        except CommandError as error:
            error.hint = _HINT
            raise
    if json:
        print_json(found)
        return Exit.OK
    show(console(), _table([found]))
    if found.keys:
        show(console(), Text(), _keys_table(found))
    else:
        note("nothing waits for it, and nothing of it is held")
    return Exit.OK


def set_limit(
    name: Name,
    count: Annotated[int, typer.Option("--count", metavar="N", help="So many.", show_default=False)],
    per: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Starts in this time; without it, attempts at a time.")
    ] = None,
    burst: Annotated[int | None, typer.Option(metavar="N", help="At once after a rest.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="TEMPLATE", help="For example '{tenant_id}': each has a limit of its own.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help=f"Of these tasks alone; fields are {FIELDS_RULE}.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="wait|cancel_oldest|reject", help="With one more than may run at a time.")
    ] = None,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Let a limit hold from now on, also for what waits already."""
    fields = without_none(
        {
            "count": count,
            "period_seconds": seconds("--per", per),
            "burst": burst,
            "key": key,
            "where": pairs_of("--where", where or ()) or None,
            "strategy": strategy,
        }
    )
    with connected_to(server) as connected:
        found = connected.ask(connected.backend.limits.set_limit(_checked(name), fields))
    if json:
        print_json(found)
    else:
        show(console(), Text(f"✔ {plain(found.name)}: {_rule(found)}"))
    return Exit.OK


def remove(name: Name, server: Server = LOCAL, json: Json = False, debug: Debug = False) -> int:
    """Let a limit hold no more."""
    with connected_to(server) as connected:
        try:
            connected.ask(connected.backend.limits.remove_limit(_checked(name)))
        except CommandError as error:
            error.hint = _HINT
            raise
    if not json:
        show(console(), Text(f"✔ {plain(name)} holds no more"))
    return Exit.OK


def sync(
    app: AppToLoad,
    server: Server = LOCAL,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Let limits hold as an application declares them. None is removed."""
    show_report(synced(app, server, lambda loaded: loaded.limits.sync()), is_json=json)
    return Exit.OK


def _checked(name: str) -> str:
    if not is_name(name):
        raise usage("NAME", "is not accepted", NAME_RULE)
    return name


def _rule(limit: LimitView) -> str:
    if limit.period_seconds is None:
        strategy = "" if limit.strategy is LimitStrategy.WAIT else f", then {limit.strategy}"
        return f"{limit.count:,} at a time{strategy}"
    return f"{limit.count:,} in {limit.period_seconds:g} s, at most {limit.burst:,} at once"


def _table(limits: Sequence[LimitView]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("LIMIT", "ALLOWS", "FOR EACH", "OF"):
        table.add_column(header, overflow="fold")
    _add_counts(table)
    for one in limits:
        where = ", ".join(f"{field}={value}" for field, value in one.where.items()) or "all tasks"
        counts = (f"{one.waiting:,}", f"{one.held:,}")
        table.add_row(plain(one.name), _rule(one), plain(one.key), plain(where), *counts)
    return table


def _keys_table(limit: LimitView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("KEY", overflow="fold")
    _add_counts(table)
    for one in limit.keys:
        table.add_row(plain(one.key) or "(all together)", f"{one.waiting:,}", f"{one.held:,}")
    return table


def _add_counts(table: Table) -> None:
    for header in ("WAIT", "HELD"):
        table.add_column(header, justify="right", no_wrap=True, min_width=len(header))


limits = group(
    "Limits: how many attempts may start in a time, or run at a time.",
    {"list": list_limits, "show": show_limit, "set": set_limit, "remove": remove, "sync": sync},
)
