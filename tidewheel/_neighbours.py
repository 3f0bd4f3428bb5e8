"""Tidewheel's top-level packages have common names: say so at once if a project's own package hides one of them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

NAMES = ("schemas", "scheduler", "workers", "cron", "infra")
_HOME = Path(__file__).resolve().parent.parent


def check_neighbours() -> None:
    """Raise ImportError, naming both places and the ways out, if `import workers` would not give Tidewheel's."""
    for name in NAMES:
        _refuse_if_foreign(name, _known_place(name) or _place(find_spec(name)))


def check_folder(folder: Path) -> None:
    """Raise the same if a package in `folder` would be hidden by Tidewheel's, which is imported already."""
    for name in NAMES:
        _refuse_if_foreign(name, _place(PathFinder.find_spec(name, [str(folder)])))


def _refuse_if_foreign(name: str, place: Path | None) -> None:
    ours = _HOME / name
    if place is None or place == ours:
        return
    raise ImportError(
        f"tidewheel cannot be used beside your own {name!r} ({place}): "
        f"it has a package of that name itself ({ours}), and Python imports only one of them.\n"
        f"Ways out: rename yours; or move it into a package of your own, so that it is imported as "
        f"'yourproject.{name}'; or, if it is only found because it lies in the current folder, "
        f"run from another folder or with `python -P`."
    )


def _known_place(name: str) -> Path | None:
    """Where a module that was imported before comes from."""
    module = sys.modules.get(name)
    origin = getattr(module, "__file__", None)
    if origin is None:  # a namespace package has places only
        places = list(getattr(module, "__path__", ()))
        return Path(places[0]).resolve() if places else None
    return _folder(Path(origin))


def _place(spec: ModuleSpec | None) -> Path | None:
    """Where a package would come from; None for a mere folder, which hides no package."""
    return None if spec is None or spec.origin is None else _folder(Path(spec.origin))


def _folder(origin: Path) -> Path:
    origin = origin.resolve()
    return origin.parent if origin.name.startswith("__init__.") else origin
