"""Topics and groups have a prefix on the broker, which nothing above the adapter knows."""

from __future__ import annotations


class Names:
    """From our names to the broker's and back."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def physical(self, name: str) -> str:
        """What a topic or group is called on the broker."""
        return f"{self._prefix}{name}"

    def logical(self, name: str) -> str:
        """What we call a topic of the broker."""
        return name.removeprefix(self._prefix)
