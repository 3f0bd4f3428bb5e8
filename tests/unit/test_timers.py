"""The timer queue against the simplest thing that could work: a dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.timers import Timers

KEYS = st.sampled_from("abcdef")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 20)),
        st.tuples(st.just("cancel"), KEYS, st.just(0)),
        st.tuples(st.just("pop"), st.just(""), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_each_key_is_due_once_at_its_last_instant(operations: list[tuple[str, str, int]]) -> None:
    timers, expected = Timers(), dict[str, int]()
    for operation, key, at in operations:
        if operation == "set":
            timers.set(key, at)
            expected[key] = at
        elif operation == "cancel":
            timers.cancel(key)
            expected.pop(key, None)
        else:
            due = timers.pop_due(at, limit=3)
            in_order = sorted((when, name) for name, when in expected.items() if when <= at)[:3]
            assert due == [name for _, name in in_order]
            for name in due:
                del expected[name]
        assert timers.next_at() == min(expected.values(), default=None)
        assert len(timers) == len(expected)


def test_moved_and_cancelled_timers_leave_nothing_behind() -> None:
    timers = Timers()
    for at in range(10_000):
        timers.set("a", at)
        timers.set(str(at), at)
        timers.cancel(str(at))
    assert len(timers._heap) < 200
