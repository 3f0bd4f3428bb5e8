"""Where handlers run: one event loop, threads, or (see `workers.processes`) child processes.

An executor knows no time. The runtime says when a call is asked to stop (`cancel`), made to stop (`terminate`) and
given up (`kill`): after `kill` its slot is free, and whatever comes of it is not delivered, or not listened to.
Outcomes are delivered several at once to `deliver`, from a thread of the executor.

What is begun is a unit: a call, or several that share one call of their handler. To stop one of those is to let the
handler see it; the unit is stopped when all of them are, and given up when all of them are.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from workers.calls import Call, Finished, NowUs, Unit, finish, finish_async
from workers.errors import TaskCancelled
from workers.execution import Cancelled, Outcome

log = logging.getLogger(__name__)

Deliver = Callable[[Finished], None]

CANCEL_AGAIN_S = 0.1  # a coroutine that swallows its cancellation is cancelled again after this
CLOSE_S = 2.0  # what threads of an executor get to end when it is closed
IO_THREADS = 32  # for `asyncio.to_thread` in handlers


class Executor(Protocol):
    """Runs units. All methods but `start` are callable for calls that it doesn't know (any more): a no-op."""

    @property
    def capacity(self) -> int:
        """How many units can run at once."""

    @property
    def abandoned(self) -> int:
        """How many units still run after they were given up."""

    def open(self) -> None:
        """Get ready; raises RuntimeError with what the operator must do if that is impossible."""

    def start(self, units: Sequence[Unit]) -> None:
        """Begin units; the caller keeps to `capacity`."""

    def cancel(self, call: Call) -> None:
        """Ask a call to stop, in a way that the handler can refuse."""

    def terminate(self, call: Call) -> None:
        """Make a call stop, as far as the executor can while cleaning up is still possible."""

    def kill(self, call: Call) -> bool:
        """Give a call up at once. True: its unit can't be killed and runs on, counted as abandoned, in no slot."""

    def close(self) -> None:
        """End everything within a few seconds; idempotent."""


