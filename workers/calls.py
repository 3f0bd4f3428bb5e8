"""One call of a handler, and the two ways to perform it. Used by every executor and by the children of the pool.

A handler of batches is called once for several attempts: a BatchCall holds their Calls. What executors run is either, a
Unit: it occupies one thread or coroutine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from schemas.messages import ReadyTask
from workers import execution
from workers.batches import Items
from workers.context import Context, SaveCheckpoint, enter, leave
from workers.errors import TaskCancelled
from workers.execution import Cancelled, Outcome
from workers.registry import Handler

NowUs = Callable[[], int]


class Call:
    """An attempt on its way through an executor. Compared by identity.

    `is_terminated`: the executor was told to make it stop.
    """

    __slots__ = ("batch", "context", "ends_at", "handler", "is_terminated", "ready")

    def __init__(self, ready: ReadyTask, handler: Handler, ends_at: int | None, save: SaveCheckpoint) -> None:
        self.ready = ready
        self.handler = handler
        self.ends_at = ends_at
        self.context = Context(ready, ends_at, save)
        self.is_terminated = False
        self.batch: BatchCall | None = None

    @property
    def unit(self) -> Unit:
        """What an executor runs for it."""
        return self if self.batch is None else self.batch

    @property
    def calls(self) -> tuple[Call, ...]:
        """Itself, as a BatchCall has several."""
        return (self,)

    @property
    def is_cancelled(self) -> bool:
        """Whether its handler is asked to stop."""
        return self.context.is_cancelled

    def mark_terminated(self) -> None:
        """For executors: from now on it is made to stop, and its handler sees it."""
        self.context.mark_cancelled()
        self.is_terminated = True

    def arrive(self) -> Unit | None:
        """Nothing keeps it from being called, or it was given up. Its unit, once that is so for the whole of it."""
        return self if self.batch is None else self.batch.arrive()

    def give_up(self) -> bool:
        """Nobody waits for its outcome any more. False: its handler goes on for others of the batch."""
        return self.batch is None or self.batch.give_up(self)


class BatchCall:
    """Attempts that share one call of their handler. Compared by identity. `calls` are those not given up.

    It is to stop when all its attempts are: one that is cancelled must not end the work of the others.
    """

    __slots__ = ("_to_come", "calls", "handler")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.handler = calls[0].handler
        self.calls = tuple(calls)
        self._to_come = len(calls)
        for call in calls:
            call.batch = self

    @property
    def is_cancelled(self) -> bool:
        """Whether its handler is asked to stop for every item."""
        return all(call.is_cancelled for call in self.calls)

    @property
    def is_terminated(self) -> bool:
        """Whether it is made to stop for every item."""
        return all(call.is_terminated for call in self.calls)

    def arrive(self) -> BatchCall | None:
        """One more of it has come to its call, or was given up. Itself, once all are there."""
        self._to_come -= 1
        return None if self._to_come else self

    def give_up(self, call: Call) -> bool:
        """Leave one out; if the function was not called yet, it is called without it. True: none is left."""
        self.calls = tuple(one for one in self.calls if one is not call)
        return not self.calls


Unit: TypeAlias = Call | BatchCall
Finished: TypeAlias = Sequence[tuple[Call, Outcome]]


class _Finishing:
    """The outcomes of attempts, as they become known. Used as a context around what users wrote.

    Whatever leaves their code inside it, SystemExit too, is the outcome of each attempt that has none yet: it is a
    failure of the handler, and not the end of the worker.
    """

    __slots__ = ("_calls", "_now_us", "finished")

    def __init__(self, calls: Sequence[Call], now_us: NowUs) -> None:
        self._calls, self._now_us = calls, now_us
        self.finished: list[tuple[Call, Outcome]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            told = {call for call, _ in self.finished}
            self.finished += [(one, outcome_of(error, one, self._now_us)) for one in self._calls if one not in told]
        return True


def finish(unit: Unit, now_us: NowUs) -> Finished:
    """Run a `def` handler here and now, for one attempt or several. Whatever it raises is an outcome of each."""
    if isinstance(unit, Call):
        return [(unit, perform(unit, now_us))]
    fitting, items, finished = _sorted_out(unit.calls, now_us)
    if fitting:
        finishing = _Finishing(fitting, now_us)
        with finishing:
            returned = unit.handler.function(**_arguments(fitting, items))
            finishing.finished += _outcomes(fitting, returned, now_us)
        finished += finishing.finished
    return finished


async def finish_async(unit: Unit, now_us: NowUs) -> Finished:
    """Run an `async def` handler in the current asyncio task. Whatever it raises is an outcome of each attempt."""
    if isinstance(unit, Call):
        return [(unit, await perform_async(unit, now_us))]
    fitting, items, finished = _sorted_out(unit.calls, now_us)
    if fitting:
        finishing = _Finishing(fitting, now_us)
        with finishing:
            returned = await unit.handler.function(**_arguments(fitting, items))
            finishing.finished += _outcomes(fitting, returned, now_us)
        finished += finishing.finished
    return finished


def _sorted_out(calls: Sequence[Call], now_us: NowUs) -> tuple[list[Call], list[Any], list[tuple[Call, Outcome]]]:
    """The attempts whose payloads fit, their items, and the others with their outcomes."""
    fitting: list[Call] = []
    items: list[Any] = []
    finished: list[tuple[Call, Outcome]] = []
    for call in calls:
        finishing = _Finishing([call], now_us)
        with finishing:  # an item's class may raise anything when it is made
            items.append(_items_of(call).item(call.ready.payload, call.ready.content_type))
            fitting.append(call)
        finished += finishing.finished
    return fitting, items, finished


def _arguments(calls: Sequence[Call], items: Sequence[Any]) -> dict[str, Any]:
    return _items_of(calls[0]).arguments(items, [call.context for call in calls])


def _items_of(call: Call) -> Items:
    assert call.handler.items is not None, "a handler of batches has them"
    return call.handler.items


def _outcomes(calls: Sequence[Call], returned: Any, now_us: NowUs) -> list[tuple[Call, Outcome]]:
    """What the returned list says of each item, in their order."""
    wrong = execution.misfit(returned, len(calls))
    if wrong is not None:
        return [(call, wrong) for call in calls]
    return [
        (call, outcome_of(value, call, now_us) if isinstance(value, BaseException) else execution.succeeded(value))
        for call, value in zip(calls, returned, strict=True)
    ]


def perform(call: Call, now_us: NowUs) -> Outcome:
    """Run a `def` handler here and now. Whatever it raises is an outcome."""
    token, finishing = enter(call.context), _Finishing([call], now_us)
    with finishing:
        arguments = call.handler.arguments(call.ready.payload, call.ready.content_type, call.context)
        finishing.finished.append((call, execution.succeeded(call.handler.function(**arguments))))
    leave(token)
    return finishing.finished[0][1]


async def perform_async(call: Call, now_us: NowUs) -> Outcome:
    """Run an `async def` handler in the current asyncio task. Whatever it raises is an outcome."""
    enter(call.context)
    finishing = _Finishing([call], now_us)
    with finishing:
        arguments = call.handler.arguments(call.ready.payload, call.ready.content_type, call.context)
        finishing.finished.append((call, execution.succeeded(await call.handler.function(**arguments))))
    return finishing.finished[0][1]


def outcome_of(error: BaseException, call: Call, now_us: NowUs) -> Outcome:
    """What an exception that left the handler, or that it returned for an item, means for the attempt."""
    if call.context.is_cancelled and isinstance(error, TaskCancelled | asyncio.CancelledError):
        return Cancelled()
    return execution.failed(error, now_us())
