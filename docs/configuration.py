"""`python -m docs.configuration` writes the tables in docs/CONFIGURATION.md from the settings themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from infra.kafka.settings import REFUSED_PROPERTIES
from tidewheel.cluster_settings import Known, known_settings

PATH = Path(__file__).parent / "CONFIGURATION.md"

_BLOCK = re.compile(r"(<!-- (settings|refused): .*? -->\n).*?(<!-- /\2 -->)", re.DOTALL)
_TITLES = {
    "": "The cluster",
    "kafka": "Kafka",
    "kafka.sasl": "SASL",
    "kafka.tls": "TLS to Kafka",
    "cassandra": "Cassandra",
    "cassandra.tls": "TLS to Cassandra",
    "api": "The API",
    "health": "Health and metrics",
    "log": "Logs",
    "worker": "Workers",
    "admission": "What is let in",
    "priorities": "Shares of the priorities",
}


def text() -> str:
    """The content of docs/CONFIGURATION.md."""
    blocks: Mapping[str, Iterable[str]] = {"settings": _settings(), "refused": _refused()}

    def filled(found: re.Match[str]) -> str:
        lines = "\n".join(blocks[found[2]])
        return f"{found[1]}\n{lines}\n\n{found[3]}"

    return _BLOCK.sub(filled, PATH.read_text(encoding="utf-8"))


def _settings() -> Iterator[str]:
    by_section = sorted(known_settings().values(), key=lambda known: list(_TITLES).index(_section(known)))
    for index, (section, known) in enumerate(groupby(by_section, key=_section)):
        if index:
            yield ""
        yield from (f"### {_TITLES[section]}", "", "| Setting | Variable | Default | Meaning | Allowed |")
        yield "| --- | --- | --- | --- | --- |"
        for one in known:
            cells = (f"`{one.name}`", f"`{one.variable}`", _default(one.default), one.meaning, one.allowed)
            yield f"| {' | '.join(cells)} |"


def _section(known: Known) -> str:
    return known.name.rpartition(".")[0]


def _default(value: Any) -> str:
    if value is None or value in ((), {}):
        return "-"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value:g}`" if isinstance(value, float) and value < 1e6 else f"`{value}`"


def _refused() -> Iterator[str]:
    yield from ("| Property | Why |", "| --- | --- |")
    for name, reason in REFUSED_PROPERTIES.items():
        yield f"| `{name}` | {reason} |"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
