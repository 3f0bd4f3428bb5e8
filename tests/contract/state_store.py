"""The contract of `ports.StateStore`, for any adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from scheduler.ports import StateStore
from schemas.errors import Fenced, TidewheelIOError
from tests.harness import eventually

DEADLINE_S = 30.0


class Done:
    """An `on_done` that can be waited for."""

    def __init__(self) -> None:
        self._called = threading.Semaphore(0)
        self.results: list[TidewheelIOError | None] = []

    def __call__(self, result: TidewheelIOError | None) -> None:
        self.results.append(result)
        self._called.release()

    def wait(self) -> TidewheelIOError | None:
        """The result, once it is there."""
        assert self._called.acquire(timeout=DEADLINE_S), "on_done was not called"
        return self.results[-1]


def commit(
    store: StateStore, shard: int, token: int, changes: Iterable[tuple[bytes, bytes | None]]
) -> TidewheelIOError | None:
    """Commit and wait for the result."""
    done = Done()
    store.commit(shard, token, changes, done)
    return done.wait()


def fenced(store: StateStore, shard: int) -> int:
    """Fence and wait until it is done."""
    return eventually(lambda: store.fence(shard), "the fence")


def picture(store: StateStore, shard: int) -> Iterable[tuple[bytes, bytes]]:
    """What `load` gives, once it is there."""
    found: list[Iterable[tuple[bytes, bytes]]] = []

    def is_there() -> bool:
        state = store.load(shard)
        if state is not None:
            found.append(state)
        return bool(found)

    eventually(is_there, "the state")
    return found[0]


def loaded(store: StateStore, shard: int) -> dict[bytes, bytes]:
    """What is committed."""
    return dict(picture(store, shard))


class StateStoreContract:
    """Every adapter of `StateStore` passes these; a subclass gives the fixture `store`, empty."""

    def test_a_shard_that_never_committed_has_nothing(self, store: StateStore) -> None:
        fenced(store, 0)
        assert loaded(store, 0) == {}

    def test_load_gives_what_the_last_changes_left(self, store: StateStore) -> None:
        token = fenced(store, 0)
        assert commit(store, 0, token, [(b"a", b"1"), (b"b", b""), (b"c", bytes(300_000))]) is None
        assert commit(store, 0, token, [(b"a", None), (b"c", b"3"), (b"d", b"4"), (b"never", None)]) is None
        assert loaded(store, 0) == {b"b": b"", b"c": b"3", b"d": b"4"}

    def test_the_last_of_several_changes_of_a_key_holds(self, store: StateStore) -> None:
        token = fenced(store, 0)
        assert commit(store, 0, token, [(b"a", b"1"), (b"b", b"1"), (b"a", None), (b"b", b"2")]) is None
        assert loaded(store, 0) == {b"b": b"2"}

    def test_commits_are_applied_in_the_order_of_their_calls(self, store: StateStore) -> None:
        token = fenced(store, 0)
        dones = [Done() for _ in range(20)]
        for number, done in enumerate(dones):
            store.commit(0, token, [(b"last", b"%d" % number), (b"%d" % number, b"")], done)
        assert [done.wait() for done in dones] == [None] * 20
        assert [done.results for done in dones] == [[None]] * 20
        state = loaded(store, 0)
        assert state[b"last"] == b"19"
        assert len(state) == 21

    def test_many_entries_are_kept(self, store: StateStore) -> None:
        token = fenced(store, 0)
        entries = {b"task-%d" % number: b"x" * (number % 300) for number in range(5_000)}
        assert commit(store, 0, token, entries.items()) is None
        assert loaded(store, 0) == entries
        assert commit(store, 0, token, [(key, None) for key in entries]) is None
        assert loaded(store, 0) == {}

    def test_shards_have_states_and_fences_of_their_own(self, store: StateStore) -> None:
        tokens = [fenced(store, shard) for shard in range(3)]
        for shard, token in enumerate(tokens):
            assert commit(store, shard, token, [(b"a", b"%d" % shard)]) is None
        fenced(store, 0)
        assert commit(store, 1, tokens[1], [(b"b", b"")]) is None
        assert [loaded(store, shard) for shard in range(3)] == [{b"a": b"0"}, {b"a": b"1", b"b": b""}, {b"a": b"2"}]

    def test_who_was_fenced_writes_nothing(self, store: StateStore) -> None:
        old = fenced(store, 0)
        assert commit(store, 0, old, [(b"a", b"1")]) is None
        new = fenced(store, 0)
        assert isinstance(commit(store, 0, old, [(b"a", b"2"), (b"b", b"2")]), Fenced)
        assert loaded(store, 0) == {b"a": b"1"}
        assert commit(store, 0, new, [(b"a", b"3")]) is None
        assert loaded(store, 0) == {b"a": b"3"}

    def test_changes_that_cannot_be_made_leave_nothing_and_are_reported(self, store: StateStore) -> None:
        def broken() -> Iterator[tuple[bytes, bytes | None]]:
            for number in range(2_000):
                yield b"%d" % number, b""
            raise LookupError("no encoder")

        token = fenced(store, 0)
        result = commit(store, 0, token, broken())
        assert isinstance(result, TidewheelIOError)
        assert "no encoder" in str(result)
        assert loaded(store, 0) == {}

    def test_a_load_is_one_picture(self, store: StateStore) -> None:
        token = fenced(store, 0)
        keys = [b"%05d" % number for number in range(3_000)]
        assert commit(store, 0, token, [(key, b"old") for key in keys]) is None
        loading = iter(picture(store, 0))
        first = next(loading)
        assert commit(store, 0, token, [(key, b"new") for key in keys]) is None
        assert {value for _, value in (first, *loading)} == {b"old"}

    def test_close_finishes_what_was_begun(self, store: StateStore) -> None:
        token = fenced(store, 0)
        done = Done()
        store.commit(0, token, [(b"a", b"1")], done)
        store.close()
        store.close()
        assert done.results == [None]
        with pytest.raises(TidewheelIOError):
            store.commit(0, token, [(b"b", b"2")], done)
