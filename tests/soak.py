"""The whole suite again and again until a time is over: with large budgets, and with another seed in every round.

`make soak` runs it; `python tests/soak.py --help` lists its options. Ends with status 1 where a test of any round
failed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time

_TEST_SECONDS = 3600
"""Of one test, unless it has a limit of its own: a property gets twenty times as many examples here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=8 * 3600.0, help="how long; what has begun is ended [28800]")
    parser.add_argument("--seed", type=int, help="of the first round, to see it again; by chance without it")
    parser.add_argument("tests", nargs="*", default=["tests"], help="folders, files or tests [tests]")
    chosen = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 30) if chosen.seed is None else chosen.seed
    until = time.time() + chosen.seconds
    failed = []
    seed = first
    while time.time() < until:
        print(f"soak: round {seed - first + 1}, seed {seed}", flush=True)
        environment = {**os.environ, "GEOFED_TEST_SEED": str(seed), "GEOFED_TEST_UNTIL": str(until)}
        options = ["-n", "2", "--hypothesis-profile=soak", f"--hypothesis-seed={seed}", f"--timeout={_TEST_SECONDS}"]
        status = subprocess.run([sys.executable, "-m", "pytest", *options, *chosen.tests], env=environment).returncode
        if status:
            failed.append(seed)
        if status in (2, 4):
            # Stopped by a person, or used wrongly.
            break
        seed += 1
    rounds = f"{seed - first} rounds"
    print(f"soak: {rounds}, failed with the seeds {failed}" if failed else f"soak: {rounds} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
