"""Benchmarks are commands that start where only the product is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1] / "bench"
IMPORT_ALL = """
import importlib, pathlib, sys
sys.path[:0] = [sys.argv[1], str(pathlib.Path(sys.argv[1]).parent)]
sys.modules["pytest"] = sys.modules["hypothesis"] = None
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    importlib.import_module(path.stem)
"""


def test_every_benchmark_starts_without_the_packages_of_tests() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, str(BENCH)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
