"""No input makes a parser crash, hang, or take more memory than it declares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.budget import budget

from tests.fuzz.targets import ALL, ODD, TARGETS, parse

pytest.importorskip("atheris", reason="could not import atheris: it has wheels for Linux on x86-64 only")
_SOAK_RUNS = 1_000_000
_RUNS = 3_000
"""Inputs of a run of the suite, for all parsers together: they find what a change breaks at once."""
_SOAKING = budget(_RUNS) > _RUNS


@pytest.mark.parametrize("name", TARGETS)
def test_a_valid_input_is_parsed_and_an_odd_one_refused(name: str) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].parse(seed)
    for odd in ODD:
        parse(name, odd[: TARGETS[name].longest])


@pytest.mark.processes
@pytest.mark.parametrize("name", TARGETS if _SOAKING else [ALL])
def test_no_input_stops_a_parser(name: str, tmp_path: Path) -> None:
    runs = _SOAK_RUNS if _SOAKING else budget(_RUNS)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.fuzz", name, f"-runs={runs}", *([] if _SOAKING else ["-seed=1"])]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'proto'}:{root / 'tests'}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {runs} runs" in done.stderr
