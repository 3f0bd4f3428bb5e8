"""Executors with real threads, loops and processes: every call has one outcome, and every slot comes back."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from schemas.messages import ErrorKind, ReadyTask, Verdict
from tests import pool_app
from tests.samples import minimal
from workers.calls import Call
from workers.context import Context, current_context
from workers.errors import RegistrationError, TaskCancelled
from workers.execution import Cancelled, Crashed, Failed, GivenBack, Outcome, Succeeded
from workers.executors import AsyncExecutor, Executor, ThreadExecutor
from workers.processes import ProcessExecutor
from workers.registry import Handler, Registry

WAIT_S = 30.0
APP = "tests.pool_app:registry"


def now_us() -> int:
    return time.time_ns() // 1000


class Sink:
    """Collects what an executor delivers."""

    def __init__(self) -> None:
        self._outcomes: queue.Queue[tuple[Call, Outcome]] = queue.Queue()
        self._checkpoints: queue.Queue[bytes] = queue.Queue()
        self.ready = threading.Semaphore(0)

    def deliver(self, finished: Sequence[tuple[Call, Outcome]]) -> None:
        for pair in finished:
            self._outcomes.put(pair)

    def save(self, ready: ReadyTask, checkpoint: bytes) -> None:
        self._checkpoints.put(checkpoint)

    def next(self) -> tuple[Call, Outcome]:
        return self._outcomes.get(timeout=WAIT_S)

    def checkpoint(self) -> Any:
        return msgspec.json.decode(self._checkpoints.get(timeout=WAIT_S))

    def is_empty(self) -> bool:
        return self._outcomes.empty()

    def call(self, function: Callable[..., Any] | Handler, payload: Any = None) -> Call:
        handler = function if isinstance(function, Handler) else Handler(function, name="t")
        ready = minimal(ReadyTask, task_id="t", task_type=handler.name, attempt=1, payload=msgspec.json.encode(payload))
        return Call(msgspec.structs.replace(ready, content_type="application/json"), handler, None, self.save)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def loop(sink: Sink) -> Iterator[AsyncExecutor]:
    executor = AsyncExecutor(10, sink.deliver, now_us)
    executor.open()
    yield executor
    executor.close()


@pytest.fixture
def threads(sink: Sink) -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor(2, sink.deliver, now_us)
    executor.open()
    yield executor
    executor.close()


@pytest.fixture
def pool(sink: Sink) -> Iterator[ProcessExecutor]:
    executor = ProcessExecutor(1, APP, pool_app.registry, sink.deliver, sink.save, sink.ready.release)
    executor.open()
    assert sink.ready.acquire(timeout=WAIT_S)
    yield executor
    executor.close()


def in_pool(sink: Sink, name: str, payload: Any = None) -> Call:
    handler = pool_app.registry.get(name)
    assert handler is not None
    return sink.call(handler, payload)


def waits_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


# --- coroutines -------------------------------------------------------------------------------------------------------


def test_coroutines_run_at_once_and_each_has_its_context(loop: AsyncExecutor, sink: Sink) -> None:
    gate = asyncio.Event()

    async def handler(n: int) -> list[Any]:
        if n == 4:
            gate.set()
        await gate.wait()
        await current_context().checkpoint({"n": n})
        return [n, current_context().task_id]

    calls = [sink.call(handler, n) for n in range(5)]
    loop.start(calls)
    outcomes = dict(sink.next() for _ in calls)
    assert [outcomes[call] for call in calls] == [Succeeded(f'[{n},"t"]'.encode()) for n in range(5)]
    assert sorted(sink.checkpoint()["n"] for _ in calls) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), TaskCancelled()])
def test_the_loop_survives_what_a_handler_raises(loop: AsyncExecutor, sink: Sink, error: BaseException) -> None:
    async def handler() -> None:
        raise error

    async def fine() -> int:
        return 1

    loop.start([sink.call(handler)])
    _, outcome = sink.next()
    assert isinstance(outcome, Failed) and outcome.error.type.endswith(type(error).__name__)
    loop.start([sink.call(fine)])
    assert sink.next()[1] == Succeeded(b"1")


def test_the_loop_survives_a_task_of_a_handler_that_exits(loop: AsyncExecutor, sink: Sink) -> None:
    async def exits() -> None:
        raise SystemExit(1)

    async def handler() -> str:
        inner = asyncio.create_task(exits())
        await asyncio.wait([inner])
        return type(inner.exception()).__name__

    loop.start([sink.call(handler)])
    assert sink.next()[1] == Succeeded(b'"SystemExit"')


def test_a_cancelled_coroutine_can_clean_up_or_refuse(loop: AsyncExecutor, sink: Sink) -> None:
    begun = threading.Semaphore(0)

    async def obedient() -> None:
        begun.release()
        await asyncio.sleep(WAIT_S)

    async def refusing() -> str:
        begun.release()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            return f"done anyway, {current_context().is_cancelled}"
        return ""

    calls = [sink.call(obedient), sink.call(refusing)]
    loop.start(calls)
    for _ in calls:
        assert begun.acquire(timeout=WAIT_S)
    for call in calls:
        loop.cancel(call)
    outcomes = dict(sink.next() for _ in calls)
    assert outcomes[calls[0]] == Cancelled()
    assert outcomes[calls[1]] == Succeeded(b'"done anyway, True"')


def test_a_call_cancelled_before_its_first_step_has_an_outcome(loop: AsyncExecutor, sink: Sink) -> None:
    async def handler() -> None:
        await asyncio.sleep(WAIT_S)

    call = sink.call(handler)
    loop.start([call])
    loop.terminate(call)
    assert sink.next() == (call, Cancelled())


def test_a_coroutine_that_swallows_cancellations_is_cancelled_again_and_then_abandoned(
    loop: AsyncExecutor, sink: Sink
) -> None:
    begun, may_end, swallowed = threading.Event(), threading.Event(), threading.Semaphore(0)

    async def handler() -> None:
        while not may_end.is_set():
            try:
                begun.set()
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                swallowed.release()

    call = sink.call(handler)
    loop.start([call])
    waits_for(begun)
    loop.terminate(call)
    for _ in range(2):
        assert swallowed.acquire(timeout=WAIT_S)
    loop.kill(call)
    assert loop.abandoned == 1
    may_end.set()
    loop.start([sink.call(noop)])
    assert sink.next()[1] == Succeeded(b"null")
    reached(lambda: loop.abandoned == 0)
    assert sink.is_empty()


async def noop() -> None: ...


def reached(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread does, without an event of its own to wait for."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_a_call_that_waits_behind_a_blocked_loop_never_starts_once_it_was_given_up(
    loop: AsyncExecutor, sink: Sink
) -> None:
    begun, release, ran = threading.Event(), threading.Event(), threading.Event()

    async def blocking() -> None:
        begun.set()
        release.wait(WAIT_S)

    async def behind() -> None:
        ran.set()

    calls = [sink.call(blocking), sink.call(behind)]
    loop.start(calls[:1])
    waits_for(begun)
    loop.start(calls[1:])
    for call in calls:
        loop.terminate(call)
        loop.kill(call)
    assert loop.abandoned == 2
    release.set()
    reached(lambda: loop.abandoned == 0)
    assert not ran.is_set()
    assert sink.is_empty()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_functions_run_in_threads_with_their_context(threads: ThreadExecutor, sink: Sink) -> None:
    both = threading.Barrier(2)

    def handler(context: Context) -> bool:
        both.wait(WAIT_S)
        return current_context() is context

    threads.start([sink.call(handler), sink.call(handler)])
    assert [sink.next()[1] for _ in range(2)] == [Succeeded(b"true")] * 2
    with pytest.raises(RuntimeError, match="no task runs"):
        current_context()


def test_a_thread_in_python_code_is_stopped_and_its_seat_used_again(threads: ThreadExecutor, sink: Sink) -> None:
    begun = threading.Event()

    def busy() -> None:
        begun.set()
        while True:
            pass

    call = sink.call(busy)
    threads.start([call])
    waits_for(begun)
    threads.terminate(call)
    assert sink.next() == (call, Cancelled())
    threads.start([sink.call(lambda: 1)])
    assert sink.next()[1] == Succeeded(b"1")


def test_a_thread_that_cannot_be_stopped_loses_its_seat(threads: ThreadExecutor, sink: Sink) -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    def blocked() -> str:
        begun.release()
        release.wait(WAIT_S)
        return "too late"

    calls = [sink.call(blocked) for _ in range(2)]
    threads.start(calls)
    for _ in calls:
        assert begun.acquire(timeout=WAIT_S)
    assert threads.kill(calls[0])
    assert not threads.kill(calls[0])  # "runs on" is said once, and of this call only
    assert threads.kill(calls[1])
    assert threads.abandoned == 2
    threads.start([sink.call(lambda: 1), sink.call(lambda: 1)])
    assert [sink.next()[1] for _ in range(2)] == [Succeeded(b"1")] * 2
    release.set()
    reached(lambda: threads.abandoned == 0)
    assert sink.is_empty()


def test_an_interruption_at_any_moment_leaves_one_outcome_and_a_working_thread(
    threads: ThreadExecutor, sink: Sink
) -> None:
    """`terminate` races with the end of the handler."""
    for _ in range(300):
        begun = threading.Event()
        call = sink.call(begun.set)
        threads.start([call])
        waits_for(begun)
        threads.terminate(call)
        finished, outcome = sink.next()
        assert finished is call
        assert outcome in (Succeeded(b"null"), Cancelled())
    assert sink.is_empty()


def test_a_system_exit_in_a_thread_is_a_failure(threads: ThreadExecutor, sink: Sink) -> None:
    def handler() -> None:
        raise SystemExit(3)

    threads.start([sink.call(handler)])
    outcome = sink.next()[1]
    assert isinstance(outcome, Failed) and outcome.error.type == "SystemExit"
    assert "in handler" in (outcome.error.traceback or "")
    assert "workers/" not in (outcome.error.traceback or "")


def test_wrong_arguments_are_a_permanent_failure_that_names_the_parameter(threads: ThreadExecutor, sink: Sink) -> None:
    def handler(path: str, n: int) -> None: ...

    threads.start([sink.call(handler, {"path": "/x", "n": "3"})])
    outcome = sink.next()[1]
    assert isinstance(outcome, Failed)
    assert outcome.error.kind is ErrorKind.RAISED
    assert outcome.error.verdict is Verdict.PERMANENT
    assert outcome.error.type == "tidewheel.ArgumentError"
    assert "$.n" in outcome.error.message


# --- processes --------------------------------------------------------------------------------------------------------


def wait_gone(process: int) -> None:
    """Wait until a process, perhaps of somebody else, is gone."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], WAIT_S)[0]
    finally:
        os.close(descriptor)


