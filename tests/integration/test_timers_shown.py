"""What operators see of what waits: the API, the command, the metrics, against an engine in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from scheduler.instants import instant_of, parse_instant
from scheduler.timer_report import LatenessView, TimersView, WindowView, sum_of_timers
from tests.harness import eventually, running
from tidewheel import App, Engine
from tidewheel.cli import cli

MINUTE_S, DAY_S = 60, 86_400
app = App()


@app.task(name="shown.noop")
async def noop() -> None:
    """Does nothing."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(app, port=0) as started:
        for delay_s in (0.05, 0.1, 10 * MINUTE_S, DAY_S, 20 * DAY_S, 20 * DAY_S):
            noop.options(delay=delay_s).submit()
        eventually(lambda: len(_levels(_read(started))) == 3 and _read(started)["releases"]["count"] == 2, "all parked")
        yield started


def _read(engine: Engine) -> Any:
    return httpx.get(f"{engine.address}/api/v1/timers").raise_for_status().json()


def _levels(view: Any) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for window in view["windows"]:
        counts[window["level"]] = counts.get(window["level"], 0) + window["tasks"]
    return counts


def _command(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["timers", *arguments], env={"COLUMNS": "100", "TIDEWHEEL_DEBUG": ""})


def test_the_api_says_where_tasks_wait_and_how_late_the_released_ones_were(engine: Engine) -> None:
    view = _read(engine)
    assert _levels(view) == {0: 1, 2: 1, 3: 2}
    assert (view["waiting"], view["overdue"], view["next_release_at"]) == (4, 0, None)
    assert 0 <= view["releases"]["p50_ms"] <= view["releases"]["p99_ms"] <= view["releases"]["max_ms"]
    assert parse_instant(view["read_at"]) < parse_instant(view["next_slot_at"])
    for window in view["windows"]:
        assert window["begins_at"] < window["ends_at"]
        assert window["begins_at"] > view["read_at"]


def test_a_task_that_is_due_soon_waits_in_memory_and_is_the_next(engine: Engine) -> None:
    due = datetime.now(UTC) + timedelta(seconds=30)
    handle = noop.options(at=due).submit()
    view = eventually(lambda: (found := _read(engine))["next_release_at"] and found, "it waits in memory")
    assert parse_instant(view["next_release_at"]) == instant_of(due)
    assert _levels(view)[None] == 1
    handle.cancel()
    eventually(lambda: _read(engine)["next_release_at"] is None, "it is cancelled")


def test_the_command_shows_levels_and_hours_ahead(engine: Engine) -> None:
    ran = _command("--server", engine.address)
    assert ran.exit_code == 0, ran.stderr
    for said in ("about 4, in", "level 0", "level 2", "level 3", "in 16-32 d", "of the last 2 released", "█"):
        assert said in ran.stdout
    assert "lasts 2 d 8 h" in _command("--server", engine.address, "--windows").stdout


def test_several_servers_are_added_up(engine: Engine) -> None:
    alone, twice = (json.loads(_command("--json", *("--server", engine.address) * times).stdout) for times in (1, 2))
    assert twice["waiting"] == 2 * alone["waiting"] == 8
    assert _levels(twice) == {level: 2 * count for level, count in _levels(alone).items()}
    assert twice["releases"]["max_ms"] == alone["releases"]["max_ms"]


def test_what_has_no_shards_is_said_to_have_none() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        ran = _command("--server", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert (ran.exit_code, "has no shards" in ran.stderr) == (1, True)


def test_what_does_not_answer_is_said_to_be_silent_and_what_is_no_address_to_be_none() -> None:
    silent = _command("--server", "http://127.0.0.1:9")
    assert (silent.exit_code, "start one with `tidewheel dev`" in silent.stderr) == (3, True)
    wrong = _command("--server", "nonsense")
    assert (wrong.exit_code, "'nonsense' is no address" in wrong.stderr) == (2, True)


def test_metrics_count_what_waits_and_how_late_it_was(engine: Engine) -> None:
    text = httpx.get(f"{engine.address}/metrics").text
    for line in (
        'tidewheel_timers_waiting{level="memory"} 0.0',
        'tidewheel_timers_waiting{level="0"} 1.0',
        'tidewheel_timers_waiting{level="1"} 0.0',
        'tidewheel_timers_waiting{level="3"} 2.0',
        "tidewheel_timer_lateness_seconds_count 2.0",
        'tidewheel_timer_lateness_seconds_bucket{le="+Inf"} 2.0',
        "tidewheel_schedules 0.0",
        "tidewheel_cron_drift_seconds_count 0.0",
    ):
        assert line in text.splitlines()


def test_of_several_processes_the_earliest_is_the_next_and_the_worst_is_told() -> None:
    def view(next_at: str | None, worst_ms: float | None) -> TimersView:
        window = WindowView(level=1, begins_at="2026-01-01T00:00:00.000000Z", ends_at="2026-01-01T00:15:00Z", tasks=3)
        late = LatenessView(count=0 if worst_ms is None else 5, p50_ms=worst_ms, p99_ms=worst_ms, max_ms=worst_ms)
        return TimersView(
            read_at="2025-12-31T00:00:00.000000Z",
            shards=2,
            waiting=3,
            overdue=1,
            next_release_at=next_at,
            next_slot_at=next_at,
            windows=(window,),
            releases=late,
            schedules=4,
            fires=late,
        )

    total = sum_of_timers(
        [view(None, None), view("2026-01-02T00:00:00.000000Z", 2.0), view("2026-01-01T00:00:00.000000Z", 1.0)]
    )
    assert (total.shards, total.waiting, total.overdue, total.schedules) == (6, 9, 3, 12)
    assert total.next_release_at == "2026-01-01T00:00:00.000000Z"
    assert [window.tasks for window in total.windows] == [9]
    assert (total.releases.count, total.releases.max_ms) == (10, 2.0)
