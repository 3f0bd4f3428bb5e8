"""Handlers of batches: what may be declared, how payloads become items, when a batch is due, what its list says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.messages import ErrorKind, Priority, ReadyTask, Verdict
from tests.samples import minimal
from tidewheel import App
from workers.batches import WAIT_MS_MAX, Batch
from workers.calls import BatchCall, Call, finish, finish_async
from workers.context import Context, current_context
from workers.errors import (
    ArgumentError,
    PermanentError,
    RegistrationError,
    RetryableError,
    Snooze,
    TaskCancelled,
)
from workers.execution import Cancelled, Failed, Outcome, Snoozed, Succeeded
from workers.intake import Intake, Lane, Progress, Waiting
from workers.registry import Handler
from workers.settings import SLOTS_MAX

BATCH = Batch(size=3, wait=0.05)
WAIT_US = 50_000
JSON = "application/json"


class Row(msgspec.Struct):
    n: int
    name: str = ""


class Model(pydantic.BaseModel):
    n: int = pydantic.Field(gt=0)


# mypy: disable-error-code="empty-body"


# --- declarations -----------------------------------------------------------------------------------------------------


def bare(rows): ...  # type: ignore[no-untyped-def]
def rows(rows: list[Row]) -> list[int]: ...
def texts(texts: list[str]) -> list[str]: ...
def models(models: list[Model]) -> list[None]: ...
def contents(contents: list[bytes]) -> list[int]: ...
def with_contexts(contexts: list[Context], rows: Sequence[Row]) -> list[int | PermanentError]: ...
def only_contexts(contexts: list[Context]) -> list[int]: ...
def two_lists(a: list[int], b: list[int]) -> list[int]: ...
def no_list(n: int) -> list[int]: ...
def one_context(rows: list[int], context: Context) -> list[int]: ...
def variadic(*rows: int) -> list[int]: ...
def nothing() -> list[int]: ...
def returns_none(rows: list[int]) -> None: ...
def returns_one(rows: list[int]) -> int: ...
def ambiguous(lists: list[list[int] | set[int]]) -> list[int]: ...


@pytest.mark.parametrize(
    ("size", "wait", "reason"),
    [
        (0, 1, f"size: 0 is not allowed; a whole number from 1 to {SLOTS_MAX}"),
        (SLOTS_MAX + 1, 1, "size"),
        (2.5, 1, "size: 2.5"),
        (True, 1, "size: True"),
        ("9", 1, "size: '9'"),
        (9, -0.1, "wait: -0.1 is not allowed"),
        (9, float("nan"), "wait: nan"),
        (9, "1", "wait: '1' is not allowed; seconds or a timedelta"),
        (9, 10.001, "wait: 10.001 is not allowed; at most 10 seconds"),
        (9, timedelta(minutes=1), "wait: .*at most 10 seconds"),
    ],
)
def test_a_batch_that_is_not_allowed_is_refused_by_its_field(size: Any, wait: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Batch(size=size, wait=wait)


def test_the_wait_is_in_seconds_or_a_timedelta() -> None:
    assert Batch(2, wait=0.25).wait_ms == Batch(2, wait=timedelta(milliseconds=250)).wait_ms == 250
    assert Batch(2, wait=0).wait_ms == 0
    assert Batch(SLOTS_MAX, wait=WAIT_MS_MAX / 1000).wait_ms == WAIT_MS_MAX


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (rows, {"batch": 100}, r"batch 100 is not allowed; a Batch\(size=…, wait=…\)"),
        (rows, {"executor": "process"}, "batch is not allowed with executor 'process'"),
        (no_list, {}, r"'n: int'.*list\[…\]"),
        (one_context, {}, r"'context: .*Context'.*list\[Context\]"),
        (variadic, {}, r"'\*rows: int'"),
        (only_contexts, {}, "one list of items"),
        (two_lists, {}, "one list of items"),
        (nothing, {}, "one list of items"),
        (returns_none, {}, "returns a list with a result for each item, and can't be annotated to return None"),
        (returns_one, {}, "can't be annotated to return int"),
        (ambiguous, {}, "'lists'.*can't come from JSON"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_when_it_is_declared(function: Any, options: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=f"task 't'.*{reason}"):
        Handler(function, **{"name": "t", "batch": BATCH, **options})


def test_a_list_of_contexts_needs_a_batch() -> None:
    with pytest.raises(RegistrationError, match=r"'contexts: .*batch=Batch"):
        Handler(only_contexts, name="t")


# --- payloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "item", "payload"),
    [
        (rows, Row(1, "a"), b'{"n":1,"name":"a"}'),
        (with_contexts, Row(1), b'{"n":1,"name":""}'),
        (texts, "a", b'"a"'),
        (models, Model(n=1), b'{"n":1}'),
        (bare, [1, None], b"[1,null]"),
        (contents, b"\x00", b'"AA=="'),
    ],
)
def test_a_payload_is_the_item_of_its_task(function: Any, item: Any, payload: bytes) -> None:
    handler = Handler(function, name="t", batch=BATCH)
    assert handler.items is not None
    assert handler.payload((item,), {}) == payload
    assert handler.items.item(b" " + payload, JSON) == item


def test_the_fields_of_an_item_may_be_given_by_name() -> None:
    handler = Handler(rows, name="t", batch=BATCH)
    assert handler.payload((), {"n": 1, "name": "a"}) == b'{"n":1,"name":"a"}'
    for args, kwargs in [((Row(1), Row(2)), {}), ((Row(1),), {"n": 2})]:
        with pytest.raises(ArgumentError, match="brings one item for 'rows'"):
            handler.payload(args, kwargs)


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [(rows, ([Row(1)],), {}), (rows, (), {"name": "a"}), (texts, (7,), {}), (models, ({"n": 0},), {}), (rows, (), {})],
)
def test_what_is_no_item_is_refused_when_it_is_submitted(function: Any, args: Any, kwargs: Any) -> None:
    with pytest.raises(ArgumentError, match="an item of parameter '"):
        Handler(function, name="t", batch=BATCH).payload(args, kwargs)


def test_opaque_payloads_are_for_lists_of_bytes() -> None:
    items = Handler(contents, name="t", batch=BATCH).items
    assert items is not None and items.item(b"\x00", "image/png") == b"\x00"
    items = Handler(texts, name="t", batch=BATCH).items
    assert items is not None
    with pytest.raises(ArgumentError, match=r"image/png.*list\[bytes\]"):
        items.item(b"\x00", "image/png")


@pytest.mark.parametrize(
    ("function", "content", "result"), [(rows, b"7", 7), (with_contexts, b"7", 7), (bare, b"[7]", [7])]
)
def test_a_stored_result_is_what_one_element_is_annotated_to_be(function: Any, content: bytes, result: Any) -> None:
    assert Handler(function, name="t", batch=BATCH).result(content) == result


def test_a_result_of_a_type_arrives_as_that_type() -> None:
    def whole(rows: list[int]) -> list[Row | ValueError]: ...

    assert Handler(whole, name="t", batch=BATCH).result(b'{"n":1}') == Row(1)


def test_the_application_declares_a_batch_and_still_calls_its_function() -> None:
    app = App()

    @app.task(name="add", batch=Batch(size=2, wait=0))
    def add(numbers: list[int]) -> list[int]:
        return [number + 1 for number in numbers]

    assert add([1, 2]) == [2, 3]
    handler = app.registry.get("add")
    assert handler is not None and handler.batch is not None and handler.batch.size == 2


# --- collecting, in virtual time --------------------------------------------------------------------------------------

COLLECTING = Handler(rows, name="rows", batch=BATCH)
ALONE = Handler(texts, name="texts")


def waiting(number: int, taken_at: int, handler: Handler = COLLECTING, **fields: Any) -> Waiting:
    ready = minimal(ReadyTask, task_id=f"t{number}", attempt=1, task_version=1, priority=Priority.MEDIUM)
    return Waiting(msgspec.structs.replace(ready, **fields), handler, Progress(), number, taken_at)


def filled(*taken_at: int, slots: int = 100) -> tuple[Intake, Lane]:
    intake = Intake(slots)
    for number, at in enumerate(taken_at):
        intake.put(waiting(number, at))
    (lane,) = intake.lanes()
    return intake, lane


def test_a_batch_is_due_when_its_size_is_there() -> None:
    intake, lane = filled(0, 1)
    assert lane.due(1) == 0
    intake.put(waiting(2, 2))
    assert lane.due(2) == 3
    assert [one.offset for one in intake.pick(lane, 3)] == [0, 1, 2]
    assert len(intake) == lane.due(WAIT_US) == 0


def test_a_batch_is_due_when_its_first_item_waited_for_its_time() -> None:
    intake, lane = filled(1000, 40_000)
    assert intake.next_due_at(1000) == 1000 + WAIT_US
    assert lane.due(1000 + WAIT_US - 1) == 0
    assert lane.due(1000 + WAIT_US) == 2
    assert intake.next_due_at(1000 + WAIT_US) is None  # nothing more that time alone would change


def test_the_rest_of_a_batch_waits_from_when_its_own_first_item_came() -> None:
    intake, lane = filled(0, 10, 20, 30)
    intake.pick(lane, lane.due(30))
    assert lane.due(30) == 0
    assert lane.due(30 + WAIT_US - 1) == 0
    assert lane.due(30 + WAIT_US) == 1


def test_no_batch_is_larger_than_the_worker() -> None:
    _, lane = filled(0, 1, slots=2)
    assert lane.due(1) == 2
    assert filled(0, 1, 2, slots=2)[1].due(2) == 2


@given(st.lists(st.sampled_from(list(Priority)), min_size=1, max_size=30))
def test_items_of_one_priority_keep_their_order_and_none_is_lost_or_doubled(priorities: list[Priority]) -> None:
    intake = Intake()
    for number, priority in enumerate(priorities):
        intake.put(waiting(number, number, priority=priority))
    (lane,) = intake.lanes()
    picked: list[Waiting] = []
    while count := lane.due(len(priorities) + WAIT_US):
        assert count <= 3
        picked += intake.pick(lane, count)
    assert sorted(one.offset for one in picked) == list(range(len(priorities)))
    for priority in Priority:
        offsets = [one.offset for one in picked if one.ready.priority is priority]
        assert offsets == sorted(offsets)


def test_each_handler_collects_for_itself_and_whoever_waits_longest_is_first() -> None:
    intake = Intake()
    other = Handler(texts, name="other", batch=Batch(size=2, wait=0.01))
    intake.put(waiting(0, 0))
    intake.put(waiting(1, 20_000, ALONE))
    intake.put(waiting(2, 5_000, other))
    told = [([one.handler.name for one in lane], lane.due(20_000)) for lane in intake.lanes()]
    assert told == [(["rows"], 0), (["other"], 1), (["texts"], 1)]


def test_what_was_lost_before_is_called_alone_and_at_once() -> None:
    intake = Intake()
    intake.put(waiting(0, 0))
    intake.put(waiting(1, 1, crash_count=1))
    intake.put(waiting(2, 2, crash_count=2))
    assert [(lane.size, [one.offset for one in lane], lane.due(2)) for lane in intake.lanes()] == [
        (3, [0], 0),
        (1, [1, 2], 1),
    ]


def test_what_collects_leaves_in_every_way_once() -> None:
    intake, lane = filled(0, 10, 20)
    assert intake.pop_to_call_until(WAIT_US - 1) == []
    assert [one.offset for one in intake.pop_to_call_until(WAIT_US)] == [0]
    removed = intake.remove(("t1", 1))
    assert removed is not None and removed.offset == 1
    assert lane.due(20) == 0
    assert [one.offset for one in intake.pop_all()] == [2]
    assert len(intake) == 0 and intake.next_due_at(0) is None


# --- what the list says -----------------------------------------------------------------------------------------------

NOW = 1_764_547_200_000_000


def outcomes_of(
    function: Callable[..., Any], *payloads: bytes, cancelled: Sequence[int] = (), is_async: bool = False
) -> list[Outcome]:
    """The outcome of each item, in the order of the payloads."""

    @functools.wraps(function)
    async def coroutine(**arguments: Any) -> Any:
        return function(**arguments)

    handler = Handler(coroutine if is_async else function, name="t", batch=Batch(size=100, wait=0))
    ready = minimal(ReadyTask, task_type="t", attempt=2, content_type=JSON)
    calls = [
        Call(msgspec.structs.replace(ready, task_id=f"t{place}", payload=payload), handler, None, print)
        for place, payload in enumerate(payloads)
    ]
    for place in cancelled:
        calls[place].context.mark_cancelled()
    batch = BatchCall(calls)
    finished = asyncio.run(finish_async(batch, lambda: NOW)) if is_async else finish(batch, lambda: NOW)
    assert len(finished) == len(calls)
    told = dict(finished)
    return [told[call] for call in calls]


both = pytest.mark.parametrize("is_async", [False, True])


@both
def test_each_item_has_its_result_in_order(is_async: bool) -> None:
    def doubled(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    assert outcomes_of(doubled, b"3", b"1", b"2", is_async=is_async) == [
        Succeeded(b"6"),
        Succeeded(b"2"),
        Succeeded(b"4"),
    ]


@both
def test_an_element_says_what_raising_it_says_of_a_task(is_async: bool) -> None:
    def mixed(numbers: list[int]) -> list[Any]:
        return [
            1,
            PermanentError("no"),
            RetryableError("later", after=2),
            Snooze(3, "not yet"),
            ConnectionError("gone"),
            float("nan"),
            TaskCancelled(),
            TaskCancelled(),
            SystemExit(1),
        ]

    told = outcomes_of(mixed, *[b"0"] * 9, cancelled=[6], is_async=is_async)
    assert told[0] == Succeeded(b"1")
    permanent, retryable, snoozed, guessed, unstorable, cancelled, unasked, exiting = told[1:]
    assert isinstance(permanent, Failed) and permanent.error.verdict is Verdict.PERMANENT
    assert permanent.error.message == "no" and permanent.error.kind is ErrorKind.RAISED
    assert isinstance(retryable, Failed) and retryable.error.verdict is Verdict.RETRYABLE
    assert retryable.retry_after_ms == 2000
    assert snoozed == Snoozed(3000, "not yet")
    assert isinstance(guessed, Failed) and guessed.error.verdict is Verdict.LIKELY_RETRYABLE
    assert isinstance(unstorable, Failed) and unstorable.error.kind is ErrorKind.RESULT
    assert cancelled == Cancelled()
    assert isinstance(unasked, Failed) and unasked.error.type == "tidewheel.TaskCancelled"
    assert isinstance(exiting, Failed) and exiting.error.type == "SystemExit"


@both
def test_what_the_handler_raises_is_said_of_every_item(is_async: bool) -> None:
    def failing(numbers: list[int]) -> list[int]:
        raise PermanentError("the table is gone")

    def snoozing(numbers: list[int]) -> list[int]:
        raise Snooze(1)

    for outcome in outcomes_of(failing, b"1", b"2", is_async=is_async):
        assert isinstance(outcome, Failed) and outcome.error.message == "the table is gone"
        assert outcome.error.verdict is Verdict.PERMANENT
    assert [type(one) for one in outcomes_of(snoozing, b"1", b"2", is_async=is_async)] == [Snoozed, Snoozed]


@both
def test_a_traceback_begins_with_the_handler_whether_it_raised_or_returned_the_error(is_async: bool) -> None:
    def deeper() -> None:
        raise ValueError("no")

    def returning(numbers: list[int]) -> list[Any]:
        try:
            deeper()
        except ValueError as error:
            return [error]
        return []

    def raising(numbers: list[int]) -> list[Any]:
        deeper()
        return []

    for function in (returning, raising):
        (outcome,) = outcomes_of(function, b"1", is_async=is_async)
        assert isinstance(outcome, Failed) and outcome.error.traceback
        assert f"in {function.__name__}" in outcome.error.traceback
        assert "in deeper" in outcome.error.traceback
        assert "calls.py" not in outcome.error.traceback


@both
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1], "a batch handler returned 1 results for 2 items"),
        ((1, 2, 3), "a batch handler returned 3 results for 2 items"),
        (None, "must return a list of 2 results, one for each item, not None"),
        ({"a": 1, "b": 2}, "must return a list of 2 results, one for each item, not a dict"),
        ("ab", "not a str"),
    ],
)
def test_another_list_is_a_permanent_error_of_every_item(returned: Any, message: str, is_async: bool) -> None:
    def wrong(numbers: list[int]) -> list[int]:
        return returned  # type: ignore[no-any-return]

    for outcome in outcomes_of(wrong, b"1", b"2", is_async=is_async):
        assert isinstance(outcome, Failed) and message in outcome.error.message
        assert (outcome.error.kind, outcome.error.verdict) == (ErrorKind.RESULT, Verdict.PERMANENT)


@both
def test_an_item_that_does_not_fit_fails_alone(is_async: bool) -> None:
    seen: list[Any] = []

    def told(rows: list[Row], contexts: list[Context]) -> list[str]:
        seen.extend(rows)
        return [context.task_id for context in contexts]

    first, second, third = outcomes_of(told, b'{"n": 1}', b'{"n": "x"}', b'{"n": 3}', is_async=is_async)
    assert (first, third) == (Succeeded(b'"t0"'), Succeeded(b'"t2"'))
    assert seen == [Row(1), Row(3)]
    assert isinstance(second, Failed) and second.error.verdict is Verdict.PERMANENT
    assert "'rows'" in second.error.message and "$.n" in second.error.message


@both
def test_an_item_that_does_not_fit_keeps_its_error_if_the_handler_fails_too(is_async: bool) -> None:
    def failing(numbers: list[int]) -> list[int]:
        raise PermanentError("the table is gone")

    first, second = outcomes_of(failing, b'"x"', b"2", is_async=is_async)
    assert isinstance(first, Failed) and first.error.type == "tidewheel.ArgumentError"
    assert isinstance(second, Failed) and second.error.type == "tidewheel.PermanentError"


@both
def test_the_handler_is_not_called_if_nothing_fits(is_async: bool) -> None:
    def never(rows: list[Row]) -> list[int]:
        raise AssertionError("called with nothing")

    for outcome in outcomes_of(never, b"1", b"{", is_async=is_async):
        assert isinstance(outcome, Failed) and outcome.error.type == "tidewheel.ArgumentError"


def test_each_item_has_a_context_and_there_is_no_current_one() -> None:
    def told(numbers: list[int], contexts: list[Context]) -> list[Any]:
        with pytest.raises(RuntimeError, match=r"list\[Context\]"):
            current_context()
        return [(context.task_id, context.attempt, context.is_cancelled) for context in contexts]

    assert outcomes_of(told, b"1", b"2", cancelled=[1]) == [
        Succeeded(b'["t0",2,false]'),
        Succeeded(b'["t1",2,true]'),
    ]


def test_one_that_was_given_up_before_the_call_is_left_out() -> None:
    def told(numbers: list[int]) -> list[int]:
        return numbers

    handler = Handler(told, name="t", batch=BATCH)
    ready = minimal(ReadyTask, content_type=JSON)
    calls = [Call(msgspec.structs.replace(ready, payload=b"%d" % n), handler, None, print) for n in range(3)]
    batch = BatchCall(calls)
    assert not calls[1].give_up()
    assert finish(batch, lambda: NOW) == [(calls[0], Succeeded(b"0")), (calls[2], Succeeded(b"2"))]
    assert [calls[0].give_up(), calls[2].give_up()] == [False, True]
