"""What stands on the command line: the options that commands share, and how their texts become values."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from scheduler.instants import INSTANT_RULE, parse_instant
from scheduler.refusals import RefusalKind
from scheduler.strict_json import NotAcceptable, check_json
from schemas.ids import NAME_RULE, is_name
from schemas.limits import BODY_MAX, PAGE_MAX
from schemas.messages import Status
from tidewheel.cli.client import HINTS
from tidewheel.cli.edge import CommandError, usage

LIST_DEFAULT = 20  # tasks of a list that are on the screen at once


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; errors as JSON on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Server = Annotated[str, typer.Option("--server", envvar="TIDEWHEEL_SERVER", metavar="URL", help="The scheduler's API.")]
Wait = Annotated[
    str | None, typer.Option(metavar="DURATION", help="Wait so long for its end; exit 1 unless it succeeded.")
]
Full = Annotated[bool, typer.Option("--full", help="Shorten nothing: contents, tracebacks, attempts.")]
TaskId = Annotated[str, typer.Argument(metavar="TASK_ID", show_default=False)]
TaskIds = Annotated[list[str], typer.Argument(metavar="TASK_ID…", show_default=False)]
Limit = Annotated[int | None, typer.Option(min=1, max=PAGE_MAX, help=f"How many; {LIST_DEFAULT} by default.")]
Cursor = Annotated[str | None, typer.Option(help="Where the page before ended.", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="All pages.")]


_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION_RULE = "seconds, or with units, for example 90, 1.5s, 20m, 1h30m, 7d"


def seconds(option: str, text: str | None) -> float | None:
    """A duration in seconds."""
    if text is None:
        return None
    compact = text.replace(" ", "").lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", compact):
        return float(compact)
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise usage(option, f"{text!r} is no duration", _DURATION_RULE)
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def instant(option: str, text: str | None) -> str | None:
    """An instant, looked at but left as it was written."""
    if text is not None:
        try:
            parse_instant(text)
        except ValueError as error:
            raise usage(option, f"{text!r} is no instant", INSTANT_RULE) from error
    return text


def payload_of(text: str | None) -> bytes | None:
    """JSON, from the argument or, for `-`, from stdin; nothing larger than a request may be is read."""
    if text is None:
        return None
    raw = sys.stdin.buffer.read(BODY_MAX + 1) if text == "-" else text.encode("utf-8", "surrogateescape")
    if len(raw) > BODY_MAX:
        raise CommandError(
            f"PAYLOAD has more than {BODY_MAX:,} bytes", kind="too-large", hint=HINTS[RefusalKind.TOO_LARGE]
        )
    try:
        check_json(raw)
    except NotAcceptable as error:
        raise _payload_error(text, str(error)) from error
    return raw


def _payload_error(text: str, message: str) -> CommandError:
    error = usage("PAYLOAD", message, "one JSON value")
    if text == "-":
        error.hint = 'stdin must hold nothing else, for example {"path": "a.png"}'
    elif re.fullmatch(r"[\w./:@ -]+", text):
        error.hint = f"a text needs double quotes, inside single ones for the shell: '\"{text}\"'"
    else:
        error.hint = """in single quotes for the shell: '{"path": "a.png"}'"""
    return error


def pairs_of(option: str, pairs: Iterable[str]) -> dict[str, str]:
    """Texts by name from name=value."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise usage(option, f"{pair!r} has no name and value", "name=value, for example order=42")
        if name in found:
            raise usage(option, f"names {name!r} twice", "each name once")
        found[name] = value
    return found


def metadata_of(pairs: Iterable[str], tenant: str | None) -> dict[str, str]:
    """Metadata from name=value, with the tenant among it."""
    metadata = pairs_of("--metadata", pairs)
    if tenant is not None:
        if metadata.get("tenant_id", tenant) != tenant:
            raise usage("--tenant", "disagrees with --metadata tenant_id", "one of the two")
        metadata["tenant_id"] = tenant
    return metadata


def task_id_of(text: str) -> str:
    """What may be the id of a task."""
    if not is_name(text):
        raise usage("TASK_ID", f"{text!r} cannot be the id of a task", NAME_RULE)
    return text


def status_of(text: str | None) -> Status | None:
    """A status by its name, in whatever case."""
    allowed = [str(status) for status in Status if status is not Status.UNKNOWN]
    if text is not None and text.upper() not in allowed:
        raise usage("--status", f"{text!r} is no status", f"one of {', '.join(allowed)}")
    return None if text is None else Status(text.upper())
