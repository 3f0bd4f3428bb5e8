"""`tidewheel services`: Kafka, Cassandra and a schema registry on this machine, without a container engine."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from infra.services import BASE_PORT, PORTS_TAKEN, SIZES, Cluster, Node, ServiceError, Size, Step, recorded_size
from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.edge import CommandError, Exit, note, print_json, usage
from tidewheel.cli.lazy import group
from tidewheel.cluster_settings import variable_of
from tidewheel.terminal import console, show, span

DATA_DEFAULT = Path(".tidewheel-services")
_ANSWERS, _SILENT, _STOPPED = "answers", "silent", "stopped"
_STYLES = {_ANSWERS: "green", _SILENT: "yellow", _STOPPED: "red"}
_SETTINGS = {  # by the names of `Cluster.addresses`
    "kafka": "kafka.bootstrap",
    "cassandra": "cassandra.hosts",
    "cassandra_port": "cassandra.port",
    "registry": "registry",
}

Data = Annotated[Path, typer.Option(metavar="DIR", help="The folder of data, logs and process ids.")]
Nodes = Annotated[int | None, typer.Option(metavar="N", help="Nodes: 1 or 3; 0: none.", show_default="1")]


def start_services(
    kafka: Nodes = None,
    cassandra: Nodes = None,
    registry: Annotated[bool, typer.Option("--registry", help="A schema registry as well; needs Java 21.")] = False,
    data: Data = DATA_DEFAULT,
    base_port: Annotated[
        int | None, typer.Option(help=f"All ports are in the {PORTS_TAKEN} from here on.", show_default=str(BASE_PORT))
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Start Kafka and Cassandra in the background, wait until they answer.

    What runs already is left alone. The first time their jars are fetched (by Maven, some 110 MB).
    """
    with _told():
        cluster = _wanted(data, kafka, cassandra, registry, base_port)
        if not cluster.nodes:
            raise usage("--kafka, --cassandra", "are both 0 and there is no --registry", "at least one service")
        begun_at = time.monotonic()
        with _progress(is_silent=json) as on_step:
            cluster.up(on_step)
    if json:
        print_json(cluster.addresses())
        return Exit.OK
    took = span(int((time.monotonic() - begun_at) * 1_000_000))
    show(console(), Text.assemble(("✔ ", "green"), f"all services answer ({took})"), _environment(cluster))
    return Exit.OK


def stop_services(
    data: Data = DATA_DEFAULT,
    purge: Annotated[bool, typer.Option("--purge", help="Remove DIR too, with all data.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Stop what `up` started."""
    with _told():
        cluster = _recorded(data)
        running = [node.name for node in cluster.nodes if node.pid is not None]
        cluster.down()
        if purge:
            cluster.purge()
    if json:
        print_json({"stopped": running, "purged": purge})
        return Exit.OK
    note(f"stopped: {', '.join(running) or 'nothing ran'}")
    note(f"{data} is removed" if purge else f"the data stay in {data}; tidewheel services down --purge removes them")
    return Exit.OK


def show_services(data: Data = DATA_DEFAULT, json: Json = False, debug: Debug = False) -> int:
    """Show what `up` started and how it does. Exit code 0: all of it answers."""
    with _told():
        nodes = [_node_state(node) for node in _recorded(data).nodes]
    if json:
        print_json({"services": nodes})
    else:
        show(console(), _table(nodes))
    return Exit.OK if all(node.state == _ANSWERS for node in nodes) else Exit.REFUSED


class NodeState(msgspec.Struct, frozen=True):
    """How a node does; `state` is `answers`, `silent` (it runs, but does not answer) or `stopped`."""

    service: str
    node: str
    address: str
    state: str
    pid: int | None
    memory_bytes: int | None


def _node_state(node: Node) -> NodeState:
    pid = node.pid
    state = _STOPPED if pid is None else _ANSWERS if node.answers() else _SILENT
    return NodeState(node.service, node.name, node.address, state, pid, node.memory_bytes())


def _wanted(data: Path, kafka: int | None, cassandra: int | None, registry: bool, base_port: int | None) -> Cluster:
    """What stands on the command line; what does not, is as the folder was made, or one node."""
    for option, nodes in (("--kafka", kafka), ("--cassandra", cassandra)):
        if nodes not in (None, *SIZES):
            raise usage(option, f"{nodes} is not possible", "0, 1 or 3 nodes")
    before = recorded_size(data) or Size(kafka=1, cassandra=1)
    try:
        return Cluster(
            data,
            kafka=before.kafka if kafka is None else kafka,
            cassandra=before.cassandra if cassandra is None else cassandra,
            registry=before.registry or registry,
            base_port=before.base_port if base_port is None else base_port,
        )
    except ValueError as error:
        raise usage("--base-port", f"{base_port} is not possible", "1024 to 65435") from error


def _recorded(data: Path) -> Cluster:
    cluster = Cluster.recorded(data)
    if cluster is None:
        hint = "start them: tidewheel services up; or say where they are with --data"
        raise CommandError(f"no services were started in {data}", kind="no-services", hint=hint)
    return cluster


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What services raise, as the failure of a command."""
    try:
        yield
    except ServiceError as error:
        raise CommandError(str(error), kind="service", hint=error.hint) from error
    except OSError as error:
        hint = "is there room on the disk, and may you write there? --data names another folder"
        raise CommandError(f"the folder of the services: {error}", kind="service", hint=hint) from error


# --- for people -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(is_silent: bool) -> Iterator[Callable[[str, Step], None]]:
    """Tells on stderr what is done, and in a terminal for what we wait."""
    if is_silent:
        yield lambda name, step: None
        return
    out = console(sys.stderr)
    waiting: list[str] = []
    with out.status("looking what runs") as spinner:

        def on_step(name: str, step: Step) -> None:
            if step in (Step.UP, Step.WAS_UP):
                waiting[:] = [other for other in waiting if other != name]
                out.print(Text.assemble(("✔ ", "green"), f"{name} {'is up' if step is Step.UP else 'was up'}"))
            elif step is Step.STARTING:
                waiting.append(name)
            if not out.is_terminal and step in (Step.FETCHING, Step.STARTING):
                out.print(Text(f"  {name}: {step}", style="dim"))
            spinner.update(_doing(name, step, waiting))

        yield on_step


def _doing(name: str, step: Step, waiting: Sequence[str]) -> Text:
    if step is Step.FETCHING:
        return Text(f"fetching {name}; this happens once")
    return Text(f"waiting for {', '.join(waiting)}" if waiting else "waiting until all see each other")


def _environment(cluster: Cluster) -> Padding:
    """How the processes of a cluster are told where the services are."""
    lines = [f"export {variable_of(_SETTINGS[name])}={address}" for name, address in cluster.addresses().items()]
    return Padding(Text("\n".join(lines)), (1, 0, 0, 2))


def _table(nodes: Sequence[NodeState]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("SERVICE", "NODE", "ADDRESS", "PID", "STATE", "MEMORY"):
        table.add_column(header, no_wrap=True, justify="right" if header in ("PID", "MEMORY") else "left")
    for one in nodes:
        memory = "-" if one.memory_bytes is None else f"{one.memory_bytes / 2**20:.0f} MiB"
        state = Text(one.state, style=_STYLES[one.state])
        table.add_row(one.service, one.node, one.address, str(one.pid or "-"), state, memory)
    return table


services_commands = group(
    "Kafka, Cassandra and a schema registry on this machine.",
    {"up": start_services, "down": stop_services, "status": show_services},
)
