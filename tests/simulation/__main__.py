"""Play more seeds than the tests do: `python -m tests.simulation --seeds 100000`; or one mutant, or one seed again."""

from __future__ import annotations

import argparse
import time

from schemas.codec import Codec
from tests.simulation.mutants import MUTANTS
from tests.simulation.quiet import be_quiet
from tests.simulation.simulation import play


def main() -> int:
    """0: no invariant was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="switch one rule off: a violation is expected")
    options = parser.parse_args()
    be_quiet()
    codec, began = Codec.builtin(), time.monotonic()
    for seed in range(options.seed, options.seed + options.seeds):
        if options.mutant:
            with MUTANTS[options.mutant]():
                failure = play(seed, codec)
        else:
            failure = play(seed, codec)
        if failure:
            print(failure)  # noqa: T201
            return 1
        if seed % 100 == 99:
            print(f"seeds to {seed}: no violation, {time.monotonic() - began:.0f} s", flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
