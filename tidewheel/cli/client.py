"""The server's operations for the command line, with its refusals as CommandErrors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import TypeVar

import httpx
import msgspec
from pydantic import ValidationError

from scheduler.refusals import FieldError, Refusal, RefusalKind, Refused
from tidewheel.backend import Doable
from tidewheel.cli.edge import CommandError, Exit, usage
from tidewheel.http import HttpBackend
from tidewheel.settings import DEFAULT_PORT, ClientSettings

T = TypeVar("T")

LOCAL = f"http://127.0.0.1:{DEFAULT_PORT}"


_OPTIONS = {  # how the fields of a request are called here
    "task_type": "TASK_TYPE",
    "payload": "PAYLOAD",
    "scheduled_at": "--at",
    "delay_seconds": "--delay",
    "task_id": "--id",
    "idempotency_key": "--key",
    "timeout_seconds": "--timeout",
    "max_retries": "--max-retries",
    "tenant_id": "--tenant",
    "cron_expression": "--cron",
    "every_seconds": "--every",
    "calendar": "--on",
    "timezone": "--tz",
    "overlap_policy": "--overlap",
    "misfire_policy": "--misfire",
    "misfire_max": "--misfire-max",
    "max_lateness_seconds": "--max-lateness",
    "jitter_seconds": "--jitter",
    "gap_policy": "--gap",
    "fold_policy": "--fold",
    "start_at": "--from",
    "end_at": "--until",
    "cron_id": "--id",
    "name": "NAME",
    "from": "--from",
    "to": "--to",
    "max": "--max",
    "count": "--count",
    "period_seconds": "--per",
    "pending_max": "--pending-max",
    "weight": "--weight",
    "strategy": "--strategy",
    "burst": "--burst",
    "unique.scope": "--unique-for",
    "submits_per_s": "--submits-per-s",
    "unique.key": "--unique",
    "unique.seconds": "--unique-for",
    "debounce.key": "--debounce",
    "debounce.seconds": "--quiet",
    "debounce.max_seconds": "--at-latest",
    "defaults.priority": "--priority",
    "defaults.timeout_seconds": "--timeout",
    "defaults.total_timeout_seconds": "--total-timeout",
    "defaults.max_attempts": "--max-attempts",
    **{name: f"--{name}" for name in ("queue", "priority", "metadata", "status", "limit", "cursor", "reason")},
}
# Of these a sentence about another field may speak; the others are words that mean more than a field.
_SPOKEN_OF = re.compile(rf"\b({'|'.join(name for name in _OPTIONS if '_' in name)}|calendar)\b")
HINTS = {
    RefusalKind.NOT_FOUND: "tidewheel list shows the tasks there are",
    RefusalKind.CONFLICT: "submit the same content to get that task, or choose another --id or --key",
    RefusalKind.TOO_LARGE: "put the content somewhere else and submit where it is",
    RefusalKind.OVERLOADED: "nothing happened; try again in a second",
    RefusalKind.TOO_MANY: "nothing happened; submit more slowly, or let an operator raise it: tidewheel tenants set",
    RefusalKind.UNAVAILABLE: "nothing happened; try again in a second, /healthz tells how the server is",
    RefusalKind.UNDECIDED: "it may have happened or not: look with tidewheel status before you try again",
}


class Client:
    """The server's operations, with its refusals as CommandErrors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.backend = HttpBackend(client_settings(url))

    @property
    def options(self) -> str:
        """What a further command needs to reach the same server."""
        return "" if self.url == os.environ.get("TIDEWHEEL_SERVER", LOCAL) else f" --server {self.url}"

    def ask(self, operation: Doable[T], task_id: str | None = None) -> T:
        """The answer. Raises CommandError."""
        try:
            return operation.run()
        except Refused as refused:
            raise self.translated(refused, task_id) from refused
        except msgspec.MsgspecError as error:
            raise unreachable(f"what answers at {self.url} is no tidewheel of this release") from error

    def translated(self, refused: Refused, task_id: str | None = None) -> CommandError:
        """The refusal as the command line tells it."""
        refusal = refused.refusal
        if isinstance(refused.__cause__, httpx.ConnectError):
            return unreachable(f"there is no server at {self.url} ({refused.__cause__})")
        if isinstance(refused.__cause__, httpx.HTTPError):
            cause = refused.__cause__
            error = unreachable(f"no answer from {self.url} ({str(cause) or type(cause).__name__})")
            error.hint = self._hint(Refusal(RefusalKind.UNDECIDED, ""), task_id)
            return error
        detail = "; ".join(_field_text(error) for error in refusal.errors) or refusal.detail
        return CommandError(
            detail, kind=refusal.kind, hint=self._hint(refusal, task_id), errors=refusal.errors, task_id=task_id
        )

    def _hint(self, refusal: Refusal, task_id: str | None) -> str | None:
        if task_id is not None and refusal.kind in (RefusalKind.WRONG_STATUS, RefusalKind.UNDECIDED):
            return f"look how it stands: tidewheel status {task_id}{self.options}"
        return HINTS.get(refusal.kind)


def unreachable(detail: str) -> CommandError:
    """There is no answer, or none of a tidewheel."""
    hint = "start one with `tidewheel dev`, or name another one with --server or TIDEWHEEL_SERVER"
    return CommandError(detail, code=Exit.UNREACHABLE, kind="unreachable", hint=hint)


def _field_text(error: FieldError) -> str:
    allowed = f": {error.allowed}" if error.allowed and error.allowed not in error.message else ""
    if error.field in ("key", "where"):  # of a limit: what stands in them are fields, not options
        return f"--{error.field} {error.message}{allowed}"
    said = _SPOKEN_OF.sub(lambda found: _OPTIONS[found[0]], f"{error.message}{allowed}")
    return f"{_OPTIONS.get(error.field, error.field)} {said}"


def client_settings(url: str) -> ClientSettings:
    """The settings of a client of the server at `url`. Raises CommandError if that is no address."""
    try:
        return ClientSettings(server=url.rstrip("/"))
    except ValidationError as error:
        name = error.errors()[0]["loc"][0]
        if name == "server":
            raise usage(
                "--server", f"{url!r} is no address", f"http://HOST:PORT, as http://127.0.0.1:{DEFAULT_PORT}"
            ) from error
        raise usage(f"TIDEWHEEL_{str(name).upper()}", "is not allowed", error.errors()[0]["msg"]) from error


@contextlib.contextmanager
def connected_to(url: str) -> Iterator[Client]:
    """A client of the server at `url`. Raises CommandError if that is no address."""
    server = Client(url)
    try:
        yield server
    finally:
        server.backend.close()
