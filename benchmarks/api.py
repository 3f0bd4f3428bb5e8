"""The REST API over a real port: the engine in one process, HTTP clients in another.

First as many calls as the clients get through one after the other (`per_s`), then calls at a fixed rate, however long
their answers take (`p50_ms`, `p99_ms`, counted from the call). Clients and server share the machine, so that `per_s` is
what both together can do; `client_cpu_us_per_call` says how much of it went to the clients.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import msgspec
from msgspec import Meta

from benchmarks.contract import Benchmark, Figures, NothingMeasured, Options, Say, Seed, quantiles
from benchmarks.engine_process import EngineProcess, Setup
from benchmarks.load import closed_loop, open_loop, wait_until
from benchmarks.stage import PAYLOAD_BYTES, TASK_TYPE, WAIT_S, blob_for
from schemas.limits import BULK_MAX

TASKS = "/api/v1/tasks"
JSON = {"content-type": "application/json"}
CALL_S = 30.0  # beyond what the API itself waits for a decision
KNOWN = 1_000  # tasks that are asked for
CAPACITY = 4_000_000  # starts that can be counted
RATES = {"submit": 100.0, "bulk": 5.0, "get": 200.0}  # about a third of what one core answers


class ApiOptions(Options, frozen=True, kw_only=True):
    """Which calls, and how many."""

    route: Annotated[Literal["submit", "bulk", "get"], Meta(description="what is called")] = "submit"
    seconds: Annotated[float, Meta(gt=0, le=3_600, description="of each of the two phases")] = 10.0
    warm_up_s: Annotated[float, Meta(ge=0, le=600, description="seconds before them, not timed")] = 1.0
    clients: Annotated[int, Meta(ge=1, le=1_000, description="calls at once in the first phase")] = 16
    rate: Annotated[float, Meta(ge=0, le=20_000, description="calls a second in the second phase; 0: by the route")] = 0
    batch: Annotated[int, Meta(ge=1, le=BULK_MAX, description="tasks of one bulk call")] = 100
    seed: Seed = 1


class Api(Figures, frozen=True, kw_only=True):
    """`count` and `per_s` are of tasks, the times of calls at `rate_per_s`. `errors`: calls not answered 2xx."""

    per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    errors: int
    calls_per_s: float
    busy_p50_ms: float
    busy_p99_ms: float
    rate_per_s: float
    client_cpu_us_per_call: float


class _Call(NamedTuple):
    method: str
    path: str
    body: bytes | None
    tasks: int


class _Phase:
    """The calls of one phase: when each began, and how long the answer took."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.took_ns: list[int] = []
        self.tasks = 0
        self.errors = 0
        self._client = client

    async def call(self, call: _Call) -> None:
        """Do it and note what came of it."""
        begun_ns = time.perf_counter_ns()
        try:
            response = await self._client.request(call.method, call.path, content=call.body, headers=JSON)
        except httpx.HTTPError:
            self.errors += 1
            return
        if not response.is_success:
            self.errors += 1
            return
        self.took_ns.append(time.perf_counter_ns() - begun_ns)
        self.tasks += call.tasks


def measure(options: ApiOptions, folder: Path, say: Say) -> Api:
    """Run once."""
    setup = Setup(folder=str(folder), shards=options.shards, port=0, capacity=CAPACITY)
    with EngineProcess(setup) as engine:
        figures = asyncio.run(_measure(options, engine, say))
        engine.stop()
    return figures


async def _measure(options: ApiOptions, engine: EngineProcess, say: Say) -> Api:
    limits = httpx.Limits(max_connections=max(100, options.clients))
    async with httpx.AsyncClient(base_url=engine.url, timeout=CALL_S, limits=limits) as client:
        calls, known = await _calls(options, client)
        rate = options.rate or RATES[options.route]
        warm_up, busy, steady = _Phase(client), _Phase(client), _Phase(client)
        await closed_loop(_for(calls, options.warm_up_s), options.clients, warm_up.call)
        say(f"{options.clients} clients for {options.seconds:g} s")
        cpu_begun_s, server_begun_s = time.process_time(), engine.measure().cpu_s
        begun_s = time.perf_counter()
        await closed_loop(_for(calls, options.seconds), options.clients, busy.call)
        busy_s = time.perf_counter() - begun_s
        client_cpu_s, server_cpu_s = time.process_time() - cpu_begun_s, engine.measure().cpu_s - server_begun_s
        count = max(1, round(rate * options.seconds))
        say(f"{count} calls at {rate:g} a second")
        await open_loop(count, rate, lambda index, intended_ns: steady.call(next(calls)), say)
    if not busy.tasks:
        raise NothingMeasured(f"not one of {busy.errors} calls was answered 2xx")
    submitted = known + sum(phase.tasks for phase in (warm_up, busy, steady) if options.route != "get")
    wait_until(lambda: engine.measure().started >= submitted, WAIT_S, every_s=0.1)
    ended = engine.measure()
    times, busy_times = quantiles(steady.took_ns), quantiles(busy.took_ns)
    return Api(
        count=busy.tasks,
        missing=max(0, submitted - ended.started),
        duplicates=ended.duplicates,
        early=0,  # all of them are due at once
        cpu_us_per_task=round(server_cpu_s / busy.tasks * 1e6, 1),
        per_s=round(busy.tasks / busy_s, 1),
        **times._asdict(),
        errors=warm_up.errors + busy.errors + steady.errors,
        calls_per_s=round(len(busy.took_ns) / busy_s, 1),
        busy_p50_ms=busy_times.p50_ms,
        busy_p99_ms=busy_times.p99_ms,
        rate_per_s=rate,
        client_cpu_us_per_call=round(client_cpu_s / len(busy.took_ns) * 1e6, 1),
    )


async def _calls(options: ApiOptions, client: httpx.AsyncClient) -> tuple[Iterator[_Call], int]:
    """An endless iterator of calls, and how many tasks were submitted for them to be asked for."""
    bodies = _tasks()
    if options.route == "submit":
        return (_Call("POST", TASKS, msgspec.json.encode(body), 1) for body in bodies), 0
    if options.route == "bulk":
        return (_bulk(list(itertools.islice(bodies, options.batch))) for _ in itertools.count()), 0
    call = _bulk([body | {"task_id": f"known-{number}"} for number, body in zip(range(KNOWN), bodies, strict=False)])
    response = await client.request(call.method, call.path, content=call.body, headers=JSON)
    response.raise_for_status()
    rng = Random(options.seed)
    return (_Call("GET", f"{TASKS}/known-{rng.randrange(KNOWN)}", None, 1) for _ in itertools.count()), KNOWN


def _tasks() -> Iterator[dict[str, Any]]:
    blob = blob_for(PAYLOAD_BYTES)
    for index in range(CAPACITY):
        yield {"task_type": TASK_TYPE, "payload": {"index": index, "blob": blob}}


def _bulk(bodies: list[dict[str, Any]]) -> _Call:
    return _Call("POST", f"{TASKS}/bulk", msgspec.json.encode({"tasks": bodies}), len(bodies))


def _for(calls: Iterator[_Call], seconds: float) -> Iterator[_Call]:
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        yield next(calls)


BENCHMARK = Benchmark("api", "calls of the REST API over a real port", ApiOptions, measure)
