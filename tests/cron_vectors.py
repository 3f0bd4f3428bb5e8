"""The answers that were agreed on: vectors of expressions that are right, and expressions that are to be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scheduler.instants import format_instant, parse_instant

DATA = Path(__file__).parent / "cases" / "data"
VECTORS: list[dict[str, Any]] = json.loads((DATA / "cron_vectors.json").read_text(encoding="utf-8"))
INVALID: list[dict[str, Any]] = json.loads((DATA / "cron_invalid.json").read_text(encoding="utf-8"))
ZONES = sorted({vector["tz"] for vector in VECTORS})


def us(text: str) -> int:
    """The instant of a text such as 2026-03-08T07:00Z."""
    return parse_instant(text if text.count(":") == 2 else text.replace("Z", ":00Z"))


def shown(instant_us: int | None) -> str:
    """An instant as it is written in the vectors."""
    return "none" if instant_us is None else format_instant(instant_us).replace(".000000Z", "Z")
