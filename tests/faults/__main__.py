"""Plays seeded runs: ``python -m tests.faults [--seed N] [--runs N]``. Prints how each has ended that has not ended as
it must, and then how many there were; its status is 1 if there was one."""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

from support.warm_servers import WarmServers

from tests.faults.control_planes import ControlPlaneRun, Known
from tests.faults.servers import ServerRun, Shared

_COMMAND = "PYTHONPATH=.:proto:tests .venv/bin/python -m tests.faults"
_CONTROL_PLANES = 4
"""Every so many runs are of a control plane."""


def play(first: int, runs: int, folder: Path, only: str = "") -> list[str]:
    """Play runs with successive seeds; returns what went wrong, with the command that shows it again."""
    wrong, ends, deaths, begun, longest = [], collections.Counter[str](), 0, time.monotonic(), 0.0
    with WarmServers() as warm, WarmServers("tests.faults.serving") as warm_control_planes:
        shared, known = Shared(folder, warm), Known(folder, warm_control_planes)
        for seed in range(first, first + runs):
            of_control_plane = only == "control-plane" or (not only and seed % _CONTROL_PLANES == 0)
            outcome = (ControlPlaneRun(known, seed) if of_control_plane else ServerRun(shared, seed)).play()
            deaths, longest = deaths + outcome.deaths, max(longest, outcome.seconds)
            ends[outcome.text.partition("]")[0].partition("[")[2] or "the same model"] += outcome.whole
            if not outcome.whole:
                again = f"{_COMMAND} --seed {seed}" + (f" --only {only}" if only else "")
                wrong.append(f"{outcome.text}\n  again: {again}")
                print(f"seed {seed}: {wrong[-1]}", flush=True)
    took = time.monotonic() - begun
    print(f"{runs} runs from seed {first} in {took:.0f} s, the longest {longest:.1f} s; {deaths} deaths")
    print(f"ended whole: {dict(ends)}; wrong: {len(wrong)}", flush=True)
    return wrong


def main() -> int:
    """Play what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first run [0]")
    parser.add_argument("--runs", type=int, default=1, help="with successive seeds [1]")
    parser.add_argument("--folder", type=Path, help="where what has gone wrong is kept; a new one without it")
    parser.add_argument("--only", choices=("servers", "control-plane"), default="", help="runs of one kind")
    chosen = parser.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="geofed-faults-"))
    return 1 if play(chosen.seed, chosen.runs, folder, chosen.only) else 0


if __name__ == "__main__":
    sys.exit(main())
