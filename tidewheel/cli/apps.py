"""What commands have in common that look at an application's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.text import Text

from scheduler.refusals import Refused
from tidewheel.app import App
from tidewheel.cli.client import connected_to
from tidewheel.cli.edge import CommandError, Exit, print_json
from tidewheel.errors import TidewheelError
from tidewheel.loading import AppNotLoaded, add_folder_to_path, load_app
from tidewheel.terminal import console, plain, show

T = TypeVar("T")

AppToLoad = Annotated[str, typer.Argument(metavar="MODULE:APP", show_default=False)]


def loaded_app(app: str) -> App:
    """Load an application from the working directory. Raises CommandError."""
    try:
        add_folder_to_path(Path.cwd())
        return load_app(app)
    except AppNotLoaded as error:
        code = Exit.USAGE if error.is_misnamed else Exit.REFUSED
        raise CommandError(str(error), code=code, kind="app", hint=error.hint) from error


def synced(app: str, server: str, sync: Callable[[App], T]) -> T:
    """Let a scheduler have what an application declares. Raises CommandError."""
    loaded = loaded_app(app)
    with connected_to(server) as connected:
        loaded.use(connected.backend)
        try:
            return sync(loaded)
        except TidewheelError as error:
            if isinstance(error.__cause__, Refused):
                raise connected.translated(error.__cause__) from error
            raise
        finally:
            loaded.use(None)


def show_report(report: msgspec.Struct, *, is_json: bool) -> None:
    """What a synchronisation did, by name; a name that is gone from the code stands out."""
    if is_json:
        print_json(report)
        return
    for what, names in msgspec.structs.asdict(report).items():
        for name in names:
            show(console(), Text(f"{what:9}  {plain(name)}", style="yellow" if what == "gone" else ""))
