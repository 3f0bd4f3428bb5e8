"""The limits that an application declares in its code, and what it can do with limits by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from scheduler.limit_service import LimitView, declaration_of, declared_limit
from scheduler.refusals import RefusalKind, Refused
from scheduler.submission import without_none
from tidewheel.backend import Doable, LimitBackend
from tidewheel.handles import translated
from workers.errors import RegistrationError

if TYPE_CHECKING:
    from tidewheel.app import App

T = TypeVar("T")


class LimitsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a synchronisation did, by name."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()


class AppLimits:
    """The limits that an app declares, and what can be done with limits by their names. Calls block."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._declared: dict[str, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._declared)

    def __iter__(self) -> Iterator[str]:
        """The names of those that are declared."""
        return iter(self._declared)

    def declare(self, name: str, fields: Mapping[str, Any]) -> None:
        """Keep a limit for the next `sync`. RegistrationError: it is wrong, or its name is taken."""
        fields = without_none(fields)
        try:
            declared_limit(name, declaration_of(fields), 0)
        except Refused as refused:
            raise RegistrationError(f"limit {name!r}: {refused}") from refused
        if name in self._declared:
            raise RegistrationError(f"limit {name!r} is declared twice: give one another name")
        self._declared[name] = fields

    def sync(self) -> LimitsReport:
        """Let limits hold as they are declared. Those that are declared no more stay: `remove` ends them."""
        known = {one.name: one for one in self.all()}
        done: dict[str, list[str]] = {"created": [], "changed": [], "unchanged": []}
        for name, fields in self._declared.items():
            before, after = known.get(name), self.set(name, **fields)
            what = "created" if before is None else "unchanged" if before.set_at == after.set_at else "changed"
            done[what].append(name)
        return LimitsReport(**{what: tuple(names) for what, names in done.items()})

    def all(self) -> list[LimitView]:
        """All limits of the scheduler."""
        return list(self._run(lambda: self._backend.limits()).limits)

    def get(self, name: str) -> LimitView | None:
        """How a limit stands; None: there is none of this name."""
        try:
            return self._backend.limit(name).run()
        except Refused as refused:
            if refused.refusal.kind is RefusalKind.NOT_FOUND:
                return None
            raise translated(refused) from refused

    def set(self, name: str, **fields: Any) -> LimitView:
        """Let a limit hold from now on: the fields of PUT /api/v1/limits/{name}."""
        return self._run(lambda: self._backend.set_limit(name, fields))

    def remove(self, name: str) -> None:
        """Let a limit hold no more."""
        self._run(lambda: self._backend.remove_limit(name))

    @property
    def _backend(self) -> LimitBackend:
        return self._app.backend.limits

    def _run(self, operation: Callable[[], Doable[T]]) -> T:
        try:
            return operation().run()
        except Refused as refused:
            raise translated(refused) from refused
