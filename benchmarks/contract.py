"""What every benchmark has in common: options with bounds, figures, and how the figures of repeats become one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

Seed = Annotated[int, Meta(ge=0, description="of what is drawn at random")]
Say = Callable[[str], None]  # tells how far a long run has come

# What must not happen is added up over the repeats, so that no median hides it.
SUMMED = frozenset(
    {"count", "missing", "duplicates", "early", "errors", "lost", "unfinished", "decided_twice", "duplicate_starts"}
    | {"accepted_late", "not_shown", "doubled", "acknowledged", "void", "accepted_while_down", "errors_while_down"}
)


class NothingMeasured(Exception):
    """Not one of the things to be timed happened, so that there is no figure."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a benchmark is run."""

    data: Annotated[str, Meta(min_length=1, description="folder for the files; on a disk, or fsync costs nothing")] = (
        ".data/benchmarks"
    )
    shards: Annotated[int, Meta(ge=1, le=64, description="shards of the engine")] = 4
    repeats: Annotated[int, Meta(ge=1, le=100, description="runs, each with a fresh engine; the median counts")] = 1


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run found. `missing`, `duplicates` and `early` count starts of handlers, those of the warm-up too.

    `cpu_us_per_task` is the processor time of the engine's processes; in process that includes the submitter.
    """

    count: int
    missing: int
    duplicates: int
    early: int
    cpu_us_per_task: float


class Spread(msgspec.Struct, frozen=True):
    """How far the repeats lie apart."""

    min: float
    median: float
    max: float


O = TypeVar("O", bound=Options)  # noqa: E741 (the options of a benchmark)


@dataclass(frozen=True)
class Benchmark(Generic[O]):
    """A benchmark by its name. `run` is given an empty folder and measures once."""

    name: str
    summary: str
    options: type[O]
    run: Callable[[O, Path, Say], Figures]


class Quantiles(NamedTuple):
    """Of durations, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


def quantiles(durations_ns: Iterable[int]) -> Quantiles:
    """By nearest rank, so that each is a duration that was measured. Raises NothingMeasured."""
    ranked = sorted(durations_ns)
    if not ranked:
        raise NothingMeasured("nothing was timed: no task was started, or no call answered")
    at = [ranked[max(0, math.ceil(share * len(ranked)) - 1)] / 1e6 for share in (0.5, 0.95, 0.99, 1.0)]
    return Quantiles(*(round(value, 3) for value in at))


def combine(runs: Sequence[Figures]) -> tuple[dict[str, Any], dict[str, Spread]]:
    """The figures of all runs as one, and the noise of those that were measured more than once."""
    figures: dict[str, Any] = {}
    noise: dict[str, Spread] = {}
    for name in type(runs[0]).__struct_fields__:
        values = [value for run in runs if (value := getattr(run, name)) is not None]
        figures[name] = _as_one(name, values)
        if len(values) > 1 and name not in SUMMED:
            noise[name] = Spread(min(values), statistics.median(values), max(values))
    return figures, noise


def _as_one(name: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    if name in SUMMED:
        return sum(values)
    if "max" in name.split("_"):
        return max(values)
    return round(statistics.median(values), 3)
