"""What it costs when a part of a cluster goes away under load: schedulers, workers, brokers, the database.

`takeover` ends schedulers by SIGKILL and by SIGTERM in turn, and counts from the signal until each shard has started a
task that was submitted after it. `scheduler_pause` stops one for longer than its group waits; what it writes when it
wakes up must be void. `worker_loss` kills a worker that runs tasks, and counts until all of them run on another one.
`broker_loss` kills brokers of three in turn, `view_loss` the only node of the database; both start services of their
own for that. Where there is a load it goes on at its rate whatever becomes of the calls; `errors` are calls that were
not acknowledged. `missing`, `early`, `lost` and `decided_twice` are read from the raw events at the end.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from benchmarks.cluster import APP, ClusterOptions, ClusterStage, Process, running
from benchmarks.cluster_audit import settled
from benchmarks.contract import Benchmark, Figures, NothingMeasured, Say
from benchmarks.load import wait_until
from benchmarks.stage import WAIT_S
from infra.services import Node
from schemas.errors import Retriable
from schemas.ids import shard_of
from tidewheel import TidewheelError

GIVE_UP_S = 120.0  # until a part that ended is replaced, or one that came back has caught up
LOOK_S = 0.02
SETTLE_S = 2.0  # of load before the next round
AFTER_S = 5.0  # of load after the last: what comes late comes then
SPARE_S = 60.0  # of load that there is room for beside what is planned

Rate = Annotated[float, Meta(gt=0, le=5_000, description="submissions a second meanwhile")]
Rounds = Annotated[int, Meta(ge=1, le=100, description="how often")]
OutageS = Annotated[float, Meta(ge=1, le=600, description="seconds until it comes back")]


class Loss(Figures, frozen=True, kw_only=True):
    """`lost` tasks were acknowledged and have not succeeded; `void` events were written by owners without their shard.

    `missing` were acknowledged and never started. `duplicates` are starts beyond the first of a task.
    """

    acknowledged: int
    errors: int
    lost: int
    decided_twice: int
    void: int


class Load:
    """Submissions at a rate from a thread of its own, whatever becomes of them; what was acknowledged is noted."""

    def __init__(self, stage: ClusterStage, rate: float, capacity: int) -> None:
        self.ids: dict[int, str] = {}
        self.count = self.errors = 0
        self._stage, self._rate, self._capacity = stage, rate, capacity
        self._cpu_begun_s = _cpu_s(stage)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        if not wait_until(lambda: len(self.ids) > self._rate, WAIT_S):
            self.stop()
            raise NothingMeasured(f"within {WAIT_S:.0f} s not {self._rate:g} tasks were acknowledged")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Submit no more; return when all calls have ended."""
        self._stopping.set()
        self._thread.join(2 * WAIT_S)

    def figures(self) -> dict[str, Any]:
        """Stop, and say what came of all of it: the figures of every `Loss`."""
        self.stop()
        cpu_s = _cpu_s(self._stage) - self._cpu_begun_s
        found = settled(self._stage, self.ids)
        acknowledged = self.ids.values()
        return {
            "count": self.count,
            "missing": found.missing(acknowledged),
            "duplicates": found.again(),
            "early": found.early,
            "cpu_us_per_task": round(cpu_s / max(1, len(self.ids)) * 1e6, 1),
            "acknowledged": len(self.ids),
            "errors": self.errors,
            "lost": found.lost(acknowledged),
            "decided_twice": found.decided_twice,
            "void": found.void,
        }

    async def _run(self) -> None:
        begun_s = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            while not self._stopping.is_set() and self.count < self._capacity:
                await asyncio.sleep(max(0.0, begun_s + self.count / self._rate - time.perf_counter()))
                calls.create_task(self._submit(self.count))
                self.count += 1

    async def _submit(self, index: int) -> None:
        try:
            self.ids[index] = (await self._stage.noop.asubmit(index, self._stage.blob)).task_id
        except TidewheelError:  # not decided in time, or the log is away: it was not acknowledged
            self.errors += 1


def _cpu_s(stage: ClusterStage) -> float:
    return sum(stage.processor_s().values())


