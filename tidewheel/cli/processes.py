"""The commands that stay: `tidewheel dev` and `tidewheel worker`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tidewheel.app import App
from tidewheel.banner import Banner
from tidewheel.cli.arguments import Debug, Json, seconds
from tidewheel.cli.edge import CommandError, Exit, print_json, usage
from tidewheel.embedded import EngineSettings
from tidewheel.loading import AppNotLoaded, add_folder_to_path, load_app
from tidewheel.logs import LEVELS, configure_logs
from tidewheel.serving import EngineGone, PartDied, serve, work
from tidewheel.settings import DEFAULT_PORT
from tidewheel.terminal import console, show
from workers.settings import SLOTS_MAX, WorkerSettings

SHARDS_MAX = 256  # of one process; each costs a few partitions and a share of every turn
GRACE_S_MAX = 86_400.0  # who waits longer for a process to end has forgotten it
DATA_DEFAULT = Path(".tidewheel")


AppName = Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", show_default=False)]
Data = Annotated[Path, typer.Option(metavar="DIR", help="The folder of all that is durable.")]
Slots = Annotated[int, typer.Option(min=1, max=SLOTS_MAX, help="Attempts that may run at once.")]
Grace = Annotated[str, typer.Option(metavar="DURATION", help="How long what runs may take to end at a stop.")]
Registry = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="TIDEWHEEL_REGISTRY",
        help="A Confluent-compatible schema registry; without one the schema ids are built in.",
    ),
]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="|".join(LEVELS))]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log JSON documents, one a line.")]


def dev(
    app: AppName = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the API; 0: any that is free.")] = DEFAULT_PORT,
    data: Data = DATA_DEFAULT,
    host: Annotated[str, typer.Option(help="Where the API listens. There is no authentication yet.")] = "127.0.0.1",
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Run no tasks in this process.")] = False,
    slots: Slots = 100,
    grace: Grace = "30s",
    shards: Annotated[int, typer.Option(min=1, max=SHARDS_MAX, help="Fixed for the life of a data folder.")] = 4,
    registry: Registry = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a whole scheduler in this process: log, shards, view, API, and a worker of MODULE:APP.

    All is durable in DIR. Ctrl-C or SIGTERM stop it in order; a second one hurries.
    """
    grace_s = _grace_s(grace)
    loaded = _prepared(app, log_level, log_json)
    settings = EngineSettings(
        data=data.absolute(),
        host=host,
        port=port,
        shards=shards,
        app=app,
        registry=registry,
        has_worker=not no_worker,
        slots=slots,
        grace_s=grace_s,
    )
    _serve(lambda: serve(loaded, settings, lambda engine: _announce(Banner.of_engine(engine, loaded, app), json)))
    return Exit.OK


def worker(
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", show_default=False)],
    data: Data = DATA_DEFAULT,
    slots: Slots = 100,
    grace: Grace = "30s",
    registry: Registry = None,
    log_level: LogLevel = "info",
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a further worker process for the `tidewheel dev` that has the data folder DIR."""
    grace_s = _grace_s(grace)
    loaded = _prepared(app, log_level, log_json)
    if loaded is None or not len(loaded.registry):
        raise CommandError(f"{app} has no task types", kind="no-tasks", hint="declare one with @app.task()")
    folder = data.absolute()

    def on_ready(settings: WorkerSettings) -> None:
        _announce(Banner.of_worker(settings, loaded, folder), json)

    _serve(lambda: work(loaded, app, folder, slots=slots, grace_s=grace_s, on_ready=on_ready, registry=registry))
    return Exit.OK


def _grace_s(text: str) -> float:
    grace_s = seconds("--grace", text) or 0.0
    if grace_s > GRACE_S_MAX:
        raise usage("--grace", f"{text!r} is too long", "at most a day")
    return grace_s


def _prepared(app: str | None, log_level: str, log_json: bool) -> App | None:
    if log_level not in LEVELS:
        raise usage("--log-level", f"{log_level!r} is no level", f"one of {', '.join(LEVELS)}")
    configure_logs(log_level, is_json=log_json)
    try:
        add_folder_to_path(Path.cwd())
        return None if app is None else load_app(app)
    except AppNotLoaded as error:
        code = Exit.USAGE if error.is_misnamed else Exit.REFUSED
        raise CommandError(str(error), code=code, kind="app", hint=error.hint) from error


def _serve(run: Callable[[], None]) -> None:
    try:
        run()
    except EngineGone as error:
        raise CommandError(str(error), code=Exit.UNREACHABLE, kind="unreachable") from error
    except PartDied as error:
        raise CommandError(str(error), kind="part-died", hint="start it again; what was accepted is durable") from error


def _announce(banner: Banner, is_json: bool) -> None:
    if is_json:
        print_json(banner.facts)
        sys.stdout.flush()
    else:
        show(console(), banner)
