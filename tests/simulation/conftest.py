"""Simulations run without log lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from tests.simulation.quiet import be_quiet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    be_quiet()
    yield
    structlog.reset_defaults()
