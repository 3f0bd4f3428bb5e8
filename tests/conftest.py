"""What holds for all tests."""

from __future__ import annotations

import pytest

SERVICE_S = 300  # the first test that asks for a service waits until it is up, beside others that use both cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with real services have more time, unless they say how much; files with slow tests come first.

    A file stays in one process, so that the last process to end is not one that began late with a long one.
    """
    for item in items:
        if item.get_closest_marker("service") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SERVICE_S))
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