def first_starts_s(stage: ClusterStage, load: Load, at_ns: int) -> float:
    """From `at_ns`, which is now, until each shard has started a task that is submitted from now on."""
    first, started = load.count, dict[int, int]()

    def all_started() -> bool:
        for index in range(first, load.count):
            begun = stage.starts.first_ns[index]
            if begun and (task_id := load.ids.get(index)) is not None:
                shard = shard_of(task_id, stage.shards)
                started[shard] = min(started.get(shard, begun), begun)
                if len(started) == stage.shards:
                    return True
        return False

    if not wait_until(all_started, GIVE_UP_S, every_s=LOOK_S):
        raise NothingMeasured(f"after {GIVE_UP_S:.0f} s only the shards {sorted(started)} started tasks")
    return round((max(started.values()) - at_ns) / 1e9, 3)


def longest_gap_s(stage: ClusterStage, load: Load, from_ns: int, until_ns: int) -> float:
    """The longest time between these instants in which a shard started nothing."""
    starts: dict[int, list[int]] = {shard: [from_ns, until_ns] for shard in range(stage.shards)}
    for index, task_id in list(load.ids.items()):
        if from_ns < stage.starts.first_ns[index] < until_ns:
            starts[shard_of(task_id, stage.shards)].append(stage.starts.first_ns[index])
    gaps = [later - earlier for one in starts.values() for earlier, later in pairwise(sorted(one))]
    return round(max(gaps) / 1e9, 3)


# --- schedulers -------------------------------------------------------------------------------------------------------


class TakeoverOptions(ClusterOptions, frozen=True, kw_only=True):
    """How often, and under which load."""

    schedulers: Annotated[int, Meta(ge=2, le=16, description="scheduler processes")] = 2
    rounds: Annotated[int, Meta(ge=1, le=100, description="of each kind")] = 3
    rate: Rate = 500.0


class Takeover(Loss, frozen=True, kw_only=True):
    """From the signal until the first start of a task of each shard, in seconds.

    `stop_s` is how long a planned stop took until the process had ended.
    """

    killed_first_start_s_p50: float
    killed_first_start_s_max: float
    stopped_first_start_s_p50: float
    stopped_first_start_s_max: float
    stop_s_max: float


def _measure_takeover(options: TakeoverOptions, folder: Path, say: Say) -> Takeover:
    capacity = round(options.rate * (2 * options.rounds + 1) * SPARE_S)
    took: dict[str, list[float]] = {"kill": [], "stop": []}
    stops_s: list[float] = []
    with running(options, folder, capacity) as stage, Load(stage, options.rate, capacity) as load:
        schedulers = [process for process in stage.processes if process.name == "scheduler"]
        for number in range(options.rounds):
            for kind, found in took.items():
                victim = schedulers.pop(0)
                at_ns = time.perf_counter_ns()
                stops_s += _ended(victim, kind)
                found.append(first_starts_s(stage, load, at_ns))
                say(f"round {number + 1} of {options.rounds}, {kind}: {found[-1]:.2f} s")
                stage.processes.remove(victim)
                schedulers.append(stage.start("scheduler"))
                _settle(stage, load)
        say("reading the topics")
        return Takeover(
            **load.figures(),
            killed_first_start_s_p50=round(statistics.median(took["kill"]), 3),
            killed_first_start_s_max=max(took["kill"]),
            stopped_first_start_s_p50=round(statistics.median(took["stop"]), 3),
            stopped_first_start_s_max=max(took["stop"]),
            stop_s_max=round(max(stops_s), 3),
        )


def _ended(victim: Process, kind: str) -> list[float]:
    """How long a planned stop took, if it was one."""
    if kind == "stop":
        return [victim.stop()]
    victim.kill()
    return []


def _settle(stage: ClusterStage, load: Load) -> None:
    """Until the group has shared the shards anew: a while, and then every shard starts tasks."""
    time.sleep(SETTLE_S)
    first_starts_s(stage, load, time.perf_counter_ns())


class PauseOptions(ClusterOptions, frozen=True, kw_only=True):
    """How long, and under which load."""

    schedulers: Annotated[int, Meta(ge=2, le=16, description="scheduler processes")] = 2
    pause_s: Annotated[float, Meta(ge=8, le=600, description="longer than the 6 s after which its group goes on")] = (
        30.0
    )
    rate: Rate = 500.0


class SchedulerPause(Loss, frozen=True, kw_only=True):
    """The longest time in which a shard started nothing: from SIGSTOP on, and from SIGCONT on."""

    start_gap_s_max: float
    resumed_gap_s_max: float


