"""The processes of a cluster: `tidewheel scheduler`, `projector`, `api`, `all`, and `worker` where it has a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from schemas.errors import Retriable
from tidewheel.app import App
from tidewheel.banner import Banner
from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.configuration import Config, loaded_settings, settings_error
from tidewheel.cli.edge import CommandError, Exit, print_json
from tidewheel.cli.lazy import group
from tidewheel.cli.running import (
    AppName,
    LogJson,
    MaybeGrace,
    MaybeLogLevel,
    MaybeSlots,
    announce,
    grace_of,
    prepared,
    run_to_its_end,
    with_tasks,
)
from tidewheel.cluster import Node, Unreachable
from tidewheel.cluster_settings import ClusterSettings, SettingsError
from tidewheel.configuration import Loaded
from tidewheel.logs import configure_logs
from tidewheel.projector_child import ProjectorChildRole
from tidewheel.roles import ApiRole, ProjectorRole, Role, SchedulerRole, WorkerRole, live_of
from tidewheel.serving import serve_process
from tidewheel.terminal import console, plain, show

HealthPort = Annotated[
    int | None,
    typer.Option("--health-port", min=0, max=65535, help="Of /healthz, /readyz and /metrics; 0: any that is free."),
]
ApiHost = Annotated[str | None, typer.Option("--host", help="Where the API listens; 127.0.0.1 by default.")]
ApiPort = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Of the API; 0: any that is free.")]


def scheduler(
    config: Config = None,
    health_port: HealthPort = None,
    log_level: MaybeLogLevel = None,
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a scheduler of a cluster: it hosts a share of the shards."""
    loaded = _loaded(config, log_level, log_json, {"health.port": health_port})
    return _run("scheduler", loaded, [SchedulerRole()], json)


def projector(
    config: Config = None,
    health_port: HealthPort = None,
    log_level: MaybeLogLevel = None,
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run a projector of a cluster: it keeps a share of the view up to date."""
    loaded = _loaded(config, log_level, log_json, {"health.port": health_port})
    return _run("projector", loaded, [ProjectorRole()], json)


def api(
    config: Config = None,
    host: ApiHost = None,
    port: ApiPort = None,
    health_port: HealthPort = None,
    log_level: MaybeLogLevel = None,
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run an API process of a cluster."""
    given = {"health.port": health_port, "api.host": host, "api.port": port}
    return _run("api", _loaded(config, log_level, log_json, given), [ApiRole()], json)


def run_all(
    app: AppName = None,
    config: Config = None,
    host: ApiHost = None,
    port: ApiPort = None,
    slots: MaybeSlots = None,
    grace: MaybeGrace = None,
    health_port: HealthPort = None,
    log_level: MaybeLogLevel = None,
    log_json: LogJson = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Run all of a cluster in this process: a scheduler, the API, a worker of MODULE:APP, and a projector as its child.

    Other processes of the same cluster may run beside it.
    """
    given = {
        "health.port": health_port,
        "api.host": host,
        "api.port": port,
        "worker.slots": slots,
        "worker.grace_s": None if grace is None else grace_of(grace),
    }
    loaded = _loaded(config, log_level, log_json, given)
    application = _application(app, loaded.settings)
    shards = SchedulerRole()
    roles: list[Role] = [shards, ProjectorChildRole(loaded), ApiRole(application, live_of(shards), shards.timers)]
    if app is not None:
        roles.append(WorkerRole(with_tasks(application, app), app))
    return _run("all", loaded, roles, json)


def run_worker(app: str, loaded: Loaded, is_json: bool) -> int:
    """Run a worker of a cluster."""
    application = with_tasks(_application(app, loaded.settings), app)
    return _run("worker", loaded, [WorkerRole(application, app)], is_json)


def apply_schema(config: Config = None, json: Json = False, debug: Debug = False) -> int:
    """Create the keyspace and tables of the view, or bring them to this release's version. May be repeated."""
    from infra import cassandra

    settings = loaded_settings(config).settings
    try:
        report = cassandra.apply_schema(settings.of_cassandra())
    except SettingsError as error:
        raise settings_error(error) from error
    except Retriable as error:
        hint = "are cassandra.hosts and cassandra.port right, and do the nodes run?"
        raise CommandError(str(error), code=Exit.UNREACHABLE, kind="unreachable", hint=hint) from error
    if json:
        print_json(report._asdict())
        return Exit.OK
    done = f"is at version {report.after}" if report.before == report.after else f"is now at version {report.after}"
    show(console(), Text.assemble(("✔ ", "green"), plain(f"keyspace {report.keyspace} {done}, {report.replication}")))
    return Exit.OK


# --- running ----------------------------------------------------------------------------------------------------------


def _loaded(config: Any, log_level: str | None, log_json: bool, options: Mapping[str, Any]) -> Loaded:
    """Settings, with the logs set up by them."""
    more = {"log.level": log_level, "log.format": "json" if log_json else None}
    loaded = loaded_settings(config, {**options, **more})
    configure_logs(loaded.settings.log.level, is_json=loaded.settings.log.format == "json")
    return loaded


def _application(app: str | None, settings: ClusterSettings) -> App | None:
    return prepared(app, settings.log.level, settings.log.format == "json")


def _run(process: str, loaded: Loaded, roles: Sequence[Role], is_json: bool) -> int:
    node = Node(loaded.settings, roles)

    def on_ready() -> None:
        announce(_banner(process, node), is_json)

    def serve() -> None:
        serve_process(process, node, on_ready, loaded.settings.worker.grace_s)

    try:
        run_to_its_end(serve)
    except SettingsError as error:
        raise settings_error(error) from error
    except Unreachable as error:
        raise CommandError(str(error), code=Exit.UNREACHABLE, kind="unreachable") from error
    return Exit.OK


def _banner(process: str, node: Node) -> Banner:
    from tidewheel import __version__

    settings = node.settings
    facts: dict[str, Any] = {
        "version": __version__,
        "process": process,
        "name": node.name,
        "kafka": settings.kafka.bootstrap,
        "prefix": settings.kafka.prefix,
        "shards": settings.shards,
    }
    lines = [
        ("brokers", Text(f"{settings.kafka.bootstrap}, topics {settings.kafka.prefix}*, {settings.shards} shards"))
    ]
    for role in node.roles:
        for name, value in role.facts().items():
            facts[name] = value
            lines.append((name, Text(plain(", ".join(value) if isinstance(value, tuple) else str(value)))))
    if node.operating is not None:
        facts["health"] = _address(node.operating.host, node.operating.port)
        lines.append(("health", Text(f"{facts['health']}/readyz")))
    title = f"tidewheel {__version__} {process} is up"
    return Banner(title=title, facts=facts, lines=tuple(lines), handlers=())


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


schema_commands = group("The tables of the view in Cassandra.", {"apply": apply_schema})
