"""The engine with a schema registry: what it writes bears the registry's ids, and it does not start without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.ports import TopicPartition
from schemas.errors import Retriable
from schemas.messages import SubmitTask
from schemas.topics import TASK_REQUESTS
from tests.unit.test_registry import Registry, served
from tidewheel import App

app = App()


@app.task(name="add")
async def add(left: int, right: int) -> int:
    """A sum."""
    return left + right


def test_records_bear_the_registrys_ids(tmp_path: Path) -> None:
    registry = Registry()
    with served(registry.respond) as url, app.embedded(tmp_path, registry=url, shards=1) as engine:
        assert add.submit(1, 2).result(10) == 3
        reader = engine.broker.connect().reader()
        reader.seek(TopicPartition(TASK_REQUESTS, 0), 0)
        (record,) = reader.take(1)
    assert record.value is not None
    written = int.from_bytes(record.value[1:5], "big")
    assert written == registry.subjects[f"tidewheel.{SubmitTask.__name__}"]


def test_without_its_registry_the_engine_says_so_and_leaves_nothing_open(tmp_path: Path) -> None:
    registry = Registry()
    registry.status = 503
    with served(registry.respond) as url:
        with pytest.raises(Retriable, match="schema registry: cannot register"):
            app.embedded(tmp_path, registry=url).start()
        registry.status = 200
        with app.embedded(tmp_path, registry=url):
            assert add.submit(2, 2).result(10) == 4