def ready_again(pool: ProcessExecutor, sink: Sink) -> None:
    assert sink.ready.acquire(timeout=WAIT_S)
    pool.start([in_pool(sink, "double", 4)])
    assert sink.next()[1] == Succeeded(b"8")


def test_a_process_performs_one_call_after_another(pool: ProcessExecutor, sink: Sink) -> None:
    for name in ("double", "double_async", "double"):
        pool.start([in_pool(sink, name, {"n": 21})])
        assert sink.next()[1] == Succeeded(b"42")
    pool.start([in_pool(sink, "fail")])
    outcome = sink.next()[1]
    assert isinstance(outcome, Failed) and outcome.error.type == "SystemExit"
    assert pool.capacity == 1


@pytest.mark.parametrize(("name", "known"), [("kill_itself", "SIGKILL"), ("exit_at_once", "exited with status 3")])
def test_a_process_that_dies_is_reported_and_replaced(pool: ProcessExecutor, sink: Sink, name: str, known: str) -> None:
    """C16."""
    call = in_pool(sink, name)
    pool.start([call])
    finished, outcome = sink.next()
    assert finished is call
    assert isinstance(outcome, Crashed) and known in outcome.detail
    ready_again(pool, sink)


@pytest.mark.parametrize("name", ["busy", "blocked", "waiting", "with_stubborn_child"])
def test_a_process_that_is_made_to_stop_can_clean_up_and_is_replaced(
    pool: ProcessExecutor, sink: Sink, name: str
) -> None:
    """C20: with whatever its handler started, even if that ignores SIGTERM."""
    call = in_pool(sink, name)
    pool.start([call])
    process = sink.checkpoint()
    pool.terminate(call)
    assert sink.next() == (call, Cancelled())
    wait_gone(process)
    ready_again(pool, sink)


