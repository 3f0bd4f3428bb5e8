"""The commands that stay: `tidewheel dev` and `tidewheel worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidewheel.app import App
from tidewheel.banner import Banner
from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.configuration import Config, loaded_settings
from tidewheel.cli.edge import Exit
from tidewheel.cli.running import (
    AppName,
    Grace,
    LogJson,
    LogLevel,
    MaybeGrace,
    MaybeLogLevel,
    MaybeSlots,
    Registry,
    Slots,
    announce,
    grace_of,
    prepared,
    run_to_its_end,
    with_tasks,
)
from tidewheel.embedded import EngineSettings
from tidewheel.serving import serve, work
from tidewheel.settings import DEFAULT_PORT
from workers.settings import WorkerSettings

SHARDS_MAX = 256  # of one process; each costs a few partitions and a share of every turn
DATA_DEFAULT = Path(".tidewheel")


Data = Annotated[Path, typer.Option(metavar="DIR", help="The folder of all that is durable.")]
WorkerData = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help=f"Work for the `tidewheel dev` of this folder; by default for the cluster, or {DATA_DEFAULT} without one.",
    ),
]


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
    grace_s = grace_of(grace)
    loaded = prepared(app, log_level, log_json)
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
    run_to_its_end(
        lambda: serve(loaded, settings, lambda engine: announce(Banner.of_engine(engine, loaded, app), json))
    )
    return Exit.OK


def worker(
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", show_default=False)],
    data: WorkerData = None,
    slots: MaybeSlots = None,
    grace: MaybeGrace = None,
    registry: Registry = None,
    config: Config = None,
    log_level: MaybeLogLevel = None,
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a worker process: for the `tidewheel dev` that has the folder DIR, or for a cluster.

    Without --data it works for the cluster whose brokers kafka.bootstrap names (TIDEWHEEL_KAFKA_BOOTSTRAP, or in
    FILE), if it does; otherwise for the folder .tidewheel.
    """
    grace_s = None if grace is None else grace_of(grace)
    if data is None:
        given = {"worker.slots": slots, "worker.grace_s": grace_s, "registry": registry, "log.level": log_level}
        if log_json:
            given["log.format"] = "json"
        found = loaded_settings(config, given)
        if found.settings.kafka.bootstrap is not None:
            from tidewheel.cli.cluster import run_worker  # with the drivers of a cluster, which a folder does not need

            return run_worker(app, found, json)
    loaded = with_tasks(prepared(app, log_level or "info", log_json), app)
    granted_s = 30.0 if grace_s is None else grace_s
    return _work_for_folder(loaded, app, (data or DATA_DEFAULT).absolute(), slots or 100, granted_s, registry, json)


def _work_for_folder(
    loaded: App, app: str, folder: Path, slots: int, grace_s: float, registry: str | None, is_json: bool
) -> int:
    def on_ready(settings: WorkerSettings) -> None:
        announce(Banner.of_worker(settings, loaded, folder), is_json)

    run_to_its_end(
        lambda: work(loaded, app, folder, slots=slots, grace_s=grace_s, on_ready=on_ready, registry=registry)
    )
    return Exit.OK
