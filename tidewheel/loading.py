"""Finding the application that `module:app` names, and saying in one line why it can't be found."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

from tidewheel._neighbours import check_folder
from tidewheel.app import App


class AppNotLoaded(Exception):
    """The application can't be had; the message says why, `hint` what to do. `is_misnamed`: it's not module:app."""

    def __init__(self, message: str, hint: str | None = None, *, is_misnamed: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.is_misnamed = is_misnamed


def add_folder_to_path(folder: Path) -> None:
    """Let modules of `folder` be imported first. AppNotLoaded: it has a package that Tidewheel's own would hide."""
    try:
        check_folder(folder)
    except ImportError as error:
        raise AppNotLoaded(str(error)) from error
    if str(folder) not in sys.path[:1]:
        sys.path.insert(0, str(folder))


def load_app(name: str) -> App:
    """The App that `module:attribute` names. Raises AppNotLoaded."""
    module_name, separator, attribute = name.partition(":")
    if not (module_name and separator and attribute):
        hint = f"perhaps {_guessed(name)}"
        raise AppNotLoaded(f"{name!r} is no application: module:app is needed", hint, is_misnamed=True)
    found = _module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise AppNotLoaded(f"{module_name} has no {attribute!r}", _apps_in(module_name))
        found = getattr(found, part)
    if not isinstance(found, App):
        raise AppNotLoaded(f"{name} is of type {type(found).__name__}, not a tidewheel.App", _apps_in(module_name))
    return found


def _module(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            where = (
                f"modules are looked for in {Path.cwd()} first; run from the folder that holds {name.partition('.')[0]}"
            )
            raise AppNotLoaded(f"there is no module {error.name!r}", where) from error
        raise AppNotLoaded(_told(name, error), "install it into the environment that tidewheel runs in") from error
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise AppNotLoaded(_told(name, error)) from error


def _told(name: str, error: BaseException) -> str:
    place = ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})"
        reason = error.msg
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        reason = str(error)
    return f"{name} cannot be imported: {type(error).__name__}: {reason}{place}"


_HERE = Path(__file__).resolve().parent
_OURS = tuple(str(_HERE.parent / name) for name in ("tidewheel", "workers", "scheduler", "schemas"))


def _is_machinery(filename: str) -> bool:
    # The user's own line is what helps, not the one in here that found the mistake.
    return filename.startswith("<frozen") or "importlib" in filename or filename.startswith(_OURS)


def _apps_in(module_name: str) -> str:
    module = sys.modules.get(module_name)
    names = [name for name, value in vars(module).items() if isinstance(value, App)] if module else []
    if names:
        return f"apps in it: {', '.join(f'{module_name}:{name}' for name in names[:5])}"
    return f"there is no App in it; write: app = tidewheel.App() in {module_name}"


def _guessed(name: str) -> str:
    module = name.partition(":")[0].removesuffix(".py").strip("./").replace("/", ".") or "shop.tasks"
    return f"{module}:app"
