"""What topics and groups are called on the brokers, which nothing above the adapter knows."""

from __future__ import annotations

import hashlib
import re

NAME_MAX = 249  # of a topic on a broker
_PLAIN = re.compile(r"[A-Za-z0-9._-]*")
_MARK = "_."  # a name that has it is not left as it is, so that no plain name is equal to a made one
_DIGITS = 16


class Names:
    """From our names to the brokers' and back.

    A name has the prefix. One that brokers would not take (a queue may have a colon, and be long) is made from what
    can stay of it and a digest of the whole.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._physical: dict[str, str] = {}
        self._logical: dict[str, str] = {}

    def physical(self, name: str) -> str:
        """What a topic or group is called on the brokers."""
        found = self._physical.get(name)
        if found is None:
            found = self._physical[name] = self._made(name)
            self._logical[found] = name
        return found

    def logical(self, name: str) -> str:
        """What we call a topic of the brokers, of which we asked for the name before."""
        return self._logical[name]

    def _made(self, name: str) -> str:
        found = f"{self._prefix}{name}"
        if not _PLAIN.fullmatch(name) or _MARK in name or len(found) > NAME_MAX:
            digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
            kept = re.sub(r"[^A-Za-z0-9.-]", "-", name)[: NAME_MAX - len(self._prefix) - len(_MARK) - _DIGITS]
            found = f"{self._prefix}{kept}{_MARK}{digest}"
        return found
