"""How long it takes from the call of `asubmit` until the handler begins, at a fixed rate of submissions.

The load is open: the next submission does not wait for the last. `p50_ms` and its like count from the instant at which
`asubmit` was called; `from_intended_…` from the instant at which it should have been, so that a submitter that was held
up hides nothing; `accept_…` is how long `asubmit` took, which returns when the task is on disk.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, Options, Say, quantiles
from benchmarks.load import open_loop
from benchmarks.machine import processor_s
from benchmarks.shared_starts import SharedStarts
from benchmarks.stage import Noop, Starts, running


class StartLatencyOptions(Options, frozen=True, kw_only=True):
    """How much is submitted."""

    rate: Annotated[float, Meta(gt=0, le=20_000, description="submissions a second")] = 50.0
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="how long")] = 10.0
    warm_up_s: Annotated[float, Meta(ge=0, le=600, description="seconds at the same rate before that, not timed")] = 2.0


class StartLatency(Figures, frozen=True, kw_only=True):
    """From submission to start, in milliseconds."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    from_intended_p50_ms: float
    from_intended_p99_ms: float
    from_intended_max_ms: float
    accept_p50_ms: float
    accept_p99_ms: float


class Submissions:
    """The instants of all submissions, by index: `time.perf_counter_ns`."""

    def __init__(self, noop: Noop, blob: str, total: int, warm_up: int, processor_s: Callable[[], float]) -> None:
        self.intended_ns = array("q", bytes(8 * total))
        self.begun_ns = array("q", bytes(8 * total))
        self.accepted_ns = array("q", bytes(8 * total))
        self.cpu_begun_s = 0.0
        self._noop, self._blob, self._warm_up, self._processor_s = noop, blob, warm_up, processor_s

    async def submit(self, index: int, intended_ns: int) -> None:
        """Submit one task."""
        if index == self._warm_up:
            self.cpu_begun_s = self._processor_s()
        self.intended_ns[index] = intended_ns
        self.begun_ns[index] = time.perf_counter_ns()
        await self._noop.asubmit(index, self._blob)
        self.accepted_ns[index] = time.perf_counter_ns()


def measure(options: StartLatencyOptions, folder: Path, say: Say) -> StartLatency:
    """Run once."""
    warm_up, count = round(options.rate * options.warm_up_s), max(1, round(options.rate * options.seconds))
    total = warm_up + count
    say(f"{count} tasks at {options.rate:g} a second, after {warm_up} to warm up")
    with running(folder, total, shards=options.shards) as stage:
        done = Submissions(stage.noop, stage.blob, total, warm_up, processor_s)
        asyncio.run(open_loop(total, options.rate, done.submit, say))
        stage.starts.wait_for(total)
        cpu_s = processor_s() - done.cpu_begun_s
    # Starts are complete only now: until the engine stopped, a task might have been started again.
    return figures_of(done, stage.starts, warm_up, total, cpu_s)


def figures_of(
    done: Submissions, starts: Starts | SharedStarts, warm_up: int, total: int, cpu_s: float
) -> StartLatency:
    """What the instants of submissions and starts come to, without those of the warm-up."""
    count = total - warm_up
    timed = [index for index in range(warm_up, total) if starts.first_ns[index]]
    from_begun = quantiles(starts.first_ns[index] - done.begun_ns[index] for index in timed)
    from_intended = quantiles(starts.first_ns[index] - done.intended_ns[index] for index in timed)
    accept = quantiles(done.accepted_ns[index] - done.begun_ns[index] for index in range(warm_up, total))
    return StartLatency(
        count=len(timed),
        missing=total - starts.started,
        duplicates=starts.duplicates,
        early=sum(1 for index in timed if starts.first_ns[index] < done.begun_ns[index]),
        cpu_us_per_task=round(cpu_s / count * 1e6, 1),
        **from_begun._asdict(),
        from_intended_p50_ms=from_intended.p50_ms,
        from_intended_p99_ms=from_intended.p99_ms,
        from_intended_max_ms=from_intended.max_ms,
        accept_p50_ms=accept.p50_ms,
        accept_p99_ms=accept.p99_ms,
    )


BENCHMARK = Benchmark("start_latency", "from submission to start, at a fixed rate", StartLatencyOptions, measure)
