"""The command line. `main` is its entry point.

Exit codes: 0 it was done · 1 it was refused, or (with --wait) the task did not succeed · 2 the command was not written
as it must be · 3 the server cannot be reached. With --json there is one JSON document on stdout, and errors are JSON
documents on stderr, one a line.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.text import Text

from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.dead_letters import discard, list_dead_letters, retry, retry_all
from tidewheel.cli.edge import Edge, Exit, print_json
from tidewheel.cli.processes import dev, worker
from tidewheel.cli.tasks import cancel, list_tasks, status, submit
from tidewheel.serving import leave
from tidewheel.terminal import console, show

__all__ = ["cli", "main"]


_EPILOG = (
    "Exit codes: 0 done; 1 refused, or (with --wait) not succeeded; 2 wrong usage; 3 the server cannot be reached."
)

cli = typer.Typer(
    cls=Edge,
    name="tidewheel",
    help="Tidewheel, a durable task scheduler. Start one with `tidewheel dev`.",
    epilog=_EPILOG,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dlq = typer.Typer(
    help="Dead letters: tasks that used up their attempts.", invoke_without_command=True, rich_markup_mode=None
)


@cli.callback()
def _main(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if show_version:
        raise typer.Exit(version())
    _help_if_bare(context)


@dlq.callback()
def _help_if_bare(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Exit.USAGE)


def version(json: Json = False, debug: Debug = False) -> int:
    """Show the version."""
    from tidewheel import __version__

    if json:
        print_json({"version": __version__, "python": sys.version.partition(" ")[0]})
    else:
        show(console(), Text(f"tidewheel {__version__}"))
    return Exit.OK


cli.command(short_help="Run a whole scheduler here, with a worker of your app.")(dev)
cli.command(short_help="Run a further worker process for a `tidewheel dev`.")(worker)
cli.command()(submit)
cli.command(short_help="Show how a task stands.")(status)
cli.command("list")(list_tasks)
cli.command(short_help="Stop tasks, waiting or running.")(cancel)
cli.command()(version)
cli.add_typer(dlq, name="dlq")
dlq.command("list")(list_dead_letters)
dlq.command("retry")(retry)
dlq.command("retry-all")(retry_all)
dlq.command("discard")(discard)


def main() -> None:
    """The command `tidewheel`."""
    try:
        cli()
    except SystemExit as ended:
        leave(ended.code if isinstance(ended.code, int) else Exit.REFUSED)
        raise
