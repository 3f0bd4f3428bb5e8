"""`tidewheel config show`, and how the commands of a cluster get their settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from scheduler.refusals import FieldError
from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.edge import CommandError, Exit, print_json
from tidewheel.cli.lazy import group
from tidewheel.cluster_settings import SettingsError
from tidewheel.configuration import CONFIG_VARIABLE, Loaded, load_settings
from tidewheel.terminal import console, plain, show

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="Settings of the cluster, in TOML."),
]


def loaded_settings(config: Path | None, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """The settings in force; `overrides` are options of the command, by dotted name. CommandError: what is wrong."""
    try:
        return load_settings(config, overrides)
    except SettingsError as error:
        raise settings_error(error) from error


def settings_error(error: SettingsError) -> CommandError:
    """Wrong settings as a command says it: one line each."""
    lines = [f"{one.where} {one.message}: {one.allowed}" for one in error.problems]
    detail = lines[0] if len(lines) == 1 else "\n  ".join(["the settings are not allowed:", *lines])
    fields = [FieldError(one.where, one.message, one.allowed) for one in error.problems]
    return CommandError(detail, code=Exit.USAGE, kind="settings", errors=fields)


def show_config(config: Config = None, json: Json = False, debug: Debug = False) -> int:
    """Show the settings that are in force, and where each came from. Secrets are hidden."""
    loaded = loaded_settings(config)
    if json:
        print_json({name: {"value": value, "from": origin} for name, value, origin in loaded.shown()})
        return Exit.OK
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("SETTING", "VALUE", "FROM"):
        table.add_column(header, overflow="fold")
    for name, value, origin in loaded.shown():
        table.add_row(name, Text(_text(value)), Text(plain(origin), style="dim" if origin == "default" else ""))
    show(console(), table)
    return Exit.OK


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return plain(", ".join(f"{name}={one}" for name, one in value.items())) or "-"
    return plain(", ".join(value) if isinstance(value, tuple) else str(value)) or "-"


config_commands = group("The settings of a cluster.", {"show": show_config})
