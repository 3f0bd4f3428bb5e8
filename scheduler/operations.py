"""Operations that are described once and performed in two ways: blocking, or on an event loop.

An operation is a generator of **steps**: what must be waited for. `await operation` performs them on the running loop,
`operation.run()` in the calling thread. What is decided between the steps is the same code for both.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import msgspec

from scheduler.gateway import Answer, Undecided
from scheduler.refusals import Refusal, RefusalKind, Refused
from schemas.errors import Retriable, TidewheelIOError
from schemas.messages import Request

T = TypeVar("T")

READS_PENDING_MAX = 1_000  # reads of the view that wait for a thread; more would only wait longer
_FIRST_PAUSES_S, _PAUSE_S_MAX = (0.002, 0.004, 0.008, 0.016, 0.032), 0.05
VIEW_THREADS = 4  # the view's reads release the interpreter; more threads than this do not answer sooner


class Ask(msgspec.Struct, frozen=True):
    """Send requests and wait for their decisions."""

    requests: Sequence[Request]


class Read(msgspec.Struct, frozen=True):
    """Call what blocks: a read of the view."""

    call: Callable[[], Any]


class Pause(msgspec.Struct, frozen=True):
    """Let some time pass."""

    seconds: float


Step: TypeAlias = Ask | Read | Pause
Steps: TypeAlias = Generator[Step, Any, T]


def ask_all(requests: Sequence[Request]) -> Steps[Sequence[Answer]]:
    """The step that sends requests; gives the answers in their order."""
    return cast("Sequence[Answer]", (yield Ask(requests)))


def read(call: Callable[[], T]) -> Steps[T]:
    """The step that reads; gives what `call` returns, raises what it raises."""
    return cast("T", (yield Read(call)))


def at_once(call: Callable[[], T]) -> Steps[T]:
    """No step at all; gives what `call` returns, raises what it raises. It must not block."""
    yield from ()
    return call()


def pause(seconds: float) -> Steps[None]:
    """The step that waits."""
    yield Pause(seconds)


def pauses() -> Iterator[float]:
    """Growing pauses between looks at a view that lags, or at what is waited for; without end."""
    return itertools.chain(_FIRST_PAUSES_S, itertools.repeat(_PAUSE_S_MAX))


def refusing_errors(steps: Steps[T]) -> Steps[T]:
    """The steps, with failures of the log and the view as refusals."""
    try:
        return (yield from steps)
    except TidewheelIOError as error:
        raise Refused(refusal_of_error(error)) from error


def refusal_of_error(error: TidewheelIOError) -> Refusal:
    """What a failure means to the client."""
    return Refusal(RefusalKind.UNDECIDED if isinstance(error, Undecided) else RefusalKind.UNAVAILABLE, str(error))


class Asker(Protocol):
    """Sends requests (`scheduler.gateway.Gateway`)."""

    def ask_many(self, requests: Sequence[Request]) -> list[Answer]:
        """Send and wait, blocking."""

    async def ask_many_async(self, requests: Sequence[Request]) -> list[Answer]:
        """Send and wait on the running loop."""


class Performer:
    """Performs steps, with a small pool of threads for reads that would hold up an event loop."""

    def __init__(self, asker: Asker, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._asker = asker
        self._sleep = sleep
        self._pool = ThreadPoolExecutor(VIEW_THREADS, thread_name_prefix="tidewheel-view")
        self._reads = 0

    def perform(self, step: Step) -> Any:
        """Perform a step in the calling thread."""
        if isinstance(step, Ask):
            return self._asker.ask_many(step.requests)
        if isinstance(step, Read):
            return step.call()
        return self._sleep(step.seconds)

    async def perform_async(self, step: Step) -> Any:
        """Perform a step without holding up the running loop."""
        if isinstance(step, Ask):
            return await self._asker.ask_many_async(step.requests)
        if isinstance(step, Read):
            return await self._read_async(step.call)
        return await asyncio.sleep(step.seconds)

    async def _read_async(self, call: Callable[[], Any]) -> Any:
        if self._reads >= READS_PENDING_MAX:
            raise Retriable(f"{self._reads} reads of the view wait already")
        self._reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        finally:
            self._reads -= 1

    def close(self) -> None:
        """Let the reads end."""
        self._pool.shutdown()


class Operation(Generic[T]):
    """Something to be done once: `await` it, or `run` it. Nothing happens before."""

    __slots__ = ("_performer", "_steps")

    def __init__(self, performer: Performer, steps: Steps[T]) -> None:
        self._performer = performer
        self._steps = steps

    def run(self) -> T:
        """Do it in the calling thread and wait for the end."""
        try:
            step = next(self._steps)
            while True:
                try:
                    value = self._performer.perform(step)
                except (TidewheelIOError, ValueError) as error:
                    step = self._steps.throw(error)
                else:
                    step = self._steps.send(value)
        except StopIteration as end:
            return cast("T", end.value)

    def __await__(self) -> Generator[Any, None, T]:
        return self._run_async().__await__()

    async def _run_async(self) -> T:
        try:
            step = next(self._steps)
            while True:
                try:
                    value = await self._performer.perform_async(step)
                except (TidewheelIOError, ValueError) as error:
                    step = self._steps.throw(error)
                else:
                    step = self._steps.send(value)
        except StopIteration as end:
            return cast("T", end.value)
