"""What the page for developers says about the commands that run tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_quick_runs_nothing_that_starts_daemons() -> None:
    """Also where a folder has the mark and no test of it."""
    (chosen,) = re.findall(r'-m "([^"]+)"', (ROOT / "Makefile").read_text())
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", chosen]
    where = ["tests/e2e/test_local.py", "tests/docs/test_readme.py"]
    done = subprocess.run([*argv, *where], cwd=ROOT, capture_output=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout.decode()
