"""What /healthz answers: progress of the parts, not merely that the process lives."""

from __future__ import annotations

import msgspec


class PartHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the process. `detail` says what it does, or why it is not well."""

    name: str
    is_ok: bool
    detail: str = ""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """All parts; one that made no progress makes the whole unwell."""

    parts: tuple[PartHealth, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is not well; empty if all is."""
        return tuple(f"{part.name}: {part.detail}" for part in self.parts if not part.is_ok)


class HealthView(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /healthz."""

    status: str
    reasons: tuple[str, ...]
    parts: tuple[PartHealth, ...]


def health_view(health: Health) -> HealthView:
    """The body for a state of health."""
    return HealthView(status="failing" if health.reasons else "ok", reasons=health.reasons, parts=health.parts)
