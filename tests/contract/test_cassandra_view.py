"""The view in Cassandra."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.cassandra import CassandraSettings, CassandraView
from tests.cassandra_stage import empty, keyspace
from tests.contract.view import ViewContract


@pytest.fixture(scope="module")
def settings() -> Iterator[CassandraSettings]:
    with keyspace() as settings:
        yield settings


@pytest.mark.service("cassandra")
class TestCassandraView(ViewContract):
    """Over one node. The clock stands at the beginning of time, near which the contract's tasks were created."""

    @pytest.fixture
    def view(self, settings: CassandraSettings) -> Iterator[CassandraView]:
        view = CassandraView(settings, now_us=lambda: 0)
        empty(view, settings)
        yield view
        view.close()
