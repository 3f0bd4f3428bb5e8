"""kill -9 of the engine under load, again and again: is every acknowledged task there, and decided once?

A submitter in another process posts tasks over HTTP at a fixed rate, every fourth of them due a little later, so that
each kill finds tasks in every state. What was not acknowledged is posted again after the restart, under the same id: it
may have been accepted or not, and must exist once. At the end every start is counted, from a file that the handler
writes, and every event is read from the log.

`duplicate_starts` are allowed (delivery is at least once: a task that ran when the process was killed runs again);
`lost`, `unfinished` and `decided_twice` are not.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, Options, Say, Seed
from benchmarks.engine_process import EngineProcess, Setup
from benchmarks.load import closed_loop, open_loop
from benchmarks.stage import PAYLOAD_BYTES, TASK_TYPE, blob_for
from infra.local import LocalBroker
from infra.sqlite import SqliteLogStorage
from infra.topics import embedded_catalog
from scheduler.ports import TopicPartition
from schemas.codec import Codec
from schemas.messages import Event, ShardOpened, TaskSubmitted, TaskSucceeded
from schemas.topics import TASK_EVENTS

TASKS = "/api/v1/tasks"
CALL_S = 20.0
ASKED_AT_ONCE = 16
KILLED_AFTER_S = (0.3, 1.2)  # drawn between these, for each round
DELAYED = 4  # every so-manyth task
DELAY_S = 0.3
FINISH_S = 120.0  # for what was accepted, after the last restart; a lost attempt waits for its worker's silence first
LOOK_EVERY_S = 0.25


class SchedulerLossOptions(Options, frozen=True, kw_only=True):
    """How often, and under which load."""

    rounds: Annotated[int, Meta(ge=1, le=1_000, description="kills")] = 20
    rate: Annotated[float, Meta(gt=0, le=5_000, description="tasks a second until the kill")] = 200.0
    seed: Seed = 1


class SchedulerLoss(Figures, frozen=True, kw_only=True):
    """`restart_s_…` is from the new process being made until its API answered; `load_s_…` is without the interpreter.

    `count` tasks were acknowledged, `posted_again` of them only after a restart.
    """

    restart_s_p50: float
    restart_s_max: float
    load_s_p50: float
    load_s_max: float
    lost: int
    unfinished: int
    decided_twice: int
    duplicate_starts: int
    posted_again: int


class _Submitter:
    """Posts tasks and remembers which were acknowledged; `due_at`, by index, in seconds of Unix time."""

    def __init__(self) -> None:
        self.due_at: dict[int, float] = {}
        self.unknown: list[int] = []
        self.posted_again = 0
        self._blob = blob_for(PAYLOAD_BYTES)
        self._indexes = itertools.count()

    async def under_load(self, client: httpx.AsyncClient, rate: float, count: int) -> None:
        """Post at a fixed rate; what is not acknowledged is noted in `unknown`."""

        async def post_next(_: int, __: int) -> None:
            index = next(self._indexes)
            try:
                await self._post(client, index)
            except httpx.HTTPError:  # also a 503 of an engine that has just begun to die
                self.unknown.append(index)

        await open_loop(count, rate, post_next)

    async def again(self, client: httpx.AsyncClient) -> None:
        """Post what is in `unknown` under the same ids. Raises httpx.HTTPError: the engine is up, so it must answer."""
        unknown, self.unknown = self.unknown, []
        self.posted_again += len(unknown)
        await closed_loop(unknown, ASKED_AT_ONCE, lambda index: self._post(client, index))

    async def _post(self, client: httpx.AsyncClient, index: int) -> None:
        body: dict[str, Any] = {
            "task_id": task_id(index),
            "task_type": TASK_TYPE,
            "payload": {"index": index, "blob": self._blob},
        }
        if index % DELAYED == 0:
            body["delay_seconds"] = DELAY_S
        response = (await client.post(TASKS, json=body)).raise_for_status()
        self.due_at[index] = datetime.fromisoformat(response.json()["scheduled_at"]).timestamp()


def task_id(index: int) -> str:
    """Of the task with this index."""
    return f"loss-{index}"


def measure(options: SchedulerLossOptions, folder: Path, say: Say) -> SchedulerLoss:
    """Run once."""
    setup = Setup(folder=str(folder / "engine"), shards=options.shards, port=0, starts_file=str(folder / "starts"))
    return asyncio.run(_measure(options, setup, say))


async def _measure(options: SchedulerLossOptions, setup: Setup, say: Say) -> SchedulerLoss:
    rng, submitter = Random(options.seed), _Submitter()
    restarts_s: list[float] = []
    loads_s: list[float] = []
    lost: set[int] = set()
    cpu_s = 0.0
    engine = await asyncio.to_thread(EngineProcess, setup)
    try:
        setup = msgspec.structs.replace(setup, port=engine.ready.port)
        for number in range(1, options.rounds + 1):
            acknowledged = set(submitter.due_at)
            cpu_s += await _kill_under_load(options, engine, submitter, rng.uniform(*KILLED_AFTER_S))
            engine = await asyncio.to_thread(EngineProcess, setup)
            restarts_s.append(engine.restart_s)
            loads_s.append(engine.ready.load_s)
            async with _client(engine) as client:
                lost |= await _absent(client, submitter.due_at.keys() - acknowledged)
                await submitter.again(client)
            say(f"kill {number} of {options.rounds}: back after {engine.restart_s:.2f} s, {len(lost)} lost")
        async with _client(engine) as client:
            unfinished = await _unfinished(client, set(submitter.due_at) - lost)
            lost |= await _absent(client, submitter.due_at.keys())
        await asyncio.to_thread(engine.stop)
    finally:
        engine.kill()
    starts = _starts(Path(setup.starts_file or ""))
    decided_twice, undecided = audit(Path(setup.folder), options.shards, submitter.due_at)
    lost |= undecided
    acknowledged_count = len(submitter.due_at)
    return SchedulerLoss(
        count=acknowledged_count,
        missing=len(submitter.due_at.keys() - starts.keys()),
        duplicates=sum(len(times) - 1 for times in starts.values()),
        early=sum(1 for index, at in submitter.due_at.items() if index in starts and starts[index][0] < at),
        cpu_us_per_task=round(cpu_s / acknowledged_count * 1e6, 1),
        restart_s_p50=round(statistics.median(restarts_s), 3),
        restart_s_max=round(max(restarts_s), 3),
        load_s_p50=round(statistics.median(loads_s), 3),
        load_s_max=round(max(loads_s), 3),
        lost=len(lost),
        unfinished=len(unfinished),
        decided_twice=decided_twice,
        duplicate_starts=sum(len(times) - 1 for times in starts.values()),
        posted_again=submitter.posted_again,
    )


def _client(engine: EngineProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=engine.url, timeout=CALL_S)


async def _kill_under_load(
    options: SchedulerLossOptions, engine: EngineProcess, submitter: _Submitter, after_s: float
) -> float:
    """Load the engine, kill it in the middle, and go on for a moment; the processor time it had, about."""
    count = max(2, round(options.rate * after_s * 1.2))  # a fifth of them meet a dead server
    begun_s = engine.measure().cpu_s
    async with _client(engine) as client:
        load = asyncio.create_task(submitter.under_load(client, options.rate, count))
        await asyncio.sleep(after_s)
        used_s = engine.measure().cpu_s - begun_s
        engine.kill()
        await load
    return used_s


async def _absent(client: httpx.AsyncClient, indexes: Iterable[int]) -> set[int]:
    """Which of them the API does not know."""
    absent: set[int] = set()

    async def ask(index: int) -> None:
        response = await client.get(f"{TASKS}/{task_id(index)}")
        if response.status_code == httpx.codes.NOT_FOUND:
            absent.add(index)
        else:
            response.raise_for_status()

    await closed_loop(sorted(indexes), ASKED_AT_ONCE, ask)
    return absent


async def _unfinished(client: httpx.AsyncClient, indexes: set[int]) -> set[int]:
    """Which of them have not succeeded when all time for it is over."""
    give_up_at = time.monotonic() + FINISH_S
    left = set(indexes)

    async def ask(index: int) -> None:
        response = (await client.get(f"{TASKS}/{task_id(index)}")).raise_for_status()
        if response.json()["status"] == "SUCCEEDED":
            left.discard(index)

    while left and time.monotonic() < give_up_at:
        await closed_loop(sorted(left), ASKED_AT_ONCE, ask)
        if left:
            await asyncio.sleep(LOOK_EVERY_S)
    return left


def _starts(path: Path) -> dict[int, list[float]]:
    """When each task was started, in seconds of Unix time, ascending."""
    starts: dict[int, list[float]] = {}
    for line in path.read_text().splitlines():
        index, at_ns = line.split()
        starts.setdefault(int(index), []).append(int(at_ns) / 1e9)
    return starts


def audit(folder: Path, shards: int, acknowledged: Iterable[int]) -> tuple[int, set[int]]:
    """Reads all events: how many inputs or tasks were decided more than once, and which tasks never were."""
    decided: Counter[tuple[object, ...]] = Counter()
    for event in _events(folder, shards):
        if event.source_offset is not None:
            decided["input", event.source_topic, event.partition, event.source_offset] += 1
        if event.is_submission:
            decided["submitted", event.entity_id] += 1
        elif event.is_success:
            decided["succeeded", event.entity_id] += 1
    twice = sum(count - 1 for count in decided.values())
    return twice, {index for index in acknowledged if not decided["submitted", task_id(index)]}


class _Decided(msgspec.Struct, frozen=True):
    """What the audit wants to know of a valid event."""

    partition: int
    entity_id: str
    source_topic: str | None
    source_offset: int | None
    is_submission: bool
    is_success: bool


def _events(folder: Path, shards: int) -> Iterable[_Decided]:
    """The valid events of a log that no engine has open: those of the newest epoch that was opened before them."""
    codec = Codec.builtin()
    with closing(SqliteLogStorage(folder / "log.db")) as storage:
        log = LocalBroker(storage, embedded_catalog(shards)).connect()
        for shard in range(shards):
            reader = log.reader()
            reader.seek(TopicPartition(TASK_EVENTS, shard), 0)
            epoch = 0
            while records := reader.take(1_000):
                for event in (codec.decode(record.value) for record in records):
                    if not isinstance(event, Event) or event.epoch < epoch:
                        continue
                    if isinstance(event.body, ShardOpened):
                        epoch = event.epoch
                        continue
                    body = event.body
                    yield _Decided(
                        shard,
                        event.entity_id,
                        event.source_topic,
                        event.source_offset,
                        isinstance(body, TaskSubmitted),
                        isinstance(body, TaskSucceeded),
                    )


BENCHMARK = Benchmark("scheduler_loss", "kill -9 of the engine under load", SchedulerLossOptions, measure)
