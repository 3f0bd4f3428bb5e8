"""`python -m docs.limits` writes the table of limits in docs/GUIDE.md from schemas/limits.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from schemas import limits

PATH = Path(__file__).parent / "GUIDE.md"

_BLOCK = re.compile(r"(<!-- limits: .*? -->\n).*?(<!-- /limits -->)", re.DOTALL)
_LINE = re.compile(r"^([A-Z_]+) = .*?(?:  # (.*))?$", re.MULTILINE)
_UNITS = (("_US_MAX", "µs"), ("_MS_MAX", "ms"))
_PLAIN = {"JSON_DEPTH_MAX", "JSON_INTEGER_DIGITS_MAX", "BULK_MAX", "PAGE_MAX", "ATTEMPTS_MAX", "REQUESTS_PENDING_MAX"}


def text() -> str:
    """The content of docs/GUIDE.md."""
    table = "\n".join(["| Limit | Value | Why |", "| --- | --- | --- |", *_rows()])
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", PATH.read_text(encoding="utf-8"))


def _rows() -> Iterator[str]:
    for name, reason in _LINE.findall(Path(limits.__file__).read_text(encoding="utf-8")):
        value: int = getattr(limits, name)
        unit = next((unit for end, unit in _UNITS if name.endswith(end)), "" if name in _PLAIN else "bytes")
        yield f"| `{name}` | {value:,}{' ' if unit else ''}{unit} | {reason} |"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
