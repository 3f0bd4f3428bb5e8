"""Two kinds of load: at a fixed rate whatever the answers take (open), and as fast as answers come (closed)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

NEWS_EVERY_S = 10.0
HEAD_START_NS = 10_000_000  # so that the first call is on time too


async def open_loop(
    count: int, rate: float, call: Callable[[int, int], Awaitable[None]], say: Callable[[str], None] | None = None
) -> None:
    """Call `call(index, intended_ns)` `rate` times a second, however long earlier calls take; wait for all.

    `intended_ns` is the instant of `time.perf_counter_ns` at which the call should begin. The loop cannot keep it
    exactly, so that both instants are worth looking at: a delay that the called one caused shows in the intended one.
    """
    begin_ns = time.perf_counter_ns() + HEAD_START_NS
    news_every = max(1, round(rate * NEWS_EVERY_S))
    async with asyncio.TaskGroup() as calls:
        for index in range(count):
            intended_ns = begin_ns + round(index * 1e9 / rate)
            await asyncio.sleep(max(0, intended_ns - time.perf_counter_ns()) / 1e9)
            calls.create_task(_called(call, index, intended_ns))
            if say is not None and index and index % news_every == 0:
                say(f"    {index} of {count}")


async def _called(call: Callable[[int, int], Awaitable[None]], index: int, intended_ns: int) -> None:
    await call(index, intended_ns)


async def closed_loop(items: Iterable[T], at_once: int, call: Callable[[T], Awaitable[None]]) -> None:
    """Call `call` for each item, `at_once` at a time; wait for all."""
    left = iter(items)

    async def client() -> None:
        for item in left:
            await call(item)

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(client())


def wait_until(is_so: Callable[[], bool], timeout_s: float, *, every_s: float = 0.005) -> bool:
    """Look again and again; whether it became so in time."""
    give_up_at = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(every_s)
    return True
