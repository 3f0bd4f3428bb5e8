"""C12: an instant has an offset, and is the same on every surface whatever the zone of the host.

Chosen: a time without an offset is refused on every surface (422), and so is a number, in whatever unit; the precision
is the microsecond, finer digits are rounded up; what is returned is in UTC with `Z`.
The forms themselves are in tests/unit/test_instants.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from tests.harness import TASKS, Api, running
from tidewheel import App, NotSubmitted, TaskType
from tidewheel.http import HttpBackend
from tidewheel.settings import ClientSettings

CET_SUMMER = timezone(timedelta(hours=2))


@pytest.fixture(scope="module", autouse=True)
def _host_in_kolkata() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Asia/Kolkata"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


Surfaces = dict[str, Any]


def _task_type(app: App) -> TaskType[[], None]:
    @app.task(name="later")
    async def later() -> None: ...

    return later


@pytest.fixture(scope="module")
def surfaces() -> Iterator[Surfaces]:
    local, remote = App(), App()
    tasks = {"in process": _task_type(local), "over http": _task_type(remote)}
    with running(local, port=0, has_worker=False) as engine, Api(engine.address) as api:
        backend = HttpBackend(ClientSettings(server=engine.address, timeout_s=15))
        remote.use(backend)
        yield {**tasks, "rest": api}
        backend.close()


@pytest.mark.parametrize(
    ("sent", "returned"),
    [
        ("2100-06-01T12:00:00Z", "2100-06-01T12:00:00.000000Z"),
        ("2100-06-01T12:00:00+02:00", "2100-06-01T10:00:00.000000Z"),
        ("2100-06-01T12:00:00-00:00", "2100-06-01T12:00:00.000000Z"),
        ("2100-06-01T12:00:00.123456Z", "2100-06-01T12:00:00.123456Z"),
        ("2100-06-01T12:00:00.1234561Z", "2100-06-01T12:00:00.123457Z"),
    ],
)
def test_an_instant_is_returned_as_it_was_sent(surfaces: Surfaces, sent: str, returned: str) -> None:
    api: Api = surfaces["rest"]
    assert api.task(api.submit("later", scheduled_at=sent))["scheduled_at"] == returned
    if len(sent) <= len("2100-06-01T12:00:00.123456Z"):  # what a datetime can hold
        for surface in ("in process", "over http"):
            handle = surfaces[surface].options(at=datetime.fromisoformat(sent)).submit()
            assert handle.info().scheduled_at == returned


def test_an_aware_datetime_of_any_zone_is_that_instant(surfaces: Surfaces) -> None:
    for surface in ("in process", "over http"):
        handle = surfaces[surface].options(at=datetime(2100, 6, 1, 14, tzinfo=CET_SUMMER)).submit()
        assert handle.info().scheduled_at == "2100-06-01T12:00:00.000000Z"


@pytest.mark.parametrize(
    "at", ["2026-06-01T12:00:00", 1_780_315_200, 1_780_315_200_000, "2026-03-08T02:30:00[America/New_York]"]
)
def test_what_is_no_instant_is_refused_on_every_surface(surfaces: Surfaces, at: Any) -> None:
    answer = surfaces["rest"]("POST", TASKS, json={"task_type": "later", "scheduled_at": at})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "scheduled_at")
    naive = datetime.fromisoformat(at) if at == "2026-06-01T12:00:00" else at
    for surface in ("in process", "over http"):
        with pytest.raises(NotSubmitted, match="scheduled_at"):
            surfaces[surface].options(at=naive).submit()


def test_now_is_now_in_any_zone(surfaces: Surfaces) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    for surface in ("in process", "over http"):
        info = surfaces[surface].submit().info()
        assert info.status == "PENDING"
        assert before <= datetime.fromisoformat(info.scheduled_at) <= datetime.now(UTC) + timedelta(seconds=1)
