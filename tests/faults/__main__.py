"""Run the fault harness for as long as one likes: python -m faults --seconds 600 --seed 7."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time

from faults.run import run
from faults.schedule import drawn


def main() -> int:
    """Run once, print what is wrong and one closing line; return 1 when something is."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="for how long faults befall the processes")
    parser.add_argument("--seed", type=int, default=None, help="repeats an earlier run; drawn and printed if not given")
    parser.add_argument("--nodes", type=int, default=3, help="of the replica set")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    _say(f"seed {seed}, {options.seconds:g} s of faults")
    begun = time.monotonic()
    verdict = asyncio.run(run(drawn(seed, options.seconds), nodes=options.nodes))
    for violation in verdict.violations:
        _say(f"VIOLATION {violation}")
    _say(f"seed {seed}: {verdict} in {time.monotonic() - begun:.0f} s")
    return bool(verdict.violations)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
