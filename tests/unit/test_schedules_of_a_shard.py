"""What a shard makes of schedules: each nominal time is decided once, and its run is submitted once."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from scheduler.core.desk import Effects, Source
from scheduler.core.schedule import decide_fire, run_id
from scheduler.core.shard import Shard, ShardSettings
from scheduler.core.wheel import Place
from schemas.messages import (
    ControlSchedule,
    CreateSchedule,
    DueRun,
    Event,
    FoldPolicy,
    GapPolicy,
    MisfirePolicy,
    Outcome,
    OverlapPolicy,
    ParkedTask,
    Request,
    RunSchedule,
    Schedule,
    ScheduleAction,
    ScheduleFired,
    ScheduleFlagged,
    ScheduleSkipped,
    ScheduleSpec,
    ScheduleUpdated,
    SkipReason,
    TaskSpec,
    TaskSubmitted,
    UpdateSchedule,
)
from tests.cases.shard_stage import START, ShardStage

MINUTE = 60_000
DAY = 24 * 60 * MINUTE


def stage(**settings: Any) -> ShardStage:
    """A worker is not given up for its silence, unless it is said after how long."""
    return ShardStage(Shard(0, ShardSettings(**{"worker_timeout_us": 10**12} | settings), Random(1), START))


def spec(**fields: Any) -> ScheduleSpec:
    rule = {} if fields.keys() & {"every_ms", "calendar"} else {"cron_expression": "* * * * *"}
    values: dict[str, Any] = {"name": "n", "task": TaskSpec(task_type="t")}
    return ScheduleSpec(**(values | rule | fields))


def ask(at: ShardStage, request: Request) -> tuple[Outcome, str | None]:
    effects = at.request(replace(request, reply_to=0))
    reply = effects.replies[0][1]
    return reply.outcome, reply.detail


def create(at: ShardStage, schedule_id: str = "s", **fields: Any) -> None:
    outcome, detail = ask(at, CreateSchedule(request_id="r", schedule_id=schedule_id, spec=spec(**fields)))
    assert outcome is Outcome.ACCEPTED, detail


def control(at: ShardStage, action: ScheduleAction, schedule_id: str = "s") -> tuple[Outcome, str | None]:
    return ask(at, ControlSchedule(request_id="r", schedule_id=schedule_id, action=action))


def run(at: ShardStage, ms: int, step_ms: int = 1_000) -> None:
    """Let time pass in steps."""
    for _ in range(ms // step_ms):
        at.advance(step_ms)
        at.let_time_work()


def of(at: ShardStage, kind: type, schedule_id: str = "s") -> list[Event]:
    return [event for event in at.events if isinstance(event.body, kind) and event.entity_id == schedule_id]


def runs(at: ShardStage) -> list[str]:
    return [event.entity_id for event in at.events if isinstance(event.body, TaskSubmitted)]


def known(at: ShardStage, schedule_id: str = "s") -> Schedule:
    schedule = at.shard.state.schedules.get(schedule_id)
    assert schedule is not None
    return schedule


def minutes(*numbers: int) -> list[str]:
    return [run_id("s", START + number * MINUTE * 1_000) for number in numbers]


def test_each_nominal_time_becomes_one_task_under_its_own_id() -> None:
    at = stage()
    create(at, overlap=OverlapPolicy.ALLOW)
    run(at, 5 * MINUTE)
    assert runs(at) == minutes(1, 2, 3, 4, 5)
    assert runs(at)[0] == "s.2026-06-01T12:01:00Z"
    assert all(event.at >= START for event in of(at, ScheduleFired))
    assert (known(at).fired, known(at).last_fired_at) == (5, START + 5 * MINUTE * 1_000)


def test_a_shard_that_is_loaded_at_any_point_goes_on_as_if_nothing_had_been() -> None:
    at = stage()
    create(at, overlap=OverlapPolicy.ALLOW, misfire_grace_ms=3_600_000)
    run(at, 3 * MINUTE)
    events = [event for event in at.events if event.version]
    for cut in range(1, len(events) + 1):
        another = stage()
        for event in events[:cut]:
            another.shard.evolve(event)
        another.now = at.now
        another.shard.on_loaded(at.now, cut)
        another.events = list(events[:cut])
        another.let_time_work()
        assert sorted(runs(another)) == minutes(1, 2, 3), cut
        assert len(set(runs(another))) == len(runs(another))


def test_skip_leaves_out_what_comes_while_a_run_is_not_over() -> None:
    at = stage()
    create(at, overlap=OverlapPolicy.SKIP)
    run(at, MINUTE)
    at.start(minutes(1)[0])
    run(at, 2 * MINUTE)
    assert [event.body.reason for event in of(at, ScheduleSkipped)] == [SkipReason.OVERLAP] * 2  # type: ignore[union-attr]
    at.succeed(minutes(1)[0])
    run(at, MINUTE)
    assert runs(at) == minutes(1, 4)
    assert (known(at).fired, known(at).skipped) == (2, 2)


def test_queue_lets_one_wait_which_begins_when_the_one_before_is_over() -> None:
    at = stage()
    create(at, overlap=OverlapPolicy.QUEUE)
    run(at, MINUTE)
    at.start(minutes(1)[0])
    run(at, 3 * MINUTE)
    assert runs(at) == minutes(1)
    at.succeed(minutes(1)[0])
    at.let_time_work()
    assert runs(at) == minutes(1, 2)
    assert known(at).skipped == 2


def test_cancel_running_stops_the_run_before() -> None:
    at = stage()
    create(at, overlap=OverlapPolicy.CANCEL_RUNNING)
    run(at, MINUTE)
    at.start(minutes(1)[0])
    run(at, MINUTE)
    assert runs(at) == minutes(1, 2)
    assert at.task(minutes(1)[0]).cancel_requested_at is not None
    assert at.task(minutes(2)[0]).cancel_requested_at is None
    run(at, MINUTE)  # the second one waits for a worker still, so it can be cancelled at once
    assert minutes(2)[0] not in at.shard.state.tasks
    assert known(at).running == tuple(minutes(3))  # and the first did not answer: it was ended without its worker


def test_a_run_that_its_worker_was_lost_with_does_not_block_for_ever() -> None:
    at = stage(worker_timeout_us=6_000_000)
    create(at, overlap=OverlapPolicy.SKIP)
    run(at, MINUTE)
    at.start(minutes(1)[0])
    for _ in range(4):
        run(at, MINUTE)
        if (task := at.shard.state.tasks.get(minutes(1)[0])) is not None and task.status == "PENDING":
            at.start(minutes(1)[0])
    assert minutes(1)[0] not in at.shard.state.tasks
    assert len(runs(at)) >= 2


MISSED = 3 * DAY // MINUTE


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"misfire": MisfirePolicy.NONE}, []),
        ({"misfire": MisfirePolicy.LATEST}, [MISSED]),
        ({"misfire": MisfirePolicy.ALL, "misfire_max": 3}, [MISSED - 2, MISSED - 1, MISSED]),
        ({"misfire": MisfirePolicy.ALL, "misfire_max": 3, "max_lateness_ms": 100_000}, [MISSED - 1, MISSED]),
        ({"misfire": MisfirePolicy.LATEST, "max_lateness_ms": 10_000}, []),
    ],
)
@pytest.mark.parametrize("is_paused", [True, False])
def test_what_was_missed_is_made_up_for_as_its_policy_says(
    policy: dict[str, Any], expected: list[int], is_paused: bool
) -> None:
    """C09: suspended for three days, or nobody there, and back half a minute after the last nominal time."""
    at = stage()
    create(at, overlap=OverlapPolicy.ALLOW, **policy)
    if is_paused:
        control(at, ScheduleAction.PAUSE)
        at.advance(3 * DAY + 30_000)
        at.let_time_work()
        assert control(at, ScheduleAction.RESUME)[0] is Outcome.ACCEPTED
    else:
        at.advance(3 * DAY + 30_000)
    at.let_time_work()
    assert runs(at) == minutes(*expected)
    assert known(at).missed == MISSED - len(expected)
    create(at, "other", name="o", overlap=OverlapPolicy.ALLOW)
    run(at, MINUTE)
    other = run_id("other", START + (MISSED + 1) * MINUTE * 1_000)
    assert sorted(runs(at)[len(expected) :]) == [other, *minutes(MISSED + 1)]


def test_a_fire_that_is_late_by_seconds_is_no_misfire() -> None:
    at = stage()
    create(at, misfire=MisfirePolicy.NONE)
    at.advance(MINUTE + 1_500)
    at.let_time_work()
    assert runs(at) == minutes(1)


def test_a_year_of_missed_seconds_takes_no_longer_than_a_minute_of_them() -> None:
    at = stage()
    create(at, every_ms=1_000, overlap=OverlapPolicy.ALLOW)
    at.advance(365 * DAY)
    at.let_time_work()
    assert len(of(at, ScheduleFired)) <= 21  # those within the grace, or the latest
    assert known(at).missed > 31_000_000


def test_a_trigger_runs_at_once_and_leaves_the_nominal_times_alone() -> None:
    at = stage()
    create(at)
    request = RunSchedule(request_id="r", schedule_id="s", reply_to=0)
    reply = at.request(request).replies[0][1]
    at.let_time_work()
    assert (reply.outcome, runs(at)) == (Outcome.ACCEPTED, [reply.task_id])
    assert ask(at, request)[0] is Outcome.WRONG_STATUS  # the first is not over, and overlap is skip
    assert known(at).next_fire_at == START + MINUTE * 1_000


def test_a_range_is_run_where_it_has_no_runs_one_after_the_other() -> None:
    at = stage()
    create(at)
    at.advance(10 * MINUTE)
    at.let_time_work()
    assert runs(at) == minutes(10)
    at.start(minutes(10)[0])
    at.succeed(minutes(10)[0])
    first, last, done = START + 3 * 60_000_000, START + 20 * 60_000_000, START + 10 * 60_000_000
    request = RunSchedule(
        request_id="r", schedule_id="s", first_at=first, last_at=last, done=(done,), view_offset=10**9
    )
    assert ask(at, replace(request, runs_max=6))[0] is Outcome.INVALID
    assert ask(at, replace(request, view_offset=-1))[0] is Outcome.VIEW_BEHIND
    assert ask(at, request)[0] is Outcome.ACCEPTED
    at.let_time_work()
    for number in range(3, 10):
        assert runs(at)[-1:] == minutes(number)
        at.start(minutes(number)[0])
        at.succeed(minutes(number)[0])
        at.let_time_work()
    assert len(runs(at)) == 8


def test_ids_of_runs_cannot_be_taken_by_others() -> None:
    at = stage()
    create(at)
    effects = at.submit(minutes(1)[0])
    assert effects.replies[0][1].outcome is Outcome.INVALID
    run(at, MINUTE)
    assert runs(at) == minutes(1)


def test_a_defect_in_one_schedule_flags_it_and_disturbs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    at = stage()
    create(at, "bad", name="bad")
    create(at)

    def broken(schedule: Schedule, now: int, tzdata: str) -> Any:
        if schedule.schedule_id == "bad":
            raise OverflowError("a defect")
        return decide_fire(schedule, now, tzdata)

    monkeypatch.setattr("scheduler.core.shard_schedules.decide_fire", broken)
    run(at, 3 * MINUTE)
    assert [event.body.problem for event in of(at, ScheduleFlagged, "bad")] == ["OverflowError: a defect"]  # type: ignore[union-attr]
    assert runs(at) == minutes(1)  # the others are skipped, since it is not over
    assert known(at).skipped == 2


def test_new_rules_of_a_zone_move_the_fires_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """C08 (c): the data of a zone changed between two starts."""
    at = stage()
    create(at, cron_expression="0 9 * * *", timezone="America/Vancouver", overlap=OverlapPolicy.ALLOW)
    before = known(at)
    old = replace(before, tzdata="2025b", next_fire_at=(before.next_fire_at or 0) + 3_600_000_000)
    another = stage()
    another.shard.restore(old)
    another.shard.on_loaded(another.now, 0)
    another.let_time_work()
    assert [event.body.next_fire_at for event in of(another, ScheduleUpdated)] == [before.next_fire_at]  # type: ignore[union-attr]
    run(another, DAY, MINUTE)
    assert len(runs(another)) == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cron_expression": "61 * * * *"}, "minute"),
    ({"timezone": "Europe/Nowhere"}, "timezone"),
    ({"cron_expression": "* * * * *", "every_ms": 1_000}, "one of"),
    ({"every_ms": 5}, "every"),
    ({"calendar": (5, 5)}, "calendar"),
    ({"jitter_ms": -1}, "jitter_ms"),
    ({"misfire_max": 0}, "misfire_max"),
    ({"misfire_grace_ms": 1}, "misfire_grace_ms"),
    ({"name": "no name"}, "name"),
    ({"task": TaskSpec(task_type="no name")}, "task_type"),
    ({"task": TaskSpec(task_type="t", idempotency_key="k")}, "idempotency_key"),
    ({"start_at": 10, "end_at": 5}, "end"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG)
def test_what_is_wrong_is_named_whether_it_is_made_or_changed(wrong: dict[str, Any], named: str) -> None:
    at = stage()
    outcome, detail = ask(at, CreateSchedule(request_id="r", schedule_id="s", spec=spec(**wrong)))
    assert outcome is Outcome.INVALID
    assert named in (detail or "")
    create(at)
    outcome, detail = ask(at, UpdateSchedule(request_id="r", schedule_id="s", spec=spec(**{"name": "n"} | wrong)))
    assert outcome is Outcome.INVALID
    assert "name" in (detail or "") or named in (detail or "")


def test_a_name_meets_the_first_schedule_that_has_it() -> None:
    at = stage()
    request = CreateSchedule(request_id="r", schedule_id="s", spec=spec(), fingerprint="a")
    assert ask(at, request)[0] is Outcome.ACCEPTED
    assert ask(at, request)[0] is Outcome.DUPLICATE
    assert ask(at, replace(request, fingerprint="b"))[0] is Outcome.CONFLICT
    for schedule_id in ("a.b", "", "x" * 91):
        assert ask(at, replace(request, schedule_id=schedule_id))[0] is Outcome.INVALID
    assert control(at, ScheduleAction.DELETE)[0] is Outcome.ACCEPTED
    assert control(at, ScheduleAction.DELETE)[0] is Outcome.NOT_FOUND
    assert ask(at, replace(request, fingerprint="b"))[0] is Outcome.ACCEPTED
    run(at, MINUTE)
    assert runs(at) == minutes(1)


def test_events_that_come_again_leave_the_schedule_alone_that_was_made_anew_under_the_same_id() -> None:
    at = stage()
    create(at)
    ask(at, UpdateSchedule(request_id="r", schedule_id="s", spec=spec(every_ms=5_000)))
    control(at, ScheduleAction.DELETE)
    create(at, every_ms=7_000)
    before = known(at)
    assert before.version == 4, "it begins where the first one ended"
    for event in list(at.events):
        at.shard.evolve(event)
    assert known(at) == before


def test_an_owner_that_does_not_remember_a_deletion_may_use_the_id_from_version_1_on() -> None:
    at = stage()
    create(at)
    control(at, ScheduleAction.DELETE)
    create(at)
    reader = stage()
    for event in at.events[:2]:
        reader.shard.evolve(event)
    anew = replace(at.events[-1], version=1, epoch=at.events[-1].epoch + 1)
    reader.shard.evolve(replace(anew, epoch=anew.epoch - 1))
    assert reader.shard.state.schedules.get("s") is None, "of the same owner it is the first creation, again"
    reader.shard.evolve(anew)
    assert known(reader).version == 1


def test_jitter_delays_a_run_by_the_same_wherever_it_is_computed() -> None:
    at = stage()
    create(at, jitter_ms=30_000, overlap=OverlapPolicy.ALLOW)
    run(at, 4 * MINUTE)
    fired = of(at, ScheduleFired)
    late = [event.at - event.body.nominal_at for event in fired]  # type: ignore[union-attr]
    assert all(0 <= one <= 31_000_000 for one in late)
    assert len(set(late)) > 1
    assert [event.body.nominal_at for event in fired] == sorted(event.body.nominal_at for event in fired)  # type: ignore[union-attr]


def test_a_gap_and_a_fold_follow_their_policies() -> None:
    at = stage()
    for name, gap, fold in (("a", GapPolicy.SKIP, FoldPolicy.DEFAULT), ("b", GapPolicy.DEFAULT, FoldPolicy.BOTH)):
        create(at, name, name=name, cron_expression="30 1 * * *", timezone="Europe/Berlin", gap=gap, fold=fold)
        assert known(at, name).next_fire_at is not None


def test_an_ended_schedule_has_no_timer_and_memory_goes_with_it() -> None:
    at = stage()
    create(at, calendar=(START + 60_000_000, START + 120_000_000), overlap=OverlapPolicy.ALLOW)
    run(at, 3 * MINUTE)
    assert runs(at) == minutes(1, 2)
    assert known(at).next_fire_at is None
    control(at, ScheduleAction.DELETE)
    assert len(at.shard.state.schedules) == 0
    assert at.shard.entity("schedule/s") is None


def test_effects_of_schedules_are_events_alone() -> None:
    at = stage()
    create(at)
    at.advance(MINUTE)
    effects: Effects = at.shard.fire_timers(at.now)
    assert (len(effects.events), effects.replies, effects.signals) == (2, [], [])


def test_a_schedule_that_cannot_be_computed_does_not_keep_its_shard_from_loading() -> None:
    at = stage()
    create(at, jitter_ms=1_000)
    schedule = at.shard.state.schedules.get("s")
    assert schedule is not None
    broken = replace(schedule, spec=replace(schedule.spec, cron_expression="of another version"))
    shard = Shard(0, ShardSettings(), Random(1), START)
    shard.restore(broken)
    later = ShardStage(shard, START)
    run(later, MINUTE)
    assert [event.entity_id for event in of(later, ScheduleFlagged)] == ["s"]


def test_a_run_whose_id_comes_back_from_the_wheel_waits_and_is_that_task() -> None:
    early = stage()
    taken_id = run_id("s", START - MINUTE * 1_000)
    early.submit(taken_id, scheduled_at=START + DAY * 1_000)
    waiting = early.task(taken_id)
    at = stage()
    create(at, overlap=OverlapPolicy.QUEUE)
    ask(at, RunSchedule(request_id="r", schedule_id="s"))
    at.let_time_work()
    (running,) = runs(at)
    schedule = at.shard.state.schedules.get("s")
    assert schedule is not None
    at.shard.state.schedules.put(replace(schedule, due=(DueRun(task_id=taken_id, nominal_at=START - MINUTE * 1_000),)))
    record = ParkedTask(task=waiting, due_at=START + DAY * 1_000)
    at.shard.unpark(record, Place(3, 0), Source("delay.3", 0), at.now)
    at.start(running)
    at.succeed(running)
    at.let_time_work()
    assert runs(at) == [running]
    at.cancel(taken_id)
    at.let_time_work()
    after = at.shard.state.schedules.get("s")
    assert after is not None and after.due == ()
