"""Where shards are in other processes, a task is shown from its acceptance on, though the view lags or is down."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import accepted
from scheduler.accepted import Accepted
from scheduler.refusals import Refused
from scheduler.service import ServiceSettings
from scheduler.submission import Submission, validated
from schemas.messages import Outcome, Reply, Status, SubmitTask, TaskSpec
from tests.unit.surface import Surface, running

ELSEWHERE = ServiceSettings(remembers_accepted=True)


def submit(surface: Surface, **fields: Any) -> str:
    """A task that no shard of this process knows of."""
    task_id = surface.service.submit(validated(Submission, {"task_type": "t", **fields})).run().view.task_id
    surface.forgotten.add(task_id)
    return task_id


def test_it_is_shown_though_the_view_knows_nothing_yet() -> None:
    with running(ELSEWHERE) as surface:
        surface.view.stale_reads = 1_000_000
        task_id = submit(surface, payload=b"7", delay_seconds=60)
        view = surface.service.get(task_id).run()
        assert (view.status, view.task_type) == (Status.SCHEDULED, "t")
        surface.view.is_down = True
        assert surface.service.get(task_id).run().status is Status.SCHEDULED
        with pytest.raises(Refused):
            surface.service.get("another").run()


def test_what_the_view_has_comes_first() -> None:
    with running(ELSEWHERE) as surface:
        task_id = submit(surface, delay_seconds=60)
        surface.service.cancel(task_id).run()
        surface.until_shown(task_id, Status.CANCELLED)
        assert surface.service.get(task_id).run().status is Status.CANCELLED


def test_the_oldest_are_forgotten_beyond_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepted, "ACCEPTED_MAX", 3)
    monkeypatch.setattr(accepted, "ACCEPTED_BYTES_MAX", 100)
    remembered = Accepted()

    def note(task_id: str, size: int) -> None:
        request = SubmitTask(request_id="r", spec=TaskSpec(task_type="t", payload=bytes(size)), submitted_at=0)
        remembered.note(request, Reply(request_id="r", task_id=task_id, outcome=Outcome.ACCEPTED, decided_at=5))

    for number in range(5):
        note(f"t{number}", 10)
    assert [bool(remembered.get(f"t{number}")) for number in range(5)] == [False, False, True, True, True]
    note("large", 85)
    assert remembered.get("t3") is None
    assert remembered.get("large") is not None


def test_who_waits_for_an_end_waits_for_its_result_too() -> None:
    """The view lags by longer than one read of it waits."""
    with running(ServiceSettings(view_wait_s=0.0)) as surface:
        task_id = surface.service.submit(validated(Submission, {"task_type": "t"})).run().view.task_id
        surface.succeed(task_id, b"7")
        surface.until_shown(task_id, Status.SUCCEEDED)
        surface.view.stale_reads = 3
        assert surface.service.get(task_id).run().is_partial
        surface.view.stale_reads = 3
        view = surface.service.wait(task_id, 20).run()
        assert (view.is_partial, bytes(view.result)) == (False, b"7")
