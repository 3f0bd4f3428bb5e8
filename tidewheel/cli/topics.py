"""`tidewheel topics plan` and `apply`: the topics on the brokers, compared with what the cluster needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.text import Text

from infra.kafka.topics import Change, Difference, Plan, TopicAdmin, WantedTopic, apply, plan
from infra.topics import TopicCatalog
from schemas.errors import Retriable
from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.configuration import Config, loaded_settings, settings_error
from tidewheel.cli.edge import CommandError, Exit, note, print_json, usage
from tidewheel.cli.lazy import group
from tidewheel.cluster_settings import ClusterSettings, SettingsError
from tidewheel.terminal import console, plain, show

_MARKS = {Change.SETTING: "yellow", Change.LOSES_DATA: "bold red", Change.FIXED: "bold red"}


def plan_topics(config: Config = None, json: Json = False, debug: Debug = False) -> int:
    """Show what the brokers lack of our topics, and what they have otherwise. Changes nothing.

    Exit code 1: there are differences that `tidewheel topics apply` leaves as they are unless it is told otherwise.
    """
    settings = loaded_settings(config).settings
    found = _planned(_admin(settings), settings.catalog())
    _tell(found, (), (), json)
    return Exit.REFUSED if found.differences else Exit.OK


def apply_topics(
    change_settings: Annotated[
        bool, typer.Option("--change-settings", help="Change settings of topics that are there; loses no records.")
    ] = False,
    allow_data_loss: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Change also what makes the brokers remove records of TOPIC. Repeatable."),
    ] = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Create the topics that are missing. Topics that are there stay as they are, unless an option says otherwise.

    Nothing removes topics or changes how many partitions they have. Exit code 1: something is still not as wanted.
    """
    settings = loaded_settings(config).settings
    admin, catalog = _admin(settings), settings.catalog()
    before = _planned(admin, catalog)
    named = allow_data_loss or []
    _check_names(named, before)
    with _reaching():
        changed = apply(admin, before, change_settings=change_settings, allow_data_loss=named)
    after = _planned(admin, catalog)
    _tell(after, before.to_create, changed, json)
    return Exit.OK if after.is_done else Exit.REFUSED


@contextmanager
def _reaching() -> Iterator[None]:
    """Brokers that do not answer end the command as a server does that cannot be reached."""
    try:
        yield
    except Retriable as error:
        hint = "is kafka.bootstrap right, and do the brokers run?"
        raise CommandError(str(error), code=Exit.UNREACHABLE, kind="unreachable", hint=hint) from error


def _admin(settings: ClusterSettings) -> TopicAdmin:
    try:
        return TopicAdmin(settings.of_kafka())
    except SettingsError as error:
        raise settings_error(error) from error


def _planned(admin: TopicAdmin, catalog: TopicCatalog) -> Plan:
    with _reaching():
        return plan(admin, catalog)


def _check_names(named: Iterable[str], found: Plan) -> None:
    differing = sorted({one.topic for one in found.differences if one.change is Change.LOSES_DATA})
    for name in named:
        if name not in differing:
            allowed = f"one of {', '.join(differing)}" if differing else "nothing that is wanted would lose records"
            raise usage("--allow-data-loss", f"{name!r} is no topic that would lose records", allowed)


# --- what is told -----------------------------------------------------------------------------------------------------


def _tell(left: Plan, created: Sequence[WantedTopic], changed: Sequence[Difference], is_json: bool) -> None:
    if is_json:
        print_json(_document(left, created, changed))
        return
    out = console()
    for name in left.equal:
        is_new = any(topic.name == name for topic in created)
        show(out, Text.assemble(("✔ ", "green"), plain(name), ("  created" if is_new else "", "green")))
    for topic in left.to_create:
        spec = topic.spec
        copies = "1 copy" if spec.replication == 1 else f"{spec.replication} copies"
        partitions = "1 partition" if spec.partitions == 1 else f"{spec.partitions} partitions"
        show(out, Text.assemble(("+ ", "cyan"), plain(topic.name), (f"  to create: {partitions}, {copies}", "cyan")))
    for one in changed:
        show(out, Text.assemble(("✔ ", "green"), plain(f"{one.topic}  {one.name}: {one.found} → {one.wanted}")))
    for one in left.differences:
        show(out, _explained(one))
    if left.to_create:
        note("→ to create them: tidewheel topics apply")


def _explained(one: Difference) -> Text:
    return Text.assemble(
        ("≠ ", _MARKS[one.change]),
        plain(f"{one.topic}  {one.name}: wanted {one.wanted}, found {one.found}"),
        (plain(f"\n    {one.meaning}"), "dim"),
        plain(f"\n    → {one.remedy}"),
    )


def _document(left: Plan, created: Sequence[WantedTopic], changed: Sequence[Difference]) -> dict[str, Any]:
    return {
        "is_done": left.is_done,
        "equal": left.equal,
        "to_create": [
            {
                "topic": topic.name,
                "partitions": topic.spec.partitions,
                "replication": topic.spec.replication,
                "settings": topic.spec.settings,
            }
            for topic in left.to_create
        ],
        "differences": left.differences,
        "created": [topic.name for topic in created],
        "changed": changed,
    }


topics_commands = group("Our topics on the brokers.", {"plan": plan_topics, "apply": apply_topics})
