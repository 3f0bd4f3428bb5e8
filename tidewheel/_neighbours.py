"""Tidewheel's top-level packages have common names: say so at once if a project's own package hides one of them."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

NAMES = ("schemas", "scheduler", "workers", "cron", "infra")


def check_neighbours() -> None:
    """Raise ImportError, naming both places and the ways out, if `import workers` would not give Tidewheel's."""
    home = Path(__file__).resolve().parent.parent
    for name in NAMES:
        place = _place_of(name)
        if place is not None and place != home / name:
            raise ImportError(
                f"tidewheel cannot be imported: its package {name!r} ({home / name}) is hidden by your own "
                f"{name!r} ({place}).\n"
                f"Ways out: rename your package; or move it into one of your own, so that it is imported as "
                f"'yourproject.{name}'; or, if it only is found because it lies in the current folder, run from "
                f"another folder or with `python -P`."
            )


def _place_of(name: str) -> Path | None:
    spec = find_spec(name) or PathFinder.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin).resolve()
    return origin.parent if origin.name == "__init__.py" else origin
