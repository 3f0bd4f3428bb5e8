"""Where the settings of a cluster come from: the command line, the environment, a TOML file, defaults; in that order.

Each setting has a dotted name (`kafka.tls.ca`), which is its place in the file and, in capitals after `TIDEWHEEL_`, the
name of its variable (`TIDEWHEEL_KAFKA_TLS_CA`). What is not known, in either place, is an error: a setting that was
misspelt must not quietly be the default.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidewheel.cluster_settings import (
    PREFIX,
    ClusterSettings,
    Known,
    Problem,
    SettingsError,
    contradictions,
    known_settings,
)

CONFIG_VARIABLE = "TIDEWHEEL_CONFIG"
# Variables of ours that are no settings of a cluster: those of clients and of the command line itself.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "TIDEWHEEL_SERVER", "TIDEWHEEL_TIMEOUT_S", "TIDEWHEEL_DEBUG"})
_TEST_VARIABLES = ("TIDEWHEEL_TEST_", "TIDEWHEEL_GOLDEN")
HIDDEN = "(hidden)"
_USER = re.compile(r"//[^/@]*@")  # of a URL


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Settings, and where each that is not the default came from, by dotted name.

    With `config` and `overrides` a child of this process comes to the same settings, without being told a secret.
    """

    settings: ClusterSettings
    origins: Mapping[str, str]
    config: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def shown(self) -> Iterator[tuple[str, Any, str]]:
        """Name, value and origin of each setting; secrets are hidden."""
        for known in known_settings().values():
            value: Any = self.settings
            for part in known.name.split("."):
                value = getattr(value, part)
            yield known.name, _shown(known, value), self.origins.get(known.name, "default")


def _shown(known: Known, value: Any) -> Any:
    if known.is_secret and value is not None:
        return HIDDEN
    if known.is_table:
        return {name: HIDDEN if _is_secret_property(name) else one for name, one in value.items()}
    if known.name == "registry" and value is not None:
        return _USER.sub(f"//{HIDDEN}@", value)
    return str(value) if isinstance(value, Path) else value


def _is_secret_property(name: str) -> bool:
    return any(part in name for part in ("password", "secret", "token", "jaas", ".pem", "oauthbearer.config"))


class _Given(NamedTuple):
    value: Any
    where: str


def load_settings(
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """The settings in force. `overrides` are those of the command line, by dotted name; None is not given.

    Without `config` the file is the one that TIDEWHEEL_CONFIG names, if it does. Raises SettingsError.
    """
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    problems: list[Problem] = []
    given = dict(_from_file(config, problems)) if config is not None else {}
    given |= dict(_from_environment(environ, problems))
    options = {name: value for name, value in (overrides or {}).items() if value is not None}
    given |= {name: _Given(value, f"--{name.rpartition('.')[2].replace('_', '-')}") for name, value in options.items()}
    settings = _validated(given, problems)
    if problems or settings is None:
        raise SettingsError(problems)
    origins = {name: one.where for name, one in given.items()}
    return Loaded(settings=settings, origins=origins, config=config, overrides=options)


def _from_file(config: Path, problems: list[Problem]) -> Iterator[tuple[str, _Given]]:
    try:
        document = tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem("config", str(config), f"cannot be read ({error})", "a TOML file"))
        return
    except tomllib.TOMLDecodeError as error:
        problems.append(Problem("config", str(config), f"is not TOML: {error}", "a TOML file"))
        return
    for name, value in _leaves(document, ""):
        where = f"{name} in {config}"
        if name in known_settings():
            yield name, _Given(value, where)
        else:
            problems.append(Problem(name, where, "is no setting", _did_you_mean(name, known_settings())))


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{prefix}{key}"
        known = known_settings().get(name)
        if isinstance(value, dict) and (known is None or not known.is_table):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _from_environment(environ: Mapping[str, str], problems: list[Problem]) -> Iterator[tuple[str, _Given]]:
    by_variable = {known.variable: known.name for known in known_settings().values()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable.startswith(_TEST_VARIABLES) or not environ[variable]:
            continue  # compose files set variables to nothing where they mean that they are not set
        if variable in by_variable:
            yield by_variable[variable], _Given(environ[variable], variable)
        elif variable not in OTHER_VARIABLES:
            hint = _did_you_mean(variable, (*by_variable, *OTHER_VARIABLES))
            problems.append(Problem(variable, variable, "is no variable of tidewheel", hint))


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else "docs/CONFIGURATION.md lists what there is"


def _validated(given: Mapping[str, _Given], problems: list[Problem]) -> ClusterSettings | None:
    nested: dict[str, Any] = {}
    for name, one in given.items():
        *sections, field = name.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        table[field] = one.value
    try:
        settings = ClusterSettings.model_validate(nested)
    except ValidationError as error:
        problems += _problems(error.errors(include_url=False, include_context=False), given)
        return None
    problems += [
        Problem(one.name, given[one.name].where if one.name in given else one.name, one.message, one.allowed)
        for one in contradictions(settings)
    ]
    return settings


def _problems(errors: Iterable[ErrorDetails], given: Mapping[str, _Given]) -> list[Problem]:
    """One problem for each setting: a union of types would otherwise complain once for each of them."""
    by_name: dict[str, Problem] = {}
    for error in errors:
        name = _setting_at(error["loc"])
        known, one = known_settings()[name], given[name]
        own = error["type"] == "value_error"
        message = error["msg"].removeprefix("Value error, ") if own else f"{_told(known, one.value)} is not allowed"
        by_name.setdefault(name, Problem(name, one.where, message, known.allowed))
    return list(by_name.values())


def _setting_at(location: tuple[int | str, ...]) -> str:
    """The setting that a place in the model belongs to: below it may be keys of a table, or members of a union."""
    parts = [str(part) for part in location]
    return next(name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in known_settings())


def _told(known: Known, value: Any) -> str:
    return HIDDEN if known.is_secret or known.is_table else repr(_USER.sub(f"//{HIDDEN}@", str(value)))
