"""A kill at a failpoint and a hostile message, drawn by a seed: the job ends as it must, and no run hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.budget import budget

from tests.faults.__main__ import play

_RUNS = 10
_SOAK_RUNS = 1_000
_SOAKING = budget(_RUNS) > _RUNS


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600 if _SOAKING else 300)
def test_a_job_outlives_a_kill_and_a_hostile_message(tmp_path: Path) -> None:
    """`make soak` plays other seeds in each round."""
    runs = _SOAK_RUNS if _SOAKING else _RUNS
    wrong = play(runs * int(os.environ.get("GEOFED_TEST_SEED", "0")), runs, tmp_path)
    assert not wrong, "\n".join(wrong)
