"""What `gpu.sh` runs once there is an environment: benchmarks and tests of GPUs. It prints JSON lines.

Each line has `part`. `machine`: its GPUs and versions. A benchmark's name: `bar` or `run` has a bar or a run of it.
`tests`: how many `passed`, `failed` and were `skipped`. Each part but the first has a last line with `seconds` and
`status`; if that is not 0, with the end of what it has `printed`. The exit status is 0 if all parts have ended with 0,
and 69 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = (
    "tests/region_agent/worker/ranks/test_ranks.py",
    "tests/region_agent/worker/ranks/test_sharding.py",
    "tests/sync/test_device.py",
)
"""The ranks' tests use NCCL where there are two GPUs or more."""
BENCHMARKS = (("large_models_gpu", 0.45), ("ranks", 0.2), ("sharding", 0.15))
"""With the share of the time that each may take at most; the tests have the rest."""
NO_GPU, FAILED, TIMED_OUT = 69, 1, 124
TAIL_CHARACTERS = 2000
END_SECONDS = 30.0
"""Time that a part has to end once it is interrupted."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="for everything (15)")
    parser.add_argument("--check", action="store_true", help="end once the GPUs are told")
    given = parser.parse_args()
    machine = _machine()
    if not machine["gpus"]:
        print(f"gpu.sh: PyTorch {machine['torch']} sees no GPU here: {machine['why']}", file=sys.stderr)
        return NO_GPU
    _tell(part="machine", **machine)
    if given.check:
        return 0
    ends, statuses = time.monotonic() + 60 * given.minutes, []
    for name, share in BENCHMARKS:
        statuses.append(_benchmark(name, 60 * given.minutes * share))
    statuses.append(_tests(max(30.0, ends - time.monotonic())))
    return FAILED if any(statuses) else 0


def _machine() -> dict[str, Any]:
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(number) for number in range(seen)]
    why = "" if seen else "it is built without CUDA" if torch.version.cuda is None else "no driver or no device"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()) if seen else None,
        "gpus": [{"name": one.name, "memory_bytes": one.total_memory} for one in properties],
        "why": why,
    }


def _benchmark(name: str, seconds: float) -> int:
    """Run one, quick, and tell its bars and runs; returns its status. A bar that is missed is no failure of this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        argv = [sys.executable, str(HERE / f"{name}.py"), "--quick", "--json", str(path)]
        told = _run(name, argv, seconds)
        report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for kind, key in (("bar", "bars"), ("run", "runs")):
        for one in report.get(key, []):
            _tell(part=name, **{kind: one})
    if report:
        told |= {"status": 0, "printed": ""}
    _tell(part=name, **told)
    return int(told["status"])


def _tests(seconds: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "pytest", "-q", "--basetemp", str(Path(folder) / "tests"), *TESTS]
        told = _run("tests", argv, seconds)
    _tell(part="tests", **counts_of(str(told["printed"])), **(told if told["status"] else {**told, "printed": ""}))
    return int(told["status"])


def counts_of(printed: str) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, by the last lines of pytest's output."""
    found = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|skipped)", printed)}
    return {name: found.get(name, 0) for name in ("passed", "failed", "skipped")}


def _run(name: str, argv: list[str], seconds: float) -> dict[str, Any]:
    """Run a command from the root; returns its status, the end of what it has printed, and how long it took."""
    print(f"{name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
    begun = time.monotonic()
    process = subprocess.Popen(
        argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        # Benchmarks end what they have started when they are interrupted.
        os.killpg(process.pid, signal.SIGINT)
        try:
            printed, _ = process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, _ = process.communicate()
        status = TIMED_OUT
    took = round(time.monotonic() - begun, 1)
    return {"status": status, "seconds": took, "printed": printed[-TAIL_CHARACTERS:]}


def _tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())