def _measure_pause(options: PauseOptions, folder: Path, say: Say) -> SchedulerPause:
    capacity = round(options.rate * (options.pause_s + 2 * SPARE_S))
    with running(options, folder, capacity) as stage, Load(stage, options.rate, capacity) as load:
        victim = next(process for process in stage.processes if process.name == "scheduler")
        say(f"a scheduler is paused for {options.pause_s:g} s")
        paused_ns = time.perf_counter_ns()
        victim.pause()
        time.sleep(options.pause_s)
        resumed_ns = time.perf_counter_ns()
        victim.resume()
        time.sleep(AFTER_S)
        end_ns = time.perf_counter_ns()
        say("reading the topics")
        return SchedulerPause(
            **load.figures(),
            start_gap_s_max=longest_gap_s(stage, load, paused_ns, resumed_ns),
            resumed_gap_s_max=longest_gap_s(stage, load, resumed_ns, end_ns),
        )


# --- workers ----------------------------------------------------------------------------------------------------------


class WorkerLossOptions(ClusterOptions, frozen=True, kw_only=True):
    """How often, and how many tasks run then."""

    workers: Annotated[Literal[1], Meta(description="that run the tasks; the next one is started before each kill")] = 1
    rounds: Rounds = 3
    running: Annotated[int, Meta(ge=1, le=100, description="tasks that run on the worker when it is killed")] = 50


class WorkerLoss(Figures, frozen=True, kw_only=True):
    """From SIGKILL until the last of the tasks that ran was started elsewhere, in seconds.

    `duplicate_starts` are those beyond the one that each kill made necessary; `duplicates` have these in them.
    """

    restart_s_p50: float
    restart_s_max: float
    lost: int
    decided_twice: int
    duplicate_starts: int


def _measure_worker_loss(options: WorkerLossOptions, folder: Path, say: Say) -> WorkerLoss:
    total = options.rounds * options.running
    restarts_s: list[float] = []
    ids: dict[int, str] = {}
    with running(options, folder, total) as stage:
        cpu_begun_s = _cpu_s(stage)
        for number in range(options.rounds):
            gate = (folder / f"gate-{number}").resolve()
            indexes = range(len(ids), len(ids) + options.running)
            asyncio.run(_hold(stage, indexes, gate, ids))
            restarts_s.append(_lose_worker(stage, indexes.stop))
            gate.touch()
            say(f"round {number + 1} of {options.rounds}: {restarts_s[-1]:.2f} s")
        cpu_s = _cpu_s(stage) - cpu_begun_s
        say("reading the topics")
        found = settled(stage, ids)
        return WorkerLoss(
            count=total,
            missing=found.missing(ids.values()),
            duplicates=found.again(),
            early=found.early,
            cpu_us_per_task=round(cpu_s / total * 1e6, 1),
            restart_s_p50=round(statistics.median(restarts_s), 3),
            restart_s_max=max(restarts_s),
            lost=found.lost(ids.values()),
            decided_twice=found.decided_twice,
            duplicate_starts=stage.starts.duplicates - total,
        )


async def _hold(stage: ClusterStage, indexes: range, gate: Path, ids: dict[int, str]) -> None:
    for index in indexes:
        ids[index] = (await stage.hold.asubmit(index, str(gate))).task_id


def _lose_worker(stage: ClusterStage, count: int) -> float:
    """Kill the worker that runs the newest of `count` tasks while another one is there; until that has started all."""
    victim = next(process for process in stage.processes if process.name == "worker")
    if not stage.starts.wait_for(count, WAIT_S):
        raise NothingMeasured(f"within {WAIT_S:.0f} s not all tasks ran at once")
    stage.start("worker", APP)
    killed_s = time.perf_counter()
    victim.kill()
    stage.processes.remove(victim)
    if not wait_until(lambda: stage.starts.started_again >= count, GIVE_UP_S):
        left = count - stage.starts.started_again
        raise NothingMeasured(f"{left} tasks of a killed worker were not started elsewhere in {GIVE_UP_S:.0f} s")
    return round(time.perf_counter() - killed_s, 3)


# --- services ---------------------------------------------------------------------------------------------------------


class BrokerLossOptions(ClusterOptions, frozen=True, kw_only=True):
    """How often, for how long, and under which load."""

    brokers: Annotated[Literal[3], Meta(description="brokers of Kafka; each round kills the next one")] = 3
    rounds: Rounds = 3
    outage_s: OutageS = 20.0
    rate: Rate = 200.0