@pytest.mark.parametrize("name", ["busy", "swallowing", "with_stubborn_child"])
def test_a_process_that_does_not_stop_is_killed_and_replaced(pool: ProcessExecutor, sink: Sink, name: str) -> None:
    """C20."""
    call = in_pool(sink, name)
    pool.start([call])
    process = sink.checkpoint()
    if name == "swallowing":
        pool.terminate(call)
    pool.kill(call)
    wait_gone(process)
    ready_again(pool, sink)
    assert sink.is_empty()


def test_a_process_is_asked_to_stop_before_it_is_made_to(pool: ProcessExecutor, sink: Sink) -> None:
    call = in_pool(sink, "until_cancelled")
    pool.start([call])
    sink.checkpoint()
    pool.cancel(call)
    assert sink.next() == (call, Succeeded(b'"stopped in order"'))
    pool.start([in_pool(sink, "double", 1)])
    assert sink.next()[1] == Succeeded(b"2")


def test_closing_the_pool_ends_what_runs_in_it(pool: ProcessExecutor, sink: Sink) -> None:
    pool.start([in_pool(sink, "swallowing")])
    process = sink.checkpoint()
    pool.close()
    wait_gone(process)


def other() -> None: ...


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        ("tests.no_such_app:registry", "ModuleNotFoundError"),
        ("tests.pool_app:nothing", "AttributeError"),
        ("tests.pool_app:BLOCKED_S", "no registry"),
        ("tests.pool_app", "module:attribute"),
        (APP, "has no task other"),
    ],
)
def test_an_application_that_cannot_be_imported_is_an_error_at_the_start(sink: Sink, app: str, reason: str) -> None:
    registry = Registry()
    registry.add(Handler(other, name="other", executor="process"))
    executor: Executor = ProcessExecutor(1, app, registry, sink.deliver, sink.save, lambda: None)
    with pytest.raises(RuntimeError, match=reason):
        executor.open()


def test_a_handler_defined_in_a_function_is_refused_for_processes() -> None:
    def local() -> None: ...

    with pytest.raises(RegistrationError, match="module level"):
        Handler(local, name="local", executor="process")


def test_a_call_without_a_process_for_it_is_given_back(pool: ProcessExecutor, sink: Sink) -> None:
    calls = [in_pool(sink, "double", 1), in_pool(sink, "double", 1)]
    pool.start(calls)
    outcomes = {type(sink.next()[1]) for _ in calls}
    assert outcomes == {Succeeded, GivenBack}
