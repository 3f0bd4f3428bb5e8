"""The invariants of the design over many seeds, and the proof that the simulation would notice if one did not hold."""

from __future__ import annotations

import os

import pytest

from schemas.codec import Codec
from tests.simulation.mutants import MUTANTS
from tests.simulation.simulation import Simulation, play

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "250"))
FIRST_SEED = int(os.environ.get("SIMULATION_FIRST_SEED", "0"))
CHUNK = 25
MUTANT_SEEDS_MAX = 100
# Mutants that few seeds notice: from where on one does.
RARE = {
    "late-record-accepted": 300,
    "time-between-owners-counts": 300,
    "loaded-without-proof": 100,
    "ended-not-stored-while-slots-are-overdue": 100,
    "what-an-owner-before-held-is-given-back": 100,
    "view-always-believed": 700,
    "forgotten-before-catch-up": 100,
}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + SEEDS, CHUNK))
def test_invariants_hold(first: int) -> None:
    codec = Codec.builtin()
    for seed in range(first, min(first + CHUNK, FIRST_SEED + SEEDS)):
        failure = play(seed, codec)
        assert failure is None, failure


def test_a_seed_plays_the_same_twice() -> None:
    codec = Codec.builtin()
    first, second = Simulation(7, codec), Simulation(7, codec)
    first.run()
    second.run()
    assert first.world.partitions == second.world.partitions
    assert list(first.world.transcript) == list(second.world.transcript)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    codec = Codec.builtin()
    with MUTANTS[name]():
        first = RARE.get(name, 0)
        caught = any(play(seed, codec) is not None for seed in range(first, first + MUTANT_SEEDS_MAX))
    assert caught, f"{MUTANT_SEEDS_MAX} seeds did not notice the mutant {name}"
