"""What the cases of the surface have in common: an engine with its API, for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.surface import Caller, Surface, running


@pytest.fixture(scope="module")
def surface() -> Iterator[Surface]:
    with running() as surface:
        yield surface


@pytest.fixture(scope="module")
def call(surface: Surface) -> Iterator[Caller]:
    caller = Caller(surface.api)
    yield caller
    caller.close()