class AsyncExecutor:
    """Runs coroutines on one event loop in a thread of its own."""

    def __init__(self, capacity: int, deliver: Deliver, now_us: NowUs) -> None:
        self._capacity = capacity
        self._deliver = deliver
        self._now_us = now_us
        self._loop = asyncio.new_event_loop()
        self._io = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="tidewheel-io")
        self._loop.set_default_executor(self._io)
        self._thread = threading.Thread(target=self._run, name="tidewheel-async", daemon=True)
        self._is_closing = False
        self._abandoned: set[Unit] = set()  # filled by `kill` itself: the loop may be blocked
        # The rest belongs to the loop's thread.
        self._tasks: dict[Unit, asyncio.Task[None]] = {}
        self._finished: list[tuple[Call, Outcome]] = []
        self._insisted: set[Unit] = set()

    @property
    def capacity(self) -> int:
        """How many calls can run at once."""
        return self._capacity

    @property
    def abandoned(self) -> int:
        """Coroutines that swallowed every cancellation, or block the loop."""
        return len(self._abandoned)

    def open(self) -> None:
        """Start the loop."""
        self._thread.start()

    def start(self, units: Sequence[Unit]) -> None:
        """Begin units, with one hand-over for all of them."""
        self._loop.call_soon_threadsafe(self._start, units)

    def cancel(self, call: Call) -> None:
        """Cancel the coroutine once."""
        call.context.mark_cancelled()
        if call.unit.is_cancelled:
            self._loop.call_soon_threadsafe(self._cancel, call.unit)

    def terminate(self, call: Call) -> None:
        """Cancel the coroutine, again and again if it swallows that."""
        call.mark_terminated()
        if call.unit.is_terminated:
            self._loop.call_soon_threadsafe(self._insist, call.unit)
        elif call.unit.is_cancelled:  # the others of its batch were only asked to stop, and may take their time
            self._loop.call_soon_threadsafe(self._cancel, call.unit)

    def kill(self, call: Call) -> bool:
        """Give the coroutine up, unless it goes on for others of its batch."""
        if not call.give_up():
            return False
        self._abandoned.add(call.unit)
        self._loop.call_soon_threadsafe(self._forget_if_ended, call.unit)
        return True

    def close(self) -> None:
        """Cancel what runs, end the loop."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._begin_close)
            self._thread.join(CLOSE_S)
        self._io.shutdown(wait=False, cancel_futures=True)
        if self._thread.is_alive():
            log.warning("the event loop is blocked by a handler and was left behind: %s", self._names())
        elif not self._loop.is_closed():
            self._loop.close()

    def _names(self) -> str:
        return ", ".join(sorted(unit.handler.name for unit in self._tasks)) or "unknown"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            try:
                self._loop.run_forever()
                break
            except BaseException:
                # SystemExit of a task that a handler created ends run_forever; the other handlers go on.
                log.exception("a task created by a handler tried to end the worker")
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    def _start(self, units: Sequence[Unit]) -> None:
        for unit in units:
            if unit not in self._abandoned:
                self._tasks[unit] = self._loop.create_task(self._drive(unit))

    async def _drive(self, unit: Unit) -> None:
        finished = await finish_async(unit, self._now_us)
        del self._tasks[unit]
        self._insisted.discard(unit)
        if unit in self._abandoned:
            self._abandoned.discard(unit)
            return
        if not self._finished:
            self._loop.call_soon(self._flush)  # after all that is ready now: one delivery for a burst
        self._finished += finished

    def _flush(self) -> None:
        finished, self._finished = self._finished, []
        self._deliver(finished)

    def _cancel(self, unit: Unit) -> None:
        task = self._tasks.get(unit)
        if task is not None:
            # Not at once: a task that is cancelled before its first step would end without an outcome.
            self._loop.call_soon(task.cancel)

    def _insist(self, unit: Unit) -> None:
        if unit in self._tasks and unit not in self._insisted:
            self._insisted.add(unit)
            self._cancel_again(unit)

    def _cancel_again(self, unit: Unit) -> None:
        task = self._tasks.get(unit)
        if task is not None:
            self._loop.call_soon(task.cancel)
            self._loop.call_later(CANCEL_AGAIN_S, self._cancel_again, unit)

    def _forget_if_ended(self, unit: Unit) -> None:
        if unit not in self._tasks:
            self._abandoned.discard(unit)

    def _begin_close(self) -> None:
        tasks = list(self._tasks.values())
        for unit in list(self._tasks):
            self._insist(unit)
        closing = self._loop.create_task(self._end_when_done(tasks))
        closing.add_done_callback(lambda _: self._loop.stop())

    async def _end_when_done(self, tasks: list[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S / 2)
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=CLOSE_S / 4)


class _Seat:
    """What a thread is doing."""

    def __init__(self) -> None:
        self.is_interruptible = False
        self.is_abandoned = False


class ThreadExecutor:
    """Runs functions in threads. A thread can't be killed: one that overruns is abandoned, another takes its seat."""

    def __init__(self, capacity: int, deliver: Deliver, now_us: NowUs) -> None:
        self._capacity = capacity
        self._deliver = deliver
        self._now_us = now_us
        self._units: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._active: dict[Unit, _Seat | None] = {}
        self._threads: dict[_Seat, threading.Thread] = {}
        self._abandoned: set[_Seat] = set()
        self._is_closed = False

    @property
    def capacity(self) -> int:
        """How many units can run at once."""
        return self._capacity

    @property
    def abandoned(self) -> int:
        """Threads that still run a unit that was given up."""
        return len(self._abandoned)

    def open(self) -> None:
        """Threads are started when they are needed first."""

    def start(self, units: Sequence[Unit]) -> None:
        """Begin units."""
        with self._lock:
            for unit in units:
                self._active[unit] = None
            for _ in range(min(len(self._active), self._capacity) - len(self._threads)):
                self._add_thread()
        for unit in units:
            self._units.put(unit)

    def _add_thread(self) -> None:
        seat = _Seat()
        thread = threading.Thread(target=self._work, args=(seat,), name="tidewheel-thread", daemon=True)
        self._threads[seat] = thread
        thread.start()

    def cancel(self, call: Call) -> None:
        """Let the handler see that it is to stop."""
        call.context.mark_cancelled()

    def terminate(self, call: Call) -> None:
        """Raise TaskCancelled in the thread: at its next step of Python code, so not inside a blocking C call."""
        call.mark_terminated()
        if call.unit.is_terminated:
            self._interrupt(call.unit)

    def _interrupt(self, unit: Unit) -> None:
        with self._lock:
            seat = self._active.get(unit)
            thread = self._threads.get(seat) if seat is not None else None
            if seat is None or thread is None or not seat.is_interruptible:
                return
            seat.is_interruptible = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TaskCancelled)
            )

    def kill(self, call: Call) -> bool:
        """Give the call up; its thread, if it has one, ends whenever it ends, or goes on for others of its batch."""
        if not call.give_up():
            return False
        with self._lock:
            seat = self._active.pop(call.unit, None)
            if seat is None:
                return False
            seat.is_abandoned = True
            self._abandoned.add(seat)
            del self._threads[seat]
            return True

    def close(self) -> None:
        """Let the threads end. What still runs is left behind: the threads are daemons."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = list(self._threads.values())
            running = [call for unit, seat in self._active.items() if seat is not None for call in unit.calls]
        for call in running:
            self.terminate(call)
        for _ in threads:
            self._units.put(None)
        for thread in threads:
            thread.join(CLOSE_S / len(threads))
        left = self.abandoned + sum(thread.is_alive() for thread in threads)
        if left:
            log.warning("%d threads of handlers did not end and were left behind", left)

    def _work(self, seat: _Seat) -> None:
        while (unit := self._units.get()) is not None:
            with self._lock:
                if unit not in self._active:
                    continue  # given up before a thread was free
                self._active[unit] = seat
            finished = self._perform(seat, unit)
            with self._lock:
                if seat.is_abandoned:
                    self._abandoned.discard(seat)
                    return
                del self._active[unit]
            self._deliver(finished)

    def _perform(self, seat: _Seat, unit: Unit) -> Finished:
        """`terminate` may raise TaskCancelled anywhere in here, once; never after this returned."""
        finished: Finished = [(call, Cancelled()) for call in unit.calls]
        try:
            with self._lock:
                seat.is_interruptible = True
            finished = finish(unit, self._now_us)
            with self._lock:
                seat.is_interruptible = False
        except TaskCancelled:
            with self._lock:
                seat.is_interruptible = False
        return finished
