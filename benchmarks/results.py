"""All benchmarks one after the other, each in a process of its own, and the page that shows what they found."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.contract import Say
from benchmarks.machine import machine, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {
    "embedded": Path(__file__).with_name("RESULTS.md"),
    "kafka": Path(__file__).with_name("RESULTS-kafka.md"),
}
RUN_S = 5_400.0  # for one benchmark; the longest takes half an hour
END_S = 120.0  # for a benchmark that is told to end: it has services to stop
REASONS = ("no figures: ", "an option is not allowed: ")
REASON_MAX = 300  # characters of what a benchmark said last


@dataclass(frozen=True)
class Goal:
    """A bound on a figure: `at_most`, or `at_least`."""

    figure: str
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        if self.at_most is not None:
            return "none" if self.at_most == 0 else f"≤ {_number(self.at_most)}"
        return f"≥ {_number(self.at_least)}"

    def is_met(self, value: float) -> bool:
        """Whether it is within the bound."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


@dataclass(frozen=True)
class Case:
    """One run of a benchmark on the page. `peers` is a column of PEERS."""

    benchmark: str
    title: str
    short: str
    full: str
    goals: Sequence[Goal]
    shown: Sequence[str] = ()
    peers: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its object, or why there is none."""

    case: Case
    command: str
    found: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None

    def missed(self) -> list[Goal]:
        """The goals that are not met."""
        return [goal for goal in self.case.goals if self.failure or not goal.is_met(self.found[goal.figure])]


NONE = 0.0
STARTS = (Goal("missing", at_most=NONE), Goal("duplicates", at_most=NONE), Goal("early", at_most=NONE))
_START_LATENCY = (Goal("p50_ms", at_most=1.5), Goal("p99_ms", at_most=6.0), *STARTS)
_THROUGHPUT_SHOWN = (
    "submit_per_s",
    "log_bytes_per_task",
    "cpu_us_per_task",
    "submit_cpu_us",
    "scheduler_cpu_us",
    "worker_cpu_us",
)
_NOTHING_LOST = tuple(Goal(figure, at_most=NONE) for figure in ("lost", "decided_twice", "missing", "early"))
_LOSS_SHOWN = ("acknowledged", "errors", "void", "duplicates")
_START_SHOWN = ("max_ms", "from_intended_p99_ms", "accept_p50_ms", "accept_p99_ms", "cpu_us_per_task")

_SHARES = (
    Goal("high_percent", at_least=67.0),
    Goal("medium_percent", at_least=22.0),
    Goal("low_percent", at_least=2.0),
    *STARTS,
)
_SHARES_SHOWN = ("high_p50_ms", "high_max_ms", "low_starved_ms")
_TENANTS = (Goal("p99_ratio", at_most=2.0), *STARTS)
_TENANTS_SHOWN = (
    "p50_alone_ms",
    "p99_alone_ms",
    "p50_shared_ms",
    "p99_shared_ms",
    "flood_p99_ms",
    "cpu_us_per_task",
)
_OVERLOAD = (Goal("lost", at_most=NONE), Goal("errors", at_most=NONE), Goal("recovery_s", at_most=5.0), *STARTS)
_OVERLOAD_SHOWN = ("accepted", "refused", "accepted_per_s", "accepted_per_s_last", "before_p99_ms", "rss_mb_max")

_PRIORITY_CASE = Case(
    "priority",
    "Shares of the priorities with a backlog of each, and urgent tasks behind low ones",
    "--backlog 5000 --urgent 5",
    "--backlog 60000 --urgent 50",
    _SHARES,
    _SHARES_SHOWN,
)
_TENANTS_CASE = Case(
    "tenants",
    "Ten tenants, one of which submits a hundred times as much",
    "--seconds 5",
    "--seconds 60",
    _TENANTS,
    _TENANTS_SHOWN,
)

_EMBEDDED = (
    Case(
        "start_latency",
        "From submission to start, at 50 tasks a second",
        "--rate 50 --seconds 6",
        "--rate 50 --seconds 60 --repeats 3",
        _START_LATENCY,
        _START_SHOWN,
        "start p50 / p99 ms at 50/s",
    ),
    Case(
        "start_latency",
        "From submission to start, at 500 tasks a second",
        "--rate 500 --seconds 6",
        "--rate 500 --seconds 60 --repeats 3",
        _START_LATENCY,
        _START_SHOWN,
        "start p50 / p99 ms at 500/s",
    ),
    Case(
        "timer_accuracy",
        "How late timers are: 200 become due in a second",
        "--timers 600",
        "--timers 2000 --repeats 3",
        (Goal("p99_ms", at_most=6.0), *STARTS),
        ("p50_ms", "max_ms", "min_ms", "accepted_late", "cpu_us_per_task"),
        "timers p50 / p99 ms",
    ),
    Case(
        "throughput",
        "Tasks a second, from submission to success",
        "--tasks 10000",
        "--tasks 50000 --repeats 3",
        (Goal("tasks_per_s", at_least=4_000.0), Goal("submit_alone_per_s", at_least=8_000.0), *STARTS),
        (
            "submit_per_s",
            "visible_per_s",
            "single_tasks_per_s",
            "single_submit_per_s",
            "log_bytes_per_task",
            "disk_bytes_per_task",
            "cpu_us_per_task",
        ),
        "tasks/s",
    ),
    Case(
        "limits",
        "Limits: a rate of 100/s, and what two limits on each task cost",
        "--seconds 5 --tasks 5000",
        "--seconds 60 --tasks 50000",
        (
            Goal("used_ratio", at_least=0.98),
            Goal("exceeded", at_most=NONE),
            Goal("throughput_ratio", at_least=0.9),
            *STARTS,
        ),
        ("tasks_per_s", "limited_tasks_per_s", "cpu_us_per_task"),
    ),
    _PRIORITY_CASE,
    _TENANTS_CASE,
    Case(
        "overload",
        "Three times the submissions that can be sustained, for a minute (10 s in the short form)",
        "--seconds 10 --rate 1000",
        "--seconds 60 --rate 2000",
        _OVERLOAD,
        _OVERLOAD_SHOWN,
    ),
    Case(
        "scheduler_loss",
        "kill -9 under load",
        "--rounds 3",
        "--rounds 20",
        (
            Goal("lost", at_most=NONE),
            Goal("unfinished", at_most=NONE),
            Goal("decided_twice", at_most=NONE),
            Goal("early", at_most=NONE),
        ),
        ("restart_s_p50", "restart_s_max", "load_s_max", "count", "duplicate_starts", "posted_again"),
    ),
    Case(
        "waiting",
        "Tasks of 1 KiB that wait for days",
        "--tasks 20000 --restarts 1",
        "--tasks 100000",
        (
            Goal("scheduler_rss_mb", at_most=400.0),
            Goal("restart_s_max", at_most=10.0),
            Goal("missing", at_most=NONE),
            Goal("early", at_most=NONE),
        ),
        ("submit_per_s", "scheduler_rss_mb_max", "restart_rss_mb", "load_s", "bytes_per_task", "rewrites_per_task"),
    ),
    *(
        Case(
            "api",
            f"REST: {route}",
            f"--route {route} --seconds 3",
            f"--route {route} --seconds 20 --repeats 3",
            (Goal("errors", at_most=NONE), Goal("missing", at_most=NONE), Goal("duplicates", at_most=NONE)),
            ("per_s", "p50_ms", "p99_ms", "rate_per_s", "cpu_us_per_task", "client_cpu_us_per_call"),
        )
        for route in ("submit", "bulk", "get")
    ),
    Case(
        "projection",
        "How far the view lags, at 500 tasks a second",
        "--seconds 4",
        "--seconds 30 --repeats 3",
        (Goal("not_shown", at_most=NONE), Goal("missing", at_most=NONE)),
        ("lag_p50_ms", "lag_p99_ms", "lag_max_ms", "rows_per_s", "events_per_s"),
    ),
)

_KAFKA = (
    *(
        Case(
            "start_latency",
            f"From submission to start, at {rate} tasks a second, without a projector",
            f"--rate {rate} --seconds 10 --warm-up-s 15 --projectors 0",
            f"--rate {rate} --seconds 30 --warm-up-s 20 --projectors 0 --repeats 2",
            (*goals, *STARTS),
            _START_SHOWN if goals else ("p50_ms", "p99_ms", *_START_SHOWN),
            f"start p50 / p99 ms at {rate}/s",
        )
        for rate, goals in ((50, ()), (500, (Goal("p50_ms", at_most=3.0), Goal("p99_ms", at_most=12.0))))
    ),
    Case(
        "start_latency",
        "The same at 500 tasks a second, with projection to Cassandra",
        "--rate 500 --seconds 10 --warm-up-s 15",
        "--rate 500 --seconds 30 --warm-up-s 20 --repeats 2",
        STARTS,
        ("p50_ms", "p99_ms", *_START_SHOWN),
    ),
    Case(
        "throughput",
        "Tasks a second, from submission to success, without a projector",
        "--tasks 20000 --projectors 0",
        "--tasks 100000 --projectors 0 --repeats 2",
        (Goal("tasks_per_s", at_least=6_000.0), *STARTS),
        _THROUGHPUT_SHOWN,
        "tasks/s",
    ),
    Case(
        "throughput",
        "The same with two schedulers",
        "--tasks 20000 --projectors 0 --schedulers 2",
        "--tasks 100000 --projectors 0 --schedulers 2 --repeats 2",
        STARTS,
        ("tasks_per_s", *_THROUGHPUT_SHOWN),
    ),
    Case(
        "throughput",
        "The same with projection to Cassandra",
        "--tasks 20000",
        "--tasks 100000 --repeats 2",
        (Goal("visible_per_s", at_least=3_000.0), *STARTS),
        ("tasks_per_s", *_THROUGHPUT_SHOWN, "projector_cpu_us"),
    ),
    Case(
        "projection",
        "How far the view lags, at 1,000 tasks a second",
        "--rate 1000 --seconds 5",
        "--rate 1000 --seconds 30 --repeats 2",
        (Goal("lag_p99_ms", at_most=500.0), *STARTS),
        ("lag_p50_ms", "lag_max_ms", "cpu_us_per_task"),
    ),
    Case(
        "takeover",
        "Schedulers that end under load, at 1,000 tasks a second",
        "--rate 200 --rounds 1",
        "--rate 1000 --rounds 10",
        (
            Goal("killed_first_start_s_max", at_most=10.0),
            Goal("stopped_first_start_s_max", at_most=2.0),
            *_NOTHING_LOST,
        ),
        ("killed_first_start_s_p50", "stopped_first_start_s_p50", "stop_s_max", *_LOSS_SHOWN),
    ),
    Case(
        "scheduler_pause",
        "A scheduler that stands still for 30 s (8 s in the short form), at 500 tasks a second",
        "--rate 200 --pause-s 8",
        "--rate 500 --pause-s 30",
        (Goal("start_gap_s_max", at_most=10.0), *_NOTHING_LOST),
        ("resumed_gap_s_max", *_LOSS_SHOWN),
    ),
    Case(
        "worker_loss",
        "kill -9 of a worker that runs 50 tasks",
        "--rounds 1",
        "--rounds 10",
        (Goal("restart_s_max", at_most=8.0), Goal("duplicate_starts", at_most=NONE), *_NOTHING_LOST),
        ("restart_s_p50", "duplicates"),
    ),
    Case(
        "limits",
        "Limits: a rate of 100/s over 8 shards and 4 workers, one at a time of 1,000 keys over ten kill -9, their cost",
        "--seconds 10 --keyed-tasks 3000 --kills 1 --tasks 10000",
        "--seconds 60 --keyed-tasks 30000 --kills 10 --tasks 60000",
        (
            Goal("used_ratio", at_least=0.98),
            Goal("exceeded", at_most=NONE),
            Goal("met", at_most=NONE),
            Goal("keyed_missing", at_most=NONE),
            Goal("throughput_ratio", at_least=0.9),
            *STARTS,
        ),
        ("tasks_per_s", "limited_tasks_per_s", "keyed_duplicates", "cpu_us_per_task"),
    ),
    _PRIORITY_CASE,
    _TENANTS_CASE,
    Case(
        "overload",
        "Three times the submissions that can be sustained, for a minute (10 s in the short form)",
        "--seconds 10 --rate 2000",
        "--seconds 60 --rate 4000",
        _OVERLOAD,
        _OVERLOAD_SHOWN,
    ),
    Case(
        "backlog",
        "1,000,000 tasks that wait in one queue (20,000 in the short form)",
        "--pending 20000 --tasks 3000 --cancels 50",
        "--pending 1000000 --tasks 50000",
        (
            Goal("scheduler_rss_mb_max", at_most=1_000.0),
            Goal("throughput_ratio", at_least=0.8),
            Goal("cancel_p99_ms", at_most=10.0),
            Goal("cancelled_but_started", at_most=NONE),
            Goal("missing", at_most=NONE),
            Goal("early", at_most=NONE),
        ),
        (
            "accepted_per_s",
            "scheduler_rss_mb",
            "bytes_per_task",
            "restart_s",
            "restart_rss_mb_max",
            "cancel_p50_ms",
            "tasks_per_s",
            "backlog_accepted_per_s",
            "backlog_started_per_s",
            "duplicates",
        ),
    ),
    Case(
        "timers",
        "Timers that come out of the delay wheel, 1,000 due in a second, with 1,000,000 tasks waiting (20,000, 200/s)",
        "--rate 200 --seconds 10 --lead-s 95 --waiting 20000 --projectors 0",
        "--rate 1000 --seconds 60 --waiting 1000000 --projectors 0",
        (Goal("p99_ms", at_most=12.0), *STARTS),
        ("p50_ms", "p95_ms", "max_ms", "min_ms", "waiting", "scheduler_rss_mb", "cpu_us_per_task"),
        "timers p50 / p99 ms",
    ),
    Case(
        "timers",
        "The same with kill -9 of the scheduler ten times meanwhile (once in the short form)",
        "--rate 100 --seconds 20 --lead-s 95 --waiting 0 --kills 1 --projectors 0",
        "--rate 500 --seconds 120 --waiting 10000 --kills 10 --projectors 0",
        STARTS,
        ("p50_ms", "p99_ms", "max_ms", "min_ms"),
    ),
    Case(
        "waiting",
        "10,000,000 tasks that wait for up to 30 days (200,000 in the short form)",
        "--tasks 200000 --restarts 1 --rate 200 --seconds 10 --lead-s 95 --projectors 0",
        "--tasks 10000000 --projectors 0",
        (
            Goal("submit_per_s", at_least=10_000.0),
            Goal("scheduler_rss_mb_max", at_most=1_000.0),
            Goal("restart_s_max", at_most=15.0),
            Goal("p99_ms", at_most=12.0),
            *STARTS,
        ),
        (
            "parked_per_s",
            "empty_rss_mb",
            "scheduler_rss_mb",
            "restart_rss_mb",
            "slope_bytes_per_task",
            "restart_s",
            "p50_ms",
            "max_ms",
            "bytes_per_task",
            "rewrites_per_task",
            "cpu_us_per_task",
        ),
    ),
    Case(
        "schedules",
        "1,000,000 schedules, 10,000 of which fire in the same minute (20,000 and 2,000 in the short form)",
        "--count 20000 --fires 2000 --projectors 0",
        "--count 1000000 --fires 10000 --projectors 0",
        (
            Goal("rss_mb_max", at_most=1_000.0),
            Goal("spread_s", at_most=5.0),
            Goal("next_per_s", at_least=20_000.0),
            *STARTS,
        ),
        (
            "load_s",
            "load_per_s",
            "empty_rss_mb",
            "rss_mb",
            "restart_s",
            "restart_rss_mb",
            "fire_p50_ms",
            "fire_p99_ms",
            "cpu_us_per_task",
        ),
    ),
    Case(
        "cron_loss",
        "kill -9 of schedulers at the top of a second, while schedules fire each second",
        "--rounds 2 --projectors 0",
        "--rounds 20 --projectors 0",
        (Goal("doubled", at_most=NONE), Goal("duplicates", at_most=NONE), *_NOTHING_LOST),
        ("count", "void", "recovery_s_max", "worst_drift_s"),
    ),
    Case(
        "broker_loss",
        "One broker of three is killed and comes back after 20 s (3 s in the short form)",
        "--rate 100 --rounds 1 --outage-s 3",
        "--rate 500 --rounds 3 --outage-s 20",
        _NOTHING_LOST,
        ("start_gap_s_p50", "start_gap_s_max", *_LOSS_SHOWN),
    ),
    Case(
        "view_loss",
        "The database is down for 60 s (5 s in the short form), at 200 tasks a second",
        "--rate 100 --outage-s 5",
        "--rate 200 --outage-s 60",
        (Goal("errors_while_down", at_most=NONE), *_NOTHING_LOST),
        ("catch_up_s", "accepted_while_down", "start_gap_s_max", *_LOSS_SHOWN),
    ),
)
CASES: Mapping[str, Sequence[Case]] = {"embedded": _EMBEDDED, "kafka": _KAFKA}

# Measured on a machine with 2 cores that all parts shared. Gaps of less than a factor of 2 are noise.
_COLUMNS = ("tasks/s", "start p50 / p99 ms at 50/s", "start p50 / p99 ms at 500/s", "timers p50 / p99 ms")
_PEERS = (
    ("Celery 5.7 + Redis", "517", "3.1 / 5.7", "43 / 187 and worse", "1.2 / 3.9 (in worker memory)"),
    ("Dramatiq 2.2 + Redis", "2,414", "8.7 / 33", "4.6 / 171", "443 / 1,083"),
    ("taskiq 0.13 + Redis streams", "1,800", "1.4 / 1.9", "0.9 / 4.1", "700 / 2,287"),
    ("arq 0.28, tuned", "715", "12 / 24", "15 / 24", "329 / 535"),
    ("Procrastinate 3.10 + PostgreSQL", "264", "5.7 / 9.3", "cannot", "2,700 / 7,300"),
    ("DBOS 3.4 + PostgreSQL", "398", "455 / 1,058", "928 / 1,494", "1,317 / 2,355"),
    ("Temporal dev server", "17 to 29", "126 / 241 (at 10/s)", "not measured", "476 / 1,031"),
)
PEERS = {column: {row[0]: row[number] for row in _PEERS} for number, column in enumerate(_COLUMNS, start=1)}


def run_all(*, engine: str, is_short: bool, say: Say, cases: Sequence[Case] | None = None) -> list[Outcome]:
    """Run the cases, by default all of the engine; one that fails does not stop the others."""
    outcomes = []
    cases = CASES[engine] if cases is None else cases
    for number, case in enumerate(cases, start=1):
        command = f"{case.benchmark} --engine {engine} {case.short if is_short else case.full}".strip()
        say(f"[{number}/{len(cases)}] {command}")
        outcome = _run(case, command)
        say(f"    {outcome.failure or _headline(outcome)}")
        outcomes.append(outcome)
    return outcomes


def _run(case: Case, command: str) -> Outcome:
    arguments = [sys.executable, "-m", "benchmarks", *shlex.split(command), "--json"]
    with (
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process,
        ExitStack() as undo,
    ):
        undo.callback(_end, process)
        try:
            out, errors = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return Outcome(case, command, failure=f"did not end within {RUN_S:.0f} s")
        undo.pop_all()  # it has ended by itself
    if process.returncode:
        return Outcome(case, command, failure=f"failed with code {process.returncode}: {_reason(errors)}")
    return Outcome(case, command, msgspec.json.decode(out.splitlines()[-1]))


def _reason(errors: bytes) -> str:
    """The line that begins as `benchmarks.__main__` says why; of an error that it does not know, the last one."""
    said = errors.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return next((line for line in said if line.startswith(REASONS)), said[-1])[:REASON_MAX]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it end what it started; only then, if it must be, kill it."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _headline(outcome: Outcome) -> str:
    found = ", ".join(f"{goal.figure} {_number(outcome.found[goal.figure])}" for goal in outcome.case.goals)
    missed = outcome.missed()
    return f"{found}: {'all goals met' if not missed else 'missed ' + ', '.join(goal.figure for goal in missed)}"


# --- the page ---------------------------------------------------------------------------------------------------------


def page(outcomes: Sequence[Outcome], *, is_short: bool, folder: Path, engine: str = "embedded") -> str:
    """The results as Markdown."""
    parts = [_head(is_short, folder, engine), *map(_section, outcomes)]
    return "\n\n".join(parts) + "\n"


_ABOUT = {
    "embedded": (
        "Each benchmark runs the engine as users get it: `with app.embedded(folder)`, files on disk, nothing "
        "acknowledged\nbefore it is there. The handler is a no-op with a payload of 200 bytes unless said otherwise. "
        "Submitters, HTTP\nclients and the engine share the cores; `cpu_us_per_task` counts all processes of the "
        "engine, in microseconds."
    ),
    "kafka": (
        "Each benchmark runs processes as operators start them (`tidewheel scheduler`, `worker`, `projector`) over a "
        "real\nKafka and a real Cassandra. Brokers, database, all processes and the load share the cores. The handler "
        "is a no-op\nwith a payload of 200 bytes. `…_cpu_us` is the processor time for a task of one kind of process, "
        "in microseconds,\n`cpu_us_per_task` their sum; brokers and database are not in it."
    ),
}


def _head(is_short: bool, folder: Path, engine: str) -> str:
    about = machine(folder)
    form = "the short form: it shows the order of magnitude" if is_short else "the full form"
    option = "" if engine == "embedded" else f" --engine {engine}"
    command = "make bench" if is_short and not option else f"python -m benchmarks all{option}"
    return f"""# Results

