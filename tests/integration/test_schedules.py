"""Schedules end to end, in an engine with a worker: C09 and C10 by the second, declared schedules, the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schemas.messages import FireCause, ScheduleFired
from tests.harness import events_of, eventually, running
from tidewheel import App, Engine, NotSubmitted, ScheduleNotFound, TaskWasCancelled, current_context
from tidewheel.cli import cli
from workers.errors import RegistrationError

PERIOD_S = 2  # of an interval whose times are missed


class Held:
    """A task type whose runs last until they are let go."""

    def __init__(self, app: App) -> None:
        self.started: list[str] = []
        self.most_at_once = self._now = 0
        self.release, self._lock = threading.Event(), threading.Lock()
        app.task(name="held")(self.run)

    def run(self, mark: str = "") -> None:
        with self._lock:
            self.started.append(mark)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        self.release.wait(20)
        with self._lock:
            self._now -= 1


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def held(app: App) -> Iterator[Held]:
    held = Held(app)
    yield held
    held.release.set()


def scheduled(app: App, **fields: object) -> str:
    return app.schedules.create({"name": "s", "task_type": "held", "every_seconds": 1, **fields}).cron_id


def fired_for(engine: Engine, cron_id: str) -> list[FireCause]:
    """Why a schedule fired, each time."""
    events = [one.event for one in events_of(engine)]
    return [
        event.body.cause for event in events if event.entity_id == cron_id and isinstance(event.body, ScheduleFired)
    ]


def test_overlap_skip_counts_what_it_skips_and_goes_on_after(app: App, held: Held) -> None:
    with running(app):
        cron_id = scheduled(app)
        eventually(lambda: app.schedules.get(cron_id).counts.skipped >= 2, "two were skipped")
        assert len(held.started) == 1
        held.release.set()
        eventually(lambda: len(held.started) >= 2, "the next one ran")
    assert held.most_at_once == 1


def test_overlap_queue_lets_one_wait(app: App, held: Held) -> None:
    with running(app):
        cron_id = scheduled(app, overlap_policy="queue")
        eventually(lambda: app.schedules.get(cron_id).counts.skipped >= 1, "one was skipped")
        shown = app.schedules.get(cron_id)
        assert (len(shown.running), len(shown.waiting)) == (1, 1)
        held.release.set()
        eventually(lambda: len(held.started) >= 2, "the one that waited ran")
    assert held.most_at_once == 1


def test_overlap_allow_runs_them_beside_each_other(app: App, held: Held) -> None:
    with running(app):
        cron_id = scheduled(app, overlap_policy="allow")
        eventually(lambda: len(held.started) >= 2, "two ran at once")
        held.release.set()
        assert app.schedules.get(cron_id).counts.skipped == 0
    assert held.most_at_once >= 2


def test_overlap_cancel_running_ends_the_run_before(app: App) -> None:
    """What runs is told to stop and is CANCELLED; the new run starts, and nothing is skipped."""
    told: list[str] = []
    release = threading.Event()

    @app.task(name="held")
    def until_told() -> None:
        context = current_context()
        while not release.wait(0.01):
            if context.is_cancelled:
                told.append(context.task_id)
                context.check_cancelled()

    with running(app):
        cron_id = scheduled(app, overlap_policy="cancel_running")
        try:
            eventually(lambda: len(told) >= 2, "two were told to stop")
        finally:
            release.set()
        for task_id in told[:2]:
            assert task_id.startswith(f"{cron_id}.")
            with pytest.raises(TaskWasCancelled):
                app.handle(task_id).result(timeout=20)
        counts = app.schedules.get(cron_id).counts
        assert (counts.skipped, counts.fired >= 3) == (0, True)


def has_missed(made_at: datetime, now: datetime) -> bool:
    """Whether two times of an interval that counts from 1970 are missed since, and none is within the grace of 1 s."""
    phase_s = now.timestamp() % PERIOD_S
    return now > made_at + timedelta(seconds=2 * PERIOD_S) and 1.1 < phase_s < 1.6


@pytest.mark.parametrize(("policy", "made_up"), [("none", 0), ("latest", 1), ("all", 2)])
def test_what_was_missed_while_paused_is_made_up_for_by_the_policy(
    app: App, held: Held, policy: str, made_up: int
) -> None:
    held.release.set()
    with running(app) as engine:
        cron_id = scheduled(
            app,
            every_seconds=PERIOD_S,
            misfire_policy=policy,
            misfire_max=2,
            misfire_grace_seconds=1,
            overlap_policy="allow",
            enabled=False,
        )
        made_at = datetime.fromisoformat(app.schedules.get(cron_id).created_at)
        eventually(lambda: has_missed(made_at, datetime.now(UTC)), "times passed, the last one by more than the grace")
        app.schedules.resume(cron_id)
        eventually(lambda: FireCause.TIME in fired_for(engine, cron_id), "it goes on")
        causes = fired_for(engine, cron_id)
        assert causes[:made_up] == [FireCause.MADE_UP] * made_up
        assert set(causes[made_up:]) == {FireCause.TIME}
        assert app.schedules.get(cron_id).counts.missed >= 2 - made_up


def test_a_restart_goes_on_with_the_schedules_that_were_made(app: App, held: Held, tmp_path: Path) -> None:
    held.release.set()
    with running(app, tmp_path):
        cron_id = scheduled(app)
        eventually(lambda: app.schedules.get(cron_id).counts.fired >= 1, "it fired")
    with running(app, tmp_path):
        before = app.schedules.get(cron_id).counts.fired
        assert before >= 1
        eventually(lambda: app.schedules.get(cron_id).counts.fired > before, "it fired again")


# --- declared ---------------------------------------------------------------------------------------------------------


def declaring(expression: str, *, also: bool = True, name: str = "app") -> App:
    app = App(name=name)

    @app.cron(expression, tz="Europe/Paris", arguments={"n": 2}, overlap="queue", jitter=timedelta(seconds=5))
    @app.task(name="report", queue="reports", timeout=30)
    def report(n: int) -> int:
        return n

    if also:
        app.every(90, name="often")(app.task(name="often")(lambda: None))
    return app


def test_declared_schedules_are_made_changed_and_reported(tmp_path: Path) -> None:
    app = declaring("0 9 * * MON-FRI")
    with running(app, tmp_path):
        shown = app.schedules.get(app.schedules.id_of("report"))
        assert (shown.timezone, shown.overlap_policy, shown.jitter_seconds) == ("Europe/Paris", "queue", 5)
        assert (shown.queue, shown.timeout_seconds, bytes(shown.payload)) == ("reports", 30, b'{"n":2}')
        assert app.schedules.sync().unchanged == ("report", "often")
        app.schedules.pause(app.schedules.id_of("report"))
    later = declaring("0 10 * * *", also=False)
    with running(later, tmp_path) as engine:
        shown = later.schedules.get(later.schedules.id_of("report"))
        assert (shown.cron_expression, shown.status) == ("0 10 * * *", "paused")  # whether it is paused is not in code
        report = later.schedules.sync()
        assert (report.unchanged, report.gone) == (("report",), ("often",))
        assert later.schedules.get(later.schedules.id_of("often")).status == "active"
        another = declaring("0 11 * * *", name="another")
        another.use(later.backend)
        assert another.schedules.sync().gone == ()
        assert engine.failure is None


def test_what_is_declared_wrongly_is_told_at_once(app: App) -> None:
    with pytest.raises(RegistrationError, match="timezone"):
        app.cron("0 9 * * *", tz="Europe/Nowhere", name="n")(app.task(name="z")(lambda: None))
    with pytest.raises(RegistrationError, match="start_at"):
        app.every(5, start_at=datetime(2036, 1, 1), name="n")(app.task(name="a")(lambda: None))  # noqa: DTZ001
    app.every(5)(app.task(name="b")(lambda: None))
    with pytest.raises(RegistrationError, match="declared twice"):
        app.every(6, name="b")(app.task(name="c")(lambda: None))
    with pytest.raises(TypeError, match="no option of a schedule"):
        app.every(5, colour="red")(app.task(name="d")(lambda: None))  # type: ignore[call-arg]


def test_refusals_are_raised(app: App, held: Held) -> None:
    with running(app):
        with pytest.raises(ScheduleNotFound):
            app.schedules.get("nobody")
        with pytest.raises(NotSubmitted, match="every_seconds"):
            scheduled(app, every_seconds=0)
        now = datetime.now(UTC)
        cron_id = scheduled(app, overlap_policy="allow")
        made = app.schedules.backfill(cron_id, now - timedelta(seconds=60), now - timedelta(seconds=57))
        assert 3 <= len(made) <= 4
        held.release.set()
        assert app.schedules.trigger(cron_id).result(timeout=20) is None


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running(App(), port=0) as engine:
        yield engine


def tw(engine: Engine, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(
        cli, ["cron", *arguments], env={"TIDEWHEEL_SERVER": engine.address, "TIDEWHEEL_DEBUG": ""}
    )
    assert result.exit_code == code, result.output
    return result.output


def test_a_schedule_lives_on_the_command_line(engine: Engine) -> None:
    made = json.loads(
        tw(engine, "create", "nightly", "t", '{"a": 1}', "--cron", "30 2 * * *", "--tz", "Europe/Paris", "--json")
    )
    cron_id = made["cron_id"]
    shown = tw(engine, "show", cron_id)
    for said in ("nightly", "30 2 * * *  Europe/Paris", 't  {"a": 1}', "active", "latest", "skip"):
        assert said in shown
    assert "every 1 min 30 s" in tw(engine, "update", cron_id, "--every", "90")
    assert "paused" in tw(engine, "pause", cron_id, "--reason", "holidays")
    assert "holidays" in tw(engine, "show", cron_id)
    assert "active" in tw(engine, "resume", cron_id)
    assert f"{cron_id}.trigger-" in tw(engine, "trigger", cron_id)
    eventually(lambda: engine.view_lag() == 0, "the view caught up")
    assert "nightly" in tw(engine, "list")
    assert json.loads(tw(engine, "list", "--json", "--all"))["schedules"][0]["cron_id"] == cron_id
    assert "a run is not over" in tw(engine, "trigger", cron_id, code=1)
    assert "deleted" in tw(engine, "delete", cron_id)
    assert "tidewheel cron list" in tw(engine, "show", cron_id, code=1)


def test_a_schedule_is_meant_by_its_name_as_well(engine: Engine) -> None:
    made = json.loads(tw(engine, "create", "by-name", "t", "--every", "1h", "--overlap", "allow", "--json"))
    other = json.loads(tw(engine, "create", "by-name", "t", "--every", "2h", "--tenant", "acme", "--json"))
    assert json.loads(tw(engine, "show", "by-name", "--json"))["cron_id"] == made["cron_id"]
    assert json.loads(tw(engine, "show", "by-name", "--tenant", "acme", "--json"))["cron_id"] == other["cron_id"]
    assert made["cron_id"] in tw(engine, "show", "by-name")  # with its runs
    tw(engine, "create", "another", "t", "--every", "3h", "--id", "by-name")
    assert json.loads(tw(engine, "show", "by-name", "--json"))["name"] == "another"  # an id goes before a name
    assert "deleted" in tw(engine, "delete", "by-name")
    assert json.loads(tw(engine, "update", "by-name", "--every", "90", "--json"))["cron_id"] == made["cron_id"]
    for command in ("pause", "resume", "trigger"):
        assert made["cron_id"] in tw(engine, command, "by-name")
    tw(engine, "backfill", "by-name", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-01T00:01:00Z")
    assert "deleted  by-name" in tw(engine, "delete", "by-name")
    refused = tw(engine, "trigger", "by-name", code=1)
    assert "no schedule has the id 'by-name', and none in the tenant 'default' has that name" in refused
    assert "active" in tw(engine, "show", other["cron_id"])  # that of the other tenant is none of all this


def test_nominal_times_before_it_was_made_are_no_runs_of_a_schedule(engine: Engine) -> None:
    tw(engine, "create", "young", "t", "--every", "1h")
    assert "no run" not in tw(engine, "show", "young")


def test_a_rule_that_has_nothing_ahead_is_told(engine: Engine) -> None:
    assert "it never fires" in tw(engine, "create", "late", "t", "--on", "2020-01-01T00:00:00Z")


def test_a_preview_and_wrong_usage(engine: Engine) -> None:
    told = tw(engine, "preview", "0 0 29 2 *", "--after", "2096-03-01T00:00:00Z", "--count", "1")
    assert told.startswith("2104-02-29T00:00:00Z")
    assert "--tz" in tw(engine, "preview", "0 0 * * *", "--tz", "Europe/Nowhere", code=1)
    assert "--every" in tw(engine, "create", "n", "t", "--every", "soon", code=2)
    assert "CRON_ID" in tw(engine, "show", "a b", code=2)
    assert "one of --cron, --every, --on" in tw(engine, "create", "n", "t", code=1)
    tw(engine, "create", "unchanged", "t", "--every", "1h")
    assert "name nothing to change" in tw(engine, "update", "unchanged", "--expected-version", "1", code=2)


def test_declared_schedules_are_synchronised(engine: Engine) -> None:
    report = json.loads(tw(engine, "sync", "tests.integration.scheduled_app:app", "--json"))
    assert report == {"created": ["hourly"], "changed": [], "unchanged": [], "gone": []}
    assert "unchanged  hourly" in tw(engine, "sync", "tests.integration.scheduled_app:app")
    assert "no application" in tw(engine, "sync", "tests.integration.scheduled_app", code=2)
