"""Benchmarks are commands that start where only the product is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_benchmarks_of_gpus_say_that_there_is_none() -> None:
    run = subprocess.run([str(BENCH / "gpu.sh")], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (69, "")
    assert run.stderr.startswith("gpu.sh: PyTorch ")
    assert "sees no GPU here: " in run.stderr
    alone = subprocess.run(
        [sys.executable, str(BENCH / "large_models_gpu.py")], capture_output=True, text=True, check=False
    )
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "no GPU that PyTorch sees" in alone.stderr


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_benchmark_of_a_shared_gpu_runs_with_a_tiny_model() -> None:
    command = [sys.executable, str(BENCH / "large_models_gpu.py"), "--trial", "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "geofed " in run.stdout, run.stderr


def test_tests_on_gpus_are_counted() -> None:
    from bench.gpu_parts import counts_of

    assert counts_of("FAILED one\n2 failed, 31 passed, 1 skipped in 9.1s\n") == {
        "passed": 31, "failed": 2, "skipped": 1,
    }  # fmt: skip
    assert counts_of("no tests ran in 0.1s") == {"passed": 0, "failed": 0, "skipped": 0}
