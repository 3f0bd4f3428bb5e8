"""C27, C28: what is urgent does not wait behind what was fetched, and one tenant does not drown the others.

Slots are the clock: a handler ends when the test lets it, so that "within two task lengths" means "among the next two
starts". Nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest

from scheduler.queue_service import TenantChange
from schemas.messages import Priority, Status
from tests.harness import eventually, running
from tidewheel import App, Engine, Retry


class Stage:
    """An app whose handlers run one step each time that the test says so."""

    def __init__(self) -> None:
        self.app = App()
        self.starts: list[str] = []
        self._turns = threading.Semaphore(0)

        @self.app.task(name="work", retry=Retry(max_attempts=2, delay=0))
        def work(name: str, is_failing: bool = False) -> None:
            self.starts.append(name)
            assert self._turns.acquire(timeout=60)
            if is_failing:
                raise ConnectionError("once more")

        self.work = work

    def submit(self, *names: str, is_failing: bool = False, **options: Any) -> None:
        submitter = self.work.options(**options)
        submitter.submit_many([{"name": name, "is_failing": is_failing} for name in names])

    def ends(self, count: int) -> None:
        """So many attempts end, one after the other; each makes room for another."""
        for begun in range(len(self.starts), len(self.starts) + count):
            self._turns.release()
            eventually(partial(self._has_begun, begun + 1), "another start")

    def _has_begun(self, count: int) -> bool:
        return len(self.starts) >= count

    def let_go(self) -> None:
        """All end as soon as they begin."""
        self._turns.release(100_000)


def at_the_worker(engine: Engine, priority: Priority) -> list[str]:
    """The payloads of the records that wait for a slot there."""
    worker = engine._worker
    assert worker is not None
    return [str(ready.payload) for ready in list(worker._intake._ready.values()) if ready.priority is priority]


def is_at_the_worker(engine: Engine, name: str, priority: Priority) -> bool:
    """Whether a record of this task waits for a slot there."""
    return any(name in payload for payload in at_the_worker(engine, priority))


def next_is_urgent_or_none(engine: Engine, stage: Stage, urgent: int) -> bool:
    """Whether an urgent record is at the worker, or all have begun."""
    begun = sum(name.startswith("high") for name in stage.starts)
    return bool(at_the_worker(engine, Priority.HIGH)) or begun == urgent


def until_windows_are_small(engine: Engine) -> None:
    """Wait for the shards to learn that nothing starts: little is out that was chosen before."""

    def out() -> int:
        return sum(len(host.shard._dispatch._out) for host in list(engine.runtime.hosts.values()))

    eventually(lambda: out() <= len(engine.runtime.hosts), "small windows")


def pending(engine: Engine, tenant_id: str) -> int:
    """How many tasks of a tenant wait."""
    hosts = list(engine.runtime.hosts.values())
    tasks = [task for host in hosts for task in list(host.shard.state.tasks.values())]
    return sum(task.status is Status.PENDING and task.spec.tenant_id == tenant_id for task in tasks)


def begun(engine: Engine, stage: Stage, slots: int) -> None:
    """All slots are taken, and the windows have learnt how many there are."""
    eventually(lambda: len(stage.starts) == slots, "the first starts")
    stage.ends(20)


def test_c27_a_high_one_starts_when_the_running_one_ends() -> None:
    stage = Stage()
    with running(stage.app, slots=1) as engine:
        stage.submit(*(f"low-{number}" for number in range(200)), priority="low")
        begun(engine, stage, 1)
        stage.submit("high", priority="high")
        eventually(lambda: is_at_the_worker(engine, "high", Priority.HIGH))
        stage.ends(1)
        assert stage.starts[-1] == "high"
        stage.let_go()


def test_c27_high_ones_start_within_three_rounds_of_the_slots() -> None:
    """Of 20 high ones and 16 slots, made smaller: a worker has a thread for each slot."""
    stage = Stage()
    with running(stage.app, slots=4) as engine:
        stage.submit(*(f"low-{number}" for number in range(300)), priority="low")
        begun(engine, stage, 4)
        stage.submit(*(f"high-{number}" for number in range(5)), priority="high")
        before = len(stage.starts)
        for _ in range(12):
            eventually(partial(next_is_urgent_or_none, engine, stage, 5))
            stage.ends(1)
        assert Counter(name.partition("-")[0] for name in stage.starts[before:])["high"] == 5
        stage.let_go()


def test_c27_a_retry_keeps_its_priority() -> None:
    stage = Stage()
    with running(stage.app, slots=1) as engine:
        stage.submit(*(f"low-{number}" for number in range(200)), priority="low")
        begun(engine, stage, 1)
        stage.submit("high", priority="high", is_failing=True)
        for _ in range(2):
            eventually(lambda: is_at_the_worker(engine, "high", Priority.HIGH))
            stage.ends(1)
            assert stage.starts[-1] == "high"
            stage.ends(1)
        stage.let_go()


def test_c28_a_tenant_that_comes_later_starts_within_a_round() -> None:
    stage = Stage()
    with running(stage.app, slots=1) as engine:
        flood = {"tenant_id": "flood"}
        stage.submit(*(f"flood-{number}" for number in range(300)), metadata=flood)
        begun(engine, stage, 1)
        stage.submit("late", metadata={"tenant_id": "late"})
        eventually(lambda: is_at_the_worker(engine, "late", Priority.MEDIUM))
        before = len(stage.starts)
        stage.ends(len(engine.runtime.hosts))  # each shard has one record out
        assert "late" in stage.starts[before:]
        stage.let_go()


@pytest.mark.parametrize(("weight", "share"), [(1, 50), (3, 75)])
def test_c28_two_tenants_with_a_backlog_share_by_their_weights(weight: int, share: int) -> None:
    stage = Stage()
    with running(stage.app, slots=1) as engine:
        engine.service.queues.set_tenant("a", TenantChange.model_validate({"weight": weight})).run()
        eventually(lambda: engine.runtime.policies.weight_of("a") == weight)
        for tenant_id in "ab":
            names = [f"{tenant_id}-{number}" for number in range(400)]
            stage.submit(*names, metadata={"tenant_id": tenant_id}, is_failing=tenant_id == "a")
        eventually(lambda: pending(engine, "b") >= 350)
        until_windows_are_small(engine)
        stage.ends(10)  # those that are at the worker already
        before = len(stage.starts)
        stage.ends(100)
        found = Counter(name.partition("-")[0] for name in stage.starts[before : before + 100])
        # A share holds to within one in each shard, of which there are four.
        assert abs(found["a"] - share) <= 2 + len(engine.runtime.hosts), found
        stage.let_go()
