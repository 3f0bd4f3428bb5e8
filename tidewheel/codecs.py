"""Which schema ids a process of ours writes and reads with."""

from __future__ import annotations

import contextlib

from infra.registry import RegistryIds
from schemas.codec import Codec


def codec_of(registry: str | None, files: contextlib.ExitStack) -> Codec:
    """The codec with the ids of the registry at that URL, or with those built in. Raises Retriable, Fatal."""
    if registry is None:
        return Codec.builtin()
    ids = RegistryIds(registry)
    files.callback(ids.close)
    return Codec(ids)
