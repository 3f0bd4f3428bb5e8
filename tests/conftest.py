"""What holds for all tests."""

from __future__ import annotations

import pytest

SERVICE_S = 300  # the first test that asks for a service waits until it is up, beside others that use both cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with real services have more time, unless they say how much."""
    for item in items:
        if item.get_closest_marker("service") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SERVICE_S))
