"""`tidewheel version`."""

from __future__ import annotations

import sys

from rich.text import Text

from tidewheel.cli.arguments import Debug, Json
from tidewheel.cli.edge import Exit, print_json
from tidewheel.terminal import console, show


def version(json: Json = False, debug: Debug = False) -> int:
    """Show the version."""
    from tidewheel import __version__

    if json:
        print_json({"version": __version__, "python": sys.version.partition(" ")[0]})
    else:
        show(console(), Text(f"tidewheel {__version__}"))
    return Exit.OK
