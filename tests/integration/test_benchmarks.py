"""Each benchmark runs in a tiny form and prints what its contract says. How fast anything was is not looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import structlog

from benchmarks.__main__ import BENCHMARKS, _parser, main
from benchmarks.contract import Figures, NothingMeasured, Spread, combine, quantiles
from benchmarks.results import CASES, Case, Goal, Outcome, _reason, page, run_all
from benchmarks.scheduler_loss import audit, task_id
from benchmarks.throughput import Throughput
from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.ports import Entry
from schemas.codec import Codec
from schemas.messages import Event, EventBody, ShardOpened, Status, TaskReleased, TaskSpec, TaskSubmitted
from schemas.topics import TASK_EVENTS, TASK_REQUESTS

ALWAYS = {"engine", "settings", "versions", "noise", "cpu_us_per_task", "missing", "duplicates", "early"}
STARTS_S = {"p50_ms", "p95_ms", "p99_ms", "max_ms", "count"}
TINY = {
    "start_latency": ("--rate 100 --seconds 0.3 --warm-up-s 0.1 --repeats 2", STARTS_S),
    "throughput": ("--tasks 200 --warm-up 50", {"tasks_per_s", "submit_per_s", "log_bytes_per_task"}),
    "timer_accuracy": ("--timers 40 --rate 200 --waiting 20 --warm-up 10", {"p50_ms", "p99_ms", "max_ms"}),
    "scheduler_loss": (
        "--rounds 1 --rate 40",
        {"restart_s_max", "restart_s_p50", "lost", "decided_twice", "duplicate_starts"},
    ),
    "waiting": (
        "--tasks 200 --warm-up 50 --restarts 1 --horizon-days 3",
        {"submit_per_s", "scheduler_rss_mb", "restart_s", "bytes_per_task", "rewrites_per_task"},
    ),
    "api --route submit": ("--seconds 0.3 --warm-up-s 0.1 --clients 4", {"per_s", "p50_ms", "p99_ms", "errors"}),
    "api --route bulk": (
        "--seconds 0.3 --warm-up-s 0.1 --clients 2 --batch 10 --rate 10",
        {"per_s", "p50_ms", "p99_ms", "errors"},
    ),
    "api --route get": ("--seconds 0.3 --warm-up-s 0.1 --clients 4", {"per_s", "p50_ms", "p99_ms", "errors"}),
    "projection": ("--rate 100 --seconds 0.3 --warm-up-s 0.1", {"lag_p50_ms", "lag_p99_ms", "rows_per_s"}),
}
MUST_NOT_HAPPEN = ("missing", "early", "lost", "unfinished", "decided_twice", "not_shown", "errors")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_its_contract(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, keys = TINY[name]
    assert main([*name.split(), *options.split(), "--json", "--data", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert keys | ALWAYS <= found.keys()
    assert {figure: found[figure] for figure in MUST_NOT_HAPPEN if found.get(figure, 0)} == {}
    assert found["settings"]["fsync"] is True
    assert not list(tmp_path.iterdir()), "the files of a benchmark are removed"


def test_without_json_it_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["start_latency", "--rate", "50", "--seconds", "0.2", "--warm-up-s", "0"]
    assert main([*options, "--data", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "p99_ms" in shown.out
    assert "10 tasks at 50 a second" in shown.err


def test_an_option_that_is_not_allowed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start_latency", "--rate", "-1"]) == 2
    error = capsys.readouterr().err
    assert "rate" in error
    assert "> 0" in error


# --- how figures are made ---------------------------------------------------------------------------------------------


def test_quantiles_are_durations_that_were_measured() -> None:
    assert quantiles(ms * 1_000_000 for ms in range(1, 101)) == (50.0, 95.0, 99.0, 100.0)
    assert quantiles([7_000_000]) == (7.0, 7.0, 7.0, 7.0)
    with pytest.raises(NothingMeasured):
        quantiles([])


class _Some(Figures, frozen=True, kw_only=True):
    p50_ms: float
    max_ms: float
    disk_bytes: float | None = None


def test_a_median_hides_nothing_that_must_not_happen() -> None:
    runs = [
        _Some(count=10, missing=missing, duplicates=0, early=0, cpu_us_per_task=5.0, p50_ms=p50, max_ms=worst)
        for missing, p50, worst in ((0, 1.0, 3.0), (2, 9.0, 90.0), (0, 2.0, 4.0))
    ]
    figures, noise = combine(runs)
    assert (figures["count"], figures["missing"], figures["p50_ms"], figures["max_ms"]) == (30, 2, 2.0, 90.0)
    assert figures["disk_bytes"] is None
    assert noise["p50_ms"] == Spread(1.0, 2.0, 9.0)
    assert "missing" not in noise


def test_the_audit_finds_what_was_decided_twice_or_never(tmp_path: Path) -> None:
    codec = Codec.builtin()

    def event(body: EventBody, *, epoch: int, index: int = 0, offset: int | None = None) -> Entry:
        topic = None if offset is None else TASK_REQUESTS
        value = Event(
            entity_id=task_id(index), tenant_id="", version=1, epoch=epoch, at=1, body=body,
            source_topic=topic, source_offset=offset,
        )  # fmt: skip
        return Entry(TASK_EVENTS, 0, None, codec.encode(value))

    submitted = TaskSubmitted(spec=TaskSpec(task_type="t"), status=Status.PENDING, next_run_at=1)
    storage = SqliteLogStorage(tmp_path / "log.db")
    log = LocalBroker(storage, embedded_catalog(1)).connect(commits=True)
    log.append(
        [
            event(ShardOpened(owner="a"), epoch=1),
            event(submitted, epoch=1, index=0, offset=0),
            event(TaskReleased(), epoch=1, index=0),
            event(ShardOpened(owner="b"), epoch=2),
            event(submitted, epoch=1, index=1, offset=1),  # by an owner that is none any more: void
            event(submitted, epoch=2, index=1, offset=1),
            event(submitted, epoch=2, index=0, offset=7),  # the same task again
            event(TaskReleased(), epoch=2, index=2, offset=7),  # the same input again
        ]
    )
    log.poll(0)
    storage.close()
    assert audit(tmp_path, 1, range(4)) == (2, {2, 3})


# --- the page of results ----------------------------------------------------------------------------------------------


def figures_of(engine: str, benchmark: str) -> type[Figures]:
    returned: type[Figures] = get_type_hints(BENCHMARKS[engine][benchmark].run)["return"]
    return returned


@pytest.mark.parametrize(
    ("engine", "case"), [(engine, case) for engine, cases in CASES.items() for case in cases], ids=str
)
def test_the_page_asks_for_options_and_figures_that_exist(engine: str, case: Case) -> None:
    for options in (case.short, case.full):
        _parser(engine).parse_args([case.benchmark, *options.split()])
    shown = {goal.figure for goal in case.goals} | set(case.shown)
    assert shown <= set(figures_of(engine, case.benchmark).__struct_fields__)


def test_the_page_shows_what_was_met_what_was_missed_and_what_failed(tmp_path: Path) -> None:
    found: dict[str, Any] = dict.fromkeys(Throughput.__struct_fields__, 0)
    found |= {"tasks_per_s": 5_000.0, "submit_alone_per_s": 7_999.0, "noise": {"tasks_per_s": {"min": 1, "max": 9_000}}}
    case = next(case for case in CASES["embedded"] if case.benchmark == "throughput")
    outcomes = [
        Outcome(case, "throughput", found),
        Outcome(CASES["embedded"][0], "start_latency", failure="failed with code 1"),
    ]
    text = page(outcomes, is_short=True, folder=tmp_path)
    assert "| tasks_per_s | ≥ 4,000 | 5,000 (1 to 9,000) | met |" in text
    assert "| submit_alone_per_s | ≥ 8,000 | 7,999 | **missed** |" in text
    assert "| Dramatiq 2.2 + Redis | 2,414 |" in text
    assert "**It failed with code 1: no figures.**" in text


def test_all_runs_each_in_a_process_of_its_own_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    tiny = f"--rate 50 --seconds 0.1 --warm-up-s 0 --data {tmp_path}"
    goals = (Goal("missing", at_most=0.0),)
    cases = (Case("start_latency", "broken", "--rate 0", "", goals), Case("start_latency", "tiny", tiny, "", goals))
    said: list[str] = []
    broken, good = run_all(engine="embedded", is_short=True, say=said.append, cases=cases)
    assert broken.failure is not None
    assert broken.failure.startswith("failed with code 2: an option is not allowed")
    assert "rate" in broken.failure
    assert broken.missed() == list(goals)
    assert good.found["count"] == 5
    assert good.missed() == []
    assert any("all goals met" in line for line in said)


def test_the_reason_of_a_failure_is_shown_and_not_what_follows_it() -> None:
    assert (
        _reason(b"warning\nno figures: it did not start; its log:\nINFO up\n")
        == "no figures: it did not start; its log:"
    )
    assert _reason(b"Traceback:\n  File x\nKeyError: 'a'\n") == "KeyError: 'a'"
    assert _reason(b"\n") == "it said nothing"