Written by `{command}` on {datetime.now(UTC):%Y-%m-%d}, {form}. Do not edit.

| | |
|---|---|
| machine | {about["processor"]}, {about["cores"]} cores, {about["memory_gb"]} GB; {about["system"]} |
| disk | {about["filesystem"]}, one fsync of 4 KiB takes {about["fsync_ms"]} ms |
| versions | {", ".join(f"{name} {number}" for name, number in versions().items())} |

{_ABOUT[engine]} Latencies count from the call of `asubmit`
under an open load; `from_intended_…` from the instant at which it should have been called.
What the figures mean is in the docstring of each module of `benchmarks/`. To repeat one, use the command beside it;
add `--json` to get it as an object with all settings."""


def _section(outcome: Outcome) -> str:
    case = outcome.case
    head = f"## {case.title}\n\n`python -m benchmarks {outcome.command}`"
    if outcome.failure:
        return f"{head}\n\n**It {outcome.failure}: no figures.**"
    rows = ["| figure | goal | measured | |", "|---|---|---|---|"]
    rows += [_row(outcome, goal.figure, goal) for goal in case.goals]
    rows += [_row(outcome, name, None) for name in case.shown]
    return "\n\n".join([head, "\n".join(rows), *_peers(outcome)])


def _row(outcome: Outcome, name: str, goal: Goal | None) -> str:
    value = outcome.found[name]
    spread = outcome.found.get("noise", {}).get(name)
    measured = _number(value)
    if spread is not None:
        measured += f" ({_number(spread['min'])} to {_number(spread['max'])})"
    verdict = "" if goal is None else "met" if goal.is_met(value) else "**missed**"
    return f"| {name} | {goal or ''} | {measured} | {verdict} |"


def _peers(outcome: Outcome) -> list[str]:
    column = outcome.case.peers
    if column is None:
        return []
    rows = [f"| others, on a machine of this kind | {column} |", "|---|---|"]
    return ["\n".join(rows + [f"| {peer} | {figure} |" for peer, figure in PEERS[column].items()])]


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value == round(value):
        return f"{round(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
