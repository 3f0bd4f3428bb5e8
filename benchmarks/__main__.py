"""`python -m benchmarks NAME`: one benchmark; `python -m benchmarks all`: all of them, and the page of results."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import (
    api,
    cluster,
    cluster_backlog,
    cluster_dispatch,
    cluster_losses,
    cluster_schedules,
    cluster_timers,
    embedded_dispatch,
    on_kafka,
    projection,
    scheduler_loss,
    start_latency,
    throughput,
    timer_accuracy,
    waiting,
)
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Options, Say, Spread, combine
from benchmarks.engine_process import quieten
from benchmarks.machine import filesystem, versions
from benchmarks.results import REASONS, RESULTS, page, run_all
from benchmarks.stage import PAYLOAD_BYTES, fresh_folder
from schemas.errors import TidewheelIOError
from tidewheel import EngineSettings, TidewheelError

ENGINES = ("embedded", "kafka")
_EMBEDDED = (start_latency, throughput, timer_accuracy, waiting, scheduler_loss, api, projection)
BENCHMARKS: Mapping[str, Mapping[str, Benchmark[Any]]] = {
    "embedded": {
        benchmark.name: benchmark
        for benchmark in (*(module.BENCHMARK for module in _EMBEDDED), *embedded_dispatch.BENCHMARKS)
    },
    "kafka": {
        benchmark.name: benchmark
        for module in (on_kafka, cluster_losses, cluster_timers, cluster_schedules, cluster_dispatch, cluster_backlog)
        for benchmark in module.BENCHMARKS
    },
}


@dataclass(frozen=True)
class Report:
    """What a benchmark found, with all that is needed to judge and to repeat it."""

    benchmark: str
    engine: str
    figures: Mapping[str, Any]
    settings: Mapping[str, Any]
    noise: Mapping[str, Spread]
    took_s: float

    def as_json(self) -> str:
        """One line."""
        content = {
            "benchmark": self.benchmark,
            "engine": self.engine,
            **self.figures,
            "noise": self.noise,
            "settings": self.settings,
            "versions": versions(),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "took_s": self.took_s,
        }
        return msgspec.json.encode(content).decode()

    def as_table(self) -> Table:
        """For people."""
        table = Table(caption=f"{self.engine} engine", caption_justify="left")
        table.add_column(self.benchmark)
        table.add_column("measured", justify="right")
        if self.noise:
            table.add_column("least", justify="right")
            table.add_column("most", justify="right")
        for name, value in self.figures.items():
            spread = self.noise.get(name)
            range_ = (f"{spread.min:,}", f"{spread.max:,}") if spread else ("", "") if self.noise else ()
            table.add_row(name, "unknown" if value is None else f"{value:,}", *range_)
        return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the arguments say; the code to exit with."""
    given = vars(_parser(_engine_of(arguments)).parse_args(arguments))
    name, engine, is_json = given.pop("name"), given.pop("engine"), given.pop("json")
    quieten()
    errors = Console(stderr=True, highlight=False, markup=False)
    say: Say = errors.print if name == "all" or not is_json else lambda text: None
    try:
        if name == "all":
            return _all(engine, is_json, say, **given)
        benchmark = BENCHMARKS[engine][name]
        report = run(benchmark, msgspec.convert(given, benchmark.options), say, engine=engine)
    except msgspec.ValidationError as error:
        print(f"{REASONS[1]}{error}", file=sys.stderr)
        return 2
    except (NothingMeasured, ChildProcessError, TidewheelIOError, TidewheelError, ExceptionGroup) as error:
        print(f"{REASONS[0]}{_first_reason(error)}", file=sys.stderr)
        return 1
    if is_json:
        print(report.as_json())
    else:
        Console().print(report.as_table())
    return 0


@contextmanager
def _services(engine: str, data: str) -> Iterator[None]:
    """Kafka and Cassandra for all benchmarks of a page, each of which is a process of its own."""
    if engine == "embedded":
        yield
        return
    with cluster.services(cluster.ClusterOptions(data=data)) as addresses:
        before = {name: os.environ.get(name) for name in addresses}
        os.environ.update(addresses)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _first_reason(error: Exception) -> str:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def run(benchmark: Benchmark[Any], options: Options, say: Say, *, engine: str = "embedded") -> Report:
    """Measure as often as `options.repeats` says, each time in a fresh folder."""
    begun_s = time.monotonic()
    parent = Path(options.data)
    if filesystem(parent) == "tmpfs":
        say(f"{parent} is in memory: what is measured there is no figure of a durable engine")
    runs: list[Figures] = []
    for number in range(1, options.repeats + 1):
        if options.repeats > 1:
            say(f"run {number} of {options.repeats}")
        with fresh_folder(parent, benchmark.name) as folder:
            runs.append(benchmark.run(options, folder, say))
    figures, noise = combine(runs)
    always = {
        "payload": PAYLOAD_BYTES,
        "slots": EngineSettings().slots,
        "fsync": True,
        "filesystem": filesystem(parent),
    }
    settings = always | msgspec.to_builtins(options)
    return Report(benchmark.name, engine, figures, settings, noise, round(time.monotonic() - begun_s, 1))


def _all(engine: str, is_json: bool, say: Say, *, short: bool, output: Path, data: str) -> int:
    with _services(engine, data):
        outcomes = run_all(engine=engine, is_short=short, say=say)
    output.write_text(page(outcomes, is_short=short, folder=Path(data), engine=engine), encoding="utf-8")
    say(f"written to {output}")
    if is_json:
        print(msgspec.json.encode([outcome.found for outcome in outcomes]).decode())
    return 1 if any(outcome.failure for outcome in outcomes) else 0


# --- the command line -------------------------------------------------------------------------------------------------


def _engine_of(arguments: Sequence[str] | None) -> str:
    """The engine that is named: it says which benchmarks there are, and which options they have."""
    only = argparse.ArgumentParser(add_help=False)
    only.add_argument("--engine", default=ENGINES[0])
    engine: str = only.parse_known_args(arguments)[0].engine
    return engine if engine in ENGINES else ENGINES[0]


def _parser(engine: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what the project claims.")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for benchmark in BENCHMARKS[engine].values():
        one = names.add_parser(benchmark.name, help=benchmark.summary)
        _add_common(one)
        for option, type_ in get_type_hints(benchmark.options, include_extras=True).items():
            _add_option(one, benchmark.options, option, type_)
    every = names.add_parser("all", help=f"all of them; writes {RESULTS[engine].name}")
    _add_common(every)
    every.add_argument(
        "--short", action="store_true", help="the order of magnitude, in minutes; without it an hour and more on Kafka"
    )
    every.add_argument("--output", type=Path, default=RESULTS[engine], help="where the page goes")
    every.add_argument("--data", default=".data/benchmarks", help="a folder on the disk that is described there")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what is measured")
    parser.add_argument("--json", action="store_true", help="one object on the last line instead of a table")


def _add_option(parser: argparse.ArgumentParser, options: type[Options], name: str, type_: Any) -> None:
    kind, meta = get_args(type_) if get_origin(type_) is Annotated else (type_, msgspec.Meta())
    default = next(field.default for field in msgspec.structs.fields(options) if field.name == name)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        dest=name,
        type=type(choices[0]) if choices else kind,
        choices=choices or None,
        default=default,
        help=f"{meta.description} (default: {default})",
    )


if __name__ == "__main__":
    sys.exit(main())
