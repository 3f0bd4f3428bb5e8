"""The state store in SQLite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sqlite import SqliteStateStore
from infra.sqlite.state import COMMITS_MAX
from schemas.errors import Fatal, Fenced, Retriable
from tests.contract.state_store import DEADLINE_S, Done, StateStoreContract, commit


class TestSqliteStateStore(StateStoreContract):
    """Over a file and over memory."""

    @pytest.fixture(params=["file", "memory"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteStateStore]:
        store = SqliteStateStore(":memory:" if request.param == "memory" else tmp_path / "state.db")
        yield store
        store.close()


def test_state_and_fences_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    first = SqliteStateStore(path)
    old = first.fence(3)
    assert commit(first, 3, old, [(b"a", b"1")]) is None
    first.close()
    second = SqliteStateStore(path)
    assert dict(second.load(3)) == {b"a": b"1"}
    assert second.fence(3) > old
    assert isinstance(commit(second, 3, old, [(b"a", b"2")]), Fenced)
    second.close()


def test_commits_that_wait_are_bounded(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state.db")
    token = store.fence(0)
    may_go_on = threading.Event()
    is_running = threading.Event()

    def slow() -> Iterator[tuple[bytes, bytes]]:
        is_running.set()
        may_go_on.wait(DEADLINE_S)
        yield b"a", b"1"

    dones = [Done() for _ in range(COMMITS_MAX + 1)]
    store.commit(0, token, slow(), dones[0])
    assert is_running.wait(DEADLINE_S)
    for done in dones[1:]:
        store.commit(0, token, [], done)
    with pytest.raises(Retriable, match="try later"):
        store.commit(0, token, [], Done())
    may_go_on.set()
    assert [done.wait() for done in dones] == [None] * len(dones)
    store.close()


def test_a_full_disk_is_reported_with_what_to_do(tmp_path: Path) -> None:
    store = SqliteStateStore(tmp_path / "state.db")
    token = store.fence(0)
    store._writer.execute("PRAGMA max_page_count = 20").fetchone()
    result = commit(store, 0, token, [(b"%d" % number, bytes(10_000)) for number in range(100)])
    assert isinstance(result, Fatal)
    assert "free some space" in str(result)
    assert list(store.load(0)) == []
    assert commit(store, 0, token, [(b"a", b"1")]) is None
    store.close()