class BrokerLoss(Loss, frozen=True, kw_only=True):
    """The longest time in which a shard started nothing, from the kill of a broker until it was back, in seconds."""

    start_gap_s_p50: float
    start_gap_s_max: float


def _measure_broker_loss(options: BrokerLossOptions, folder: Path, say: Say) -> BrokerLoss:
    capacity = round(options.rate * (options.rounds + 1) * (options.outage_s + 2 * SPARE_S))
    gaps_s: list[float] = []
    with (
        running(options, folder, capacity, has_own_services=True) as stage,
        Load(stage, options.rate, capacity) as load,
    ):
        assert stage.own is not None
        for number in range(options.rounds):
            broker = stage.own.kafka.nodes[number % len(stage.own.kafka.nodes)]
            killed_ns = time.perf_counter_ns()
            _outage(broker, options.outage_s, stage.own.up)
            time.sleep(AFTER_S)
            gaps_s.append(longest_gap_s(stage, load, killed_ns, time.perf_counter_ns()))
            say(f"round {number + 1} of {options.rounds}: {gaps_s[-1]:.2f} s without a start")
        say("reading the topics")
        return BrokerLoss(
            **load.figures(),
            start_gap_s_p50=round(statistics.median(gaps_s), 3),
            start_gap_s_max=max(gaps_s),
        )


def _outage(node: Node, seconds: float, up: Callable[[], None]) -> None:
    """Kill a node, leave it down for so long, and start it; it serves when this returns."""
    node.kill()
    time.sleep(seconds)
    up()


class ViewLossOptions(ClusterOptions, frozen=True, kw_only=True):
    """How long, and under which load."""

    projectors: Annotated[int, Meta(ge=1, le=16, description="projector processes")] = 1
    outage_s: OutageS = 60.0
    rate: Rate = 200.0


class ViewLoss(Loss, frozen=True, kw_only=True):
    """`catch_up_s`: from when the database served again until the view had all that had happened by then.

    `start_gap_s_max`: the longest time in which a shard started nothing while the database was down, in seconds.
    """

    catch_up_s: float
    accepted_while_down: int
    errors_while_down: int
    start_gap_s_max: float


def _measure_view_loss(options: ViewLossOptions, folder: Path, say: Say) -> ViewLoss:
    capacity = round(options.rate * (options.outage_s + 5 * SPARE_S))
    with (
        running(options, folder, capacity, has_own_services=True) as stage,
        Load(stage, options.rate, capacity) as load,
    ):
        assert stage.own is not None
        (node,) = stage.own.cassandra.nodes
        say(f"the database is down for {options.outage_s:g} s")
        accepted, errors, killed_ns = len(load.ids), load.errors, time.perf_counter_ns()
        _outage(node, options.outage_s, lambda: None)
        accepted, errors = len(load.ids) - accepted, load.errors - errors
        gap_s = longest_gap_s(stage, load, killed_ns, time.perf_counter_ns())
        stage.own.up()
        catch_up_s = _caught_up_s(stage)
        say(f"the view had caught up after {catch_up_s:.2f} s; reading the topics")
        return ViewLoss(
            **load.figures(),
            catch_up_s=catch_up_s,
            accepted_while_down=accepted,
            errors_while_down=errors,
            start_gap_s_max=gap_s,
        )


def _caught_up_s(stage: ClusterStage) -> float:
    back_s = time.perf_counter()
    with stage.log() as log:
        ends = stage.end_offsets(log)

    def has_all() -> bool:
        try:
            positions = stage.view.positions()
        except Retriable:  # our own connection to it is not back
            return False
        return all(shard in positions and positions[shard].next_offset >= end for shard, end in enumerate(ends))

    if not wait_until(has_all, GIVE_UP_S, every_s=LOOK_S):
        raise NothingMeasured(f"the view had not caught up {GIVE_UP_S:.0f} s after the database was back")
    return round(time.perf_counter() - back_s, 3)


BENCHMARKS = (
    Benchmark("takeover", "schedulers that end under load", TakeoverOptions, _measure_takeover),
    Benchmark("scheduler_pause", "a scheduler that stands still and wakes up", PauseOptions, _measure_pause),
    Benchmark("worker_loss", "kill -9 of a worker that runs tasks", WorkerLossOptions, _measure_worker_loss),
    Benchmark("broker_loss", "brokers of three that are killed and come back", BrokerLossOptions, _measure_broker_loss),
    Benchmark("view_loss", "the database is down under load", ViewLossOptions, _measure_view_loss),
)
