"""Bytes of every released version of every message, stored when it was released, mean today what they meant then.

`TIDEWHEEL_GOLDEN=write pytest tests/golden` adds the samples of new versions; those that are there stay as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.catalog import newest, releases
from schemas.codec import Codec
from tests.samples import named_samples

FOLDER = Path(__file__).parent / "messages"
CODEC = Codec.builtin()


def _meaning(message: Any) -> Any:
    """The value as JSON; of an event also which kind of body it has."""
    body = getattr(message, "body", None)
    return json.loads(msgspec.json.encode(message)) | ({"body_type": type(body).__name__} if body is not None else {})


def _write_missing() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, release in newest().items():
        path = FOLDER / f"{name}.{release.version}.json"
        if path.exists():
            continue
        samples = {label: one for label, one in named_samples().items() if type(one).__name__ == name}
        stored = {
            label: {"bytes": CODEC.encode(message).hex(), "means": _meaning(message)}
            for label, message in samples.items()
        }
        path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", "utf-8")


if os.environ.get("TIDEWHEEL_GOLDEN") == "write":
    _write_missing()


@pytest.mark.parametrize("release", releases(), ids=lambda one: f"{one.name}.{one.version}")
def test_stored_bytes_mean_what_they_meant(release: Any) -> None:
    path = FOLDER / f"{release.name}.{release.version}.json"
    assert path.exists(), "TIDEWHEEL_GOLDEN=write pytest tests/golden"
    stored = json.loads(path.read_text("utf-8"))
    assert stored
    for label, sample in stored.items():
        value = bytes.fromhex(sample["bytes"])
        assert value[:5] == b"\0" + release.schema_id.to_bytes(4, "big"), label
        _assert_holds(_meaning(CODEC.decode(value)), sample["means"], label)


def _assert_holds(value: Any, meaning: Any, where: str) -> None:
    """What was stored is there; a field that a later version added may be there too."""
    if isinstance(meaning, dict):
        assert isinstance(value, dict), where
        for key, one in meaning.items():
            assert key in value, f"{where}.{key}"
            _assert_holds(value[key], one, f"{where}.{key}")
    elif isinstance(meaning, list):
        assert isinstance(value, list) and len(value) == len(meaning), where
        for number, one in enumerate(meaning):
            _assert_holds(value[number], one, f"{where}[{number}]")
    else:
        assert value == meaning, where
