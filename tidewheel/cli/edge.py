"""How a command ends: an exit code, and one line or one JSON document for what went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NoReturn

import msgspec
import typer
from rich.text import Text

from scheduler.refusals import FieldError
from schemas.errors import TidewheelIOError
from tidewheel.cli.lazy import LazyGroup
from tidewheel.terminal import console, plain


class Exit(IntEnum):
    """What the exit code says."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3


class CommandError(Exception):
    """A command cannot be done: said in one line, with what to do next, and ended with `code`."""

    def __init__(
        self,
        detail: str,
        *,
        code: Exit = Exit.REFUSED,
        kind: str = "refused",
        hint: str | None = None,
        errors: Sequence[FieldError] = (),
        task_id: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail, self.code, self.kind, self.hint = detail, code, kind, hint
        self.errors, self.task_id = tuple(errors), task_id


class Edge(LazyGroup):
    """All commands. Whatever goes wrong in them ends here, as one line or one JSON document."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run one command and end the process with its exit code."""
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        extra["standalone_mode"] = False
        run = super().main
        sys.exit(_ended(lambda: run(given, prog_name or "tidewheel", **extra), options))


def _ended(run: Callable[[], Any], options: Sequence[str]) -> int:
    try:
        code = run()
        return code if isinstance(code, int) else Exit.OK
    except Exception as error:  # the edge: nobody else would tell the user
        if "--debug" in options or os.environ.get("TIDEWHEEL_DEBUG"):
            traceback.print_exception(error.__cause__ or error)
        told = _told(error)
        complain(told, "--json" in options)
        return told.code


def _told(error: Exception) -> CommandError:
    if isinstance(error, CommandError):
        return error
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "tidewheel"
        hint = f"{path} --help lists what is possible"
        return CommandError(error.format_message(), code=Exit.USAGE, kind="usage", hint=hint)
    if isinstance(error, typer.Abort):
        return CommandError("interrupted", kind="interrupted")
    if isinstance(error, TidewheelIOError):
        return CommandError(str(error), kind="unable")
    detail = f"this should not have happened: {type(error).__name__}: {error}"
    return CommandError(detail, kind="internal", hint="run it again with --debug, and report what it shows")


def complain(error: CommandError, is_json: bool) -> None:
    """Say on stderr what went wrong."""
    if is_json:
        document = {
            "kind": error.kind,
            "detail": error.detail,
            "errors": error.errors,
            "task_id": error.task_id,
            "hint": error.hint,
            "exit_code": int(error.code),
        }
        given = {name: value for name, value in document.items() if value not in (None, ())}
        sys.stderr.write(msgspec.json.encode(given).decode() + "\n")
        return
    out = console(sys.stderr)
    out.print(Text.assemble(("error: ", "bold red"), plain(error.detail)), soft_wrap=not out.is_terminal)
    if error.hint:
        out.print(Text.assemble(("   → ", "dim"), plain(error.hint)), soft_wrap=True)


def usage(option: str, message: str, allowed: str) -> CommandError:
    """The error of an argument that is not allowed, naming it and what is."""
    field = FieldError(option, message, allowed)
    return CommandError(f"{option} {message}: {allowed}", code=Exit.USAGE, kind="usage", errors=(field,))


def note(*lines: str) -> None:
    """What is beside the answer goes to stderr, so that stdout can be piped."""
    out = console(sys.stderr)
    for line in lines:
        out.print(Text(plain(line), style="dim"), soft_wrap=True)


def print_json(document: Any) -> None:
    """The answer as one JSON document: in one line, or laid out for the one who looks at a terminal."""
    content = msgspec.json.encode(document)
    if sys.stdout.isatty():
        content = msgspec.json.format(content, indent=2)
    sys.stdout.write(content.decode() + "\n")
