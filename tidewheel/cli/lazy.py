"""Commands that are imported when they are called: a shell waits for the ones that it asks for, not for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command

PACKAGE = "tidewheel.cli"
USAGE = 2  # exit code, as of any command that was not written as it must be


class Lazy(NamedTuple):
    """Where a command is (module:attribute in this package, a function or a Typer) and what the list says of it."""

    place: str
    help: str

    def load(self, name: str) -> Any:
        """The command. It is called `name`."""
        module, _, attribute = self.place.partition(":")
        found = getattr(import_module(f"{PACKAGE}.{module}"), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(rich_markup_mode=None, add_completion=False)
            found.command(name)(function)
        command = get_command(found)
        command.name = name
        return command


def group(meaning: str, commands: Mapping[str, Callable[..., int]]) -> typer.Typer:
    """A group of commands that shows its help if it is called alone."""
    made = typer.Typer(help=meaning, invoke_without_command=True, add_completion=False, rich_markup_mode=None)

    @made.callback()
    def help_if_bare(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit(USAGE)

    for name, command in commands.items():
        made.command(name)(command)
    return made


class LazyGroup(TyperGroup):
    """A group of lazy commands, listed as they are in `lazy`."""

    lazy: ClassVar[Mapping[str, Lazy]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        return list(self.lazy)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, loaded now; None: there is none."""
        found = self.lazy.get(cmd_name)
        return None if found is None else found.load(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.help) for name, one in self.lazy.items()])
