"""How far the view lags behind the events at a fixed rate of tasks, and how fast it is rebuilt from nothing.

The lag is the time from an event being on disk until the view shows it, looked at every millisecond.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, NothingMeasured, Options, Say, quantiles
from benchmarks.load import open_loop
from benchmarks.machine import processor_s
from benchmarks.stage import WAIT_S, Stage, running
from infra.sqlite import SqliteView
from scheduler.ports import TaskFilter, TopicPartition
from scheduler.projector import Projector
from schemas.codec import Codec
from schemas.topics import TASK_EVENTS
from tidewheel import Engine

LOOK_EVERY_S = 0.001
JOIN_S = 10.0


class ProjectionOptions(Options, frozen=True, kw_only=True):
    """How much is submitted."""

    rate: Annotated[float, Meta(gt=0, le=20_000, description="tasks a second")] = 500.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long")] = 10.0
    warm_up_s: Annotated[float, Meta(ge=0, le=600, description="seconds at the same rate before that, not timed")] = 2.0


class Projection(Figures, frozen=True, kw_only=True):
    """The lag in milliseconds; `rows_per_s` and `events_per_s` of a rebuild. `not_shown`: tasks the view lacks."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    rows_per_s: float
    events_per_s: float
    not_shown: int


class _LagSampler:
    """Watches, from a thread of its own, when the ends of the events were first seen and when the view had them."""

    def __init__(self, engine: Engine) -> None:
        self.lags_ns: list[tuple[int, int]] = []  # when it began, how long it was
        self._engine = engine
        self._log = engine.broker.connect()
        self._partitions = [TopicPartition(TASK_EVENTS, shard) for shard in range(engine.settings.shards)]
        self._ends = [self._log.end_offset(partition) for partition in self._partitions]
        self._open: list[deque[tuple[int, int]]] = [deque() for _ in self._partitions]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give the connection back."""
        self._stopping.set()
        self._thread.join(JOIN_S)
        self._log.close()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            self._look(time.perf_counter_ns())

    def _look(self, now: int) -> None:
        positions = self._engine.view.positions()
        for number, partition in enumerate(self._partitions):
            waiting = self._open[number]
            end = self._log.end_offset(partition)
            if end > self._ends[number]:
                self._ends[number] = end
                waiting.append((end, now))
            applied = positions[number].next_offset if number in positions else 0
            while waiting and waiting[0][0] <= applied:
                _, seen = waiting.popleft()
                self.lags_ns.append((seen, now - seen))


def measure(options: ProjectionOptions, folder: Path, say: Say) -> Projection:
    """Run once."""
    warm_up, count = round(options.rate * options.warm_up_s), max(1, round(options.rate * options.seconds))
    total = warm_up + count
    begun = [0, 0.0]  # of what counts: perf_counter_ns, processor_s
    with running(folder / "engine", total, shards=options.shards) as stage:

        async def submit(index: int, _: int) -> None:
            if index == warm_up:
                begun[:] = time.perf_counter_ns(), processor_s()
            await stage.noop.asubmit(index, stage.blob)

        say(f"{count} tasks at {options.rate:g} a second, after {warm_up} to warm up")
        sampler = _LagSampler(stage.engine)
        asyncio.run(open_loop(total, options.rate, submit, say))
        stage.starts.wait_for(total)
        stage.wait_until_projected()
        cpu_s = processor_s() - begun[1]
        sampler.stop()
        not_shown = total - stage.engine.view.count(TaskFilter())
        say(f"the view of {total} tasks from nothing")
        rows_per_s, events_per_s = _rebuild(stage, folder)
    lag = quantiles(lag for seen, lag in sampler.lags_ns if seen >= begun[0])
    return Projection(
        count=count,
        missing=total - stage.starts.started,
        duplicates=stage.starts.duplicates,
        early=0,  # all of them are due at once
        cpu_us_per_task=round(cpu_s / count * 1e6, 1),
        lag_p50_ms=lag.p50_ms,
        lag_p99_ms=lag.p99_ms,
        lag_max_ms=lag.max_ms,
        rows_per_s=rows_per_s,
        events_per_s=events_per_s,
        not_shown=not_shown,
    )


def _rebuild(stage: Stage, folder: Path) -> tuple[float, float]:
    log, view = stage.engine.broker.connect(), SqliteView(folder / "rebuilt.db")
    try:
        projector = Projector(log, view, Codec.builtin(), stage.engine.settings.shards)
        events, begun_s = 0, time.perf_counter()
        while projector.lag():
            events += projector.step(0)
            if time.perf_counter() - begun_s > WAIT_S:
                raise NothingMeasured(f"the view was not rebuilt in {WAIT_S:.0f} s")
        took_s = time.perf_counter() - begun_s
        projector.close()
        return round(view.count(TaskFilter()) / took_s, 1), round(events / took_s, 1)
    finally:
        view.close()
        log.close()


BENCHMARK = Benchmark("projection", "how far the view lags, and how fast it is rebuilt", ProjectionOptions, measure)
