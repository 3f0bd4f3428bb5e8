"""The command line. `main` is its entry point.

Exit codes: 0 it was done · 1 it was refused, or (with --wait) the task did not succeed · 2 the command was not written
as it must be · 3 the server cannot be reached. With --json there is one JSON document on stdout, and errors are JSON
documents on stderr, one a line.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tidewheel.cli.edge import Edge, Exit
from tidewheel.cli.lazy import Lazy

__all__ = ["cli", "main"]

_EPILOG = (
    "Exit codes: 0 done; 1 refused, or (with --wait) not succeeded; 2 wrong usage; 3 the server cannot be reached."
)

_COMMANDS = {
    "dev": Lazy("processes:dev", "Run a whole scheduler here, with a worker of your app."),
    "worker": Lazy("processes:worker", "Run a worker, for a cluster or for a `tidewheel dev`."),
    "submit": Lazy("tasks:submit", "Submit a task; it is durable when this returns."),
    "status": Lazy("tasks:status", "Show how a task stands."),
    "list": Lazy("tasks:list_tasks", "List tasks, newest first."),
    "cancel": Lazy("tasks:cancel", "Stop tasks, waiting or running."),
    "cron": Lazy("cron:cron", "Schedules: what runs again and again."),
    "queues": Lazy("queues:queues", "Queues: which are paused; pause and resume them."),
    "tenants": Lazy("queues:tenants", "Tenants: their shares of the starts."),
    "limits": Lazy("limits:limits", "Limits: how many may start in a time, or run at a time."),
    "dlq": Lazy("dead_letters:dlq", "Dead letters: tasks that used up their attempts."),
    "timers": Lazy("timers:timers", "Show what waits for its time, and how late the last ones were."),
    "scheduler": Lazy("cluster:scheduler", "Run a scheduler of a cluster."),
    "projector": Lazy("cluster:projector", "Run a projector of a cluster."),
    "api": Lazy("cluster:api", "Run an API process of a cluster."),
    "all": Lazy("cluster:run_all", "Run all of a cluster in this process."),
    "topics": Lazy("topics:topics_commands", "The topics of a cluster on its brokers."),
    "schema": Lazy("cluster:schema_commands", "The tables of the view in Cassandra."),
    "config": Lazy("configuration:config_commands", "The settings of a cluster."),
    "services": Lazy("services:services_commands", "Kafka and Cassandra for trials, without containers."),
    "version": Lazy("about:version", "Show the version."),
}


class _Commands(Edge):
    """The commands, each imported when it is wanted: whoever lists tasks needs no driver of Cassandra."""

    lazy = _COMMANDS


cli = typer.Typer(
    cls=_Commands,
    name="tidewheel",
    help="Tidewheel, a durable task scheduler. Start one with `tidewheel dev`.",
    epilog=_EPILOG,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cli.callback()
def _main(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        from tidewheel.cli.about import version

        raise typer.Exit(version())
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Exit.USAGE)


def main() -> None:
    """The command `tidewheel`."""
    try:
        cli()
    except SystemExit as ended:
        from tidewheel.leaving import leave

        leave(ended.code if isinstance(ended.code, int) else Exit.REFUSED)
        raise
