"""kill -9 of the process under load: what was acknowledged is there afterwards, decided once, and ends.

The benchmark does it twenty times with figures; here it is a few rounds with every event looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from scheduler.core.shard import ShardSettings
from schemas.errors import Fatal
from schemas.messages import Status
from tests.harness import TASKS, Api, Served, eventually, history, kept_in, live_in, notes, running
from tests.process_app import app, write
from tidewheel import App

APP = "tests.process_app:app"
ROUNDS, CLIENTS, BULK = 4, 3, 20
QUICK = {"worker_timeout_us": 400_000}
UNFINISHED = ["SCHEDULED", "PENDING", "RUNNING", "RETRYING"]


class Load:
    """Clients that submit without pause until their server is gone; they note what was acknowledged."""

    def __init__(self, journal: Path, seed: int) -> None:
        self.acknowledged: dict[str, str] = {}  # text by task id
        self._journal, self._rng = journal, Random(seed)
        self._lock = threading.Lock()

    def submit(self, address: str, prefix: str) -> None:
        with Api(address) as api:
            for number in range(100_000):
                tasks = [self._task(f"{prefix}-{number}-{n}") for n in range(BULK)]
                try:
                    answer = api("POST", f"{TASKS}/bulk", json={"tasks": tasks})
                except httpx.TransportError:
                    return
                assert answer.status_code == 202, answer.text
                with self._lock:
                    for task, result in zip(tasks, answer.json()["results"], strict=True):
                        self.acknowledged[result["task"]["task_id"]] = task["payload"]["text"]

    def has(self, count: int) -> bool:
        """Whether so many were acknowledged."""
        return len(self.acknowledged) >= count

    def _task(self, text: str) -> dict[str, Any]:
        with self._lock:
            delay_seconds = self._rng.choice([0, 0, 0.05, 0.3])
        payload = {"journal": str(self._journal), "text": text}
        return {"task_type": "note", "payload": payload, "delay_seconds": delay_seconds}


def listed(api: Api, status: str) -> list[str]:
    return [one["task_id"] for one in api("GET", TASKS, params={"status": status, "limit": 1}).json()["tasks"]]


def test_nothing_that_was_acknowledged_is_lost(tmp_path: Path) -> None:
    seed = 20
    print(f"seed {seed}")  # noqa: T201 (so that a failure can be played again)
    rng, data, journal = Random(seed), tmp_path / "data", tmp_path / "journal.txt"
    load = Load(journal, seed)
    with Served(data, APP, shard=QUICK) as served, ThreadPoolExecutor(CLIENTS) as clients:
        for number in range(ROUNDS):
            wanted = len(load.acknowledged) + rng.randint(100, 600)
            address = str(served.api.client.base_url).rstrip("/")
            submitting = [clients.submit(load.submit, address, f"r{number}c{client}") for client in range(CLIENTS)]
            eventually(partial(load.has, wanted), "the load")
            served.kill()
            for one in submitting:
                one.result()
            left = history(data)
            assert load.acknowledged.keys() <= left.tasks.keys()
            served.start()
        eventually(lambda: not any(listed(served.api, status) for status in UNFINISHED), "the end of all tasks")
        for task_id in rng.sample(sorted(load.acknowledged), 50):
            assert served.api.task(task_id)["status"] == "SUCCEEDED"
        served.kill()
    raw = history(data)  # each input decided once, versions without holes, transitions of the table
    assert load.acknowledged.keys() <= raw.tasks.keys()
    assert {raw.tasks[task_id].status for task_id in load.acknowledged} == {Status.SUCCEEDED}
    assert {line.rpartition(" ")[0] for line in notes(journal)} >= set(load.acknowledged.values())


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder with tasks that ended and tasks that wait, left in order."""
    folder = tmp_path / "data"
    with running(app, folder):
        done = [write.submit(str(tmp_path / "journal.txt"), f"done-{n}") for n in range(20)]
        assert [handle.result(20) for handle in done] == [f"done-{n}" for n in range(20)]
        for n in range(20):
            write.options(delay=3600, task_id=f"waiting-{n}").submit(str(tmp_path / "journal.txt"), f"waiting-{n}")
    yield folder


def removed(path: Path) -> None:
    """Delete a database with what belongs to it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


@pytest.mark.parametrize("lost", [[], ["view.db"], ["state.db"], ["view.db", "state.db"]], ids=lambda names: str(names))
def test_what_follows_from_the_log_is_made_again(data: Path, lost: list[str]) -> None:
    before = history(data)
    for name in lost:
        removed(data / name)
    with running(app, data, port=0) as engine, Api(engine.address) as api:
        assert kept_in(engine) == before.live() == history(engine).live()
        assert len(before.live()) == 20
        for task_id, task in before.tasks.items():
            shown = api.task(task_id)  # at once: what the log tells is shown as soon as the API answers
            assert (shown["status"], shown["version"]) == (task.status, task.version)
        repeated = api("POST", TASKS, json={"task_type": "note", "task_id": "waiting-3", "payload": 1})
        assert repeated.status_code == 409
        late = write.submit(str(data / "journal.txt"), "late")
        assert late.result(20) == "late"
    assert history(data).of["waiting-3"] == before.of["waiting-3"]


def test_the_api_answers_when_a_view_that_is_made_again_is_whole(tmp_path: Path) -> None:
    """Else a task that ended long ago would be unknown for a while, and its id free."""
    forgetful, journal = ShardSettings(ended_kept_us=0), str(tmp_path / "journal.txt")
    with running(app, tmp_path / "data", shard=forgetful) as engine:
        handles = write.submit_many({"journal": journal, "text": str(n)} for n in range(2_000))
        eventually(lambda: len(notes(tmp_path / "journal.txt")) == len(handles) and not live_in(engine), "their end")
    removed(tmp_path / "data" / "view.db")
    with running(app, tmp_path / "data", shard=forgetful):
        assert {app.handle(one.task_id).status() for one in reversed(handles)} == {Status.SUCCEEDED}


@pytest.mark.parametrize("content", [b"", b"no database at all" * 1000])
def test_a_damaged_view_is_made_again(data: Path, content: bytes) -> None:
    before = history(data)
    removed(data / "view.db")
    (data / "view.db").write_bytes(content)
    with running(app, data, port=0) as engine, Api(engine.address) as api:
        assert {api.task(task_id)["status"] for task_id in before.tasks} == {"SUCCEEDED", "SCHEDULED"}
    if content:
        assert (data / "view.db.damaged").read_bytes() == content


def test_a_damaged_state_or_log_is_told_in_words_and_nothing_is_left_locked(data: Path) -> None:
    for name in ("state.db", "log.db"):
        path = data / name
        good = path.read_bytes()
        removed(path)
        path.write_bytes(b"no database at all" * 1000)
        with pytest.raises(Fatal, match=rf"{name}.*no SQLite file"):
            App().embedded(data, shards=4).start()
        removed(path)
        path.write_bytes(good)
    with running(app, data) as engine:
        assert len(kept_in(engine)) == 20


def test_a_folder_has_one_engine_at_a_time(data: Path) -> None:
    with running(app, data), pytest.raises(Fatal, match="in use by another process"):
        App().embedded(data, shards=4).start()
    with pytest.raises(Fatal, match="start with shards=4"):
        App().embedded(data, shards=2).start()
    with running(app, data) as engine:
        assert len(kept_in(engine)) == 20
