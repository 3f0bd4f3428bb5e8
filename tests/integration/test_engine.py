"""The embedded engine as a whole: its health, its end, and what it leaves of the process that it ran in."""

from __future__ import annotations

import gc
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog

import tidewheel.embedded
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.ports import TopicPartition
from schemas.ids import shard_of
from schemas.topics import TASK_EVENTS
from tests.harness import SHARDS, WAIT_S, eventually, running
from tidewheel import App

app = App()
release = threading.Event()


@app.task(name="wait")
def wait() -> None:
    while not release.wait(0.005):
        pass


@app.task(name="touch")
def touch() -> None:
    """Nothing to do."""


def test_it_is_unwell_while_its_view_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidewheel.embedded, "STALLED_S", 1.0)
    with running(app) as engine:
        assert not engine.health().reasons
        with engine.view._write_lock:
            touch.submit()
            eventually(lambda: engine.health().reasons, "the stalled projector was noticed")
            unwell = [part.name for part in engine.health().parts if not part.is_ok]
            assert unwell == ["projector"]
            assert engine.view_lag() > 0
        eventually(lambda: not engine.health().reasons, "it was well again")


def test_the_death_of_the_gateway_is_noticed() -> None:
    engine = App().embedded(shards=SHARDS)
    with structlog.testing.capture_logs():
        engine.start()
        engine.gateway.close()
        assert engine.wait(WAIT_S)
        engine.stop()
    assert "the gateway was closed" in str(engine.failure)


@pytest.mark.parametrize("is_released", [True, False])
def test_what_runs_may_end_within_the_grace_of_the_stop_and_no_longer(is_released: bool) -> None:
    release.clear()
    engine = app.embedded(shards=SHARDS, grace_s=600)
    engine.start()
    assert engine.worker is not None
    stats = engine.worker.stats
    wait.submit()
    eventually(lambda: stats.running, "it runs")
    stopping = threading.Thread(target=engine.stop, args=(WAIT_S if is_released else 0.05,))
    stopping.start()
    if is_released:
        release.set()
    stopping.join(WAIT_S)
    is_stuck = stopping.is_alive()
    release.set()
    stopping.join(WAIT_S)
    assert not is_stuck
    assert (stats.succeeded, stats.returned) == ((1, 0) if is_released else (0, 1))


def test_the_process_is_left_as_it_was() -> None:
    before = gc.get_threshold(), sys.getswitchinterval()
    with App().embedded(shards=1):
        with App().embedded(shards=1):
            within = gc.get_threshold(), sys.getswitchinterval()
        assert (gc.get_threshold(), sys.getswitchinterval()) == within != before
    assert (gc.get_threshold(), sys.getswitchinterval()) == before


def test_a_view_that_cannot_be_whole_any_more_says_so(tmp_path: Path) -> None:
    with running(app, tmp_path) as engine:
        task_id = touch.submit().task_id
        eventually(lambda: engine.view_lag() == 0, "the view caught up")
    events = TopicPartition(TASK_EVENTS, shard_of(task_id, SHARDS))
    a_month_later = time.time_ns() // 1_000_000 + 30 * 86_400_000
    storage = SqliteLogStorage(tmp_path / "log.db", now_ms=lambda: a_month_later)
    storage.trim(events, storage.start(embedded_catalog(SHARDS).durable).extents[events].next_offset)
    eventually(lambda: storage.read(events, 0, 1)[0].offset > 0, "old events were deleted")
    storage.close()
    for is_removed in (False, True):
        if is_removed:
            (tmp_path / "view.db").unlink()
        engine = app.embedded(tmp_path, shards=SHARDS)
        with structlog.testing.capture_logs() as logs:
            engine._open()  # the shards, whose checkpoints are too young for this, would refuse to go on
            engine.stop()
        warnings = [entry["shard"] for entry in logs if "stays incomplete" in entry["event"]]
        assert warnings == ([events.partition] if is_removed else [])
