"""What the commands that stay have in common: their options, how they begin, how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tidewheel.app import App
from tidewheel.banner import Banner
from tidewheel.cli.apps import loaded_app
from tidewheel.cli.arguments import seconds
from tidewheel.cli.edge import CommandError, Exit, print_json, usage
from tidewheel.logs import LEVELS, configure_logs
from tidewheel.serving import EngineGone, PartDied
from tidewheel.terminal import console, show
from workers.settings import SLOTS_MAX

GRACE_S_MAX = 86_400.0  # who waits longer for a process to end has forgotten it

AppName = Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", show_default=False)]
Slots = Annotated[int, typer.Option(min=1, max=SLOTS_MAX, help="Attempts that may run at once.")]
MaybeSlots = Annotated[
    int | None, typer.Option(min=1, max=SLOTS_MAX, help="Attempts that may run at once; 100 by default.")
]
Grace = Annotated[str, typer.Option(metavar="DURATION", help="How long what runs may take to end at a stop.")]
MaybeGrace = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="How long what runs may take to end at a stop; 30s by default."),
]
Registry = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="TIDEWHEEL_REGISTRY",
        help="A Confluent-compatible schema registry; without one the schema ids are built in.",
    ),
]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="|".join(LEVELS))]
MaybeLogLevel = Annotated[str | None, typer.Option("--log-level", metavar="|".join(LEVELS), help="By default info.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON documents, one a line.")]


def grace_of(text: str) -> float:
    """A grace in seconds."""
    grace_s = seconds("--grace", text) or 0.0
    if grace_s > GRACE_S_MAX:
        raise usage("--grace", f"{text!r} is too long", "at most a day")
    return grace_s


def prepared(app: str | None, log_level: str, log_json: bool) -> App | None:
    """Set up the logs and load the application. Raises CommandError."""
    if log_level not in LEVELS:
        raise usage("--log-level", f"{log_level!r} is no level", f"one of {', '.join(LEVELS)}")
    configure_logs(log_level, is_json=log_json)
    return None if app is None else loaded_app(app)


def with_tasks(app: App | None, name: str) -> App:
    """An application that a worker can work for. Raises CommandError."""
    if app is None or not len(app.registry):
        raise CommandError(f"{name} has no task types", kind="no-tasks", hint="declare one with @app.task()")
    return app


def run_to_its_end(run: Callable[[], None]) -> None:
    """Run a process; how it ended, if it was not told to, becomes a CommandError."""
    try:
        run()
    except EngineGone as error:
        raise CommandError(str(error), code=Exit.UNREACHABLE, kind="unreachable") from error
    except PartDied as error:
        raise CommandError(str(error), kind="part-died", hint="start it again; what was accepted is durable") from error


def announce(banner: Banner, is_json: bool) -> None:
    """Say that the process is up: a few lines, or one JSON document in one line."""
    if is_json:
        print_json(banner.facts)
        sys.stdout.flush()
    else:
        show(console(), banner)
