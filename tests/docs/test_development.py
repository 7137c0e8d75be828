"""What the page for developers says about the commands that run tests, and about tests that are skipped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.skips import TOLERATED, fail_in_ci

ROOT = Path(__file__).parents[2]


def test_quick_runs_nothing_that_starts_daemons() -> None:
    """Also where a folder has the mark and no test of it."""
    (chosen,) = re.findall(r'-m "([^"]+)"', (ROOT / "Makefile").read_text())
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", chosen]
    where = ["tests/e2e/test_local.py", "tests/docs/test_readme.py"]
    done = subprocess.run([*argv, *where], cwd=ROOT, capture_output=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout.decode()


@pytest.mark.parametrize(
    ("reason", "ci", "outcome"),
    [
        ("no Docker engine can start on this machine", "1", "failed"),
        ("a systemd of the tests' own needs root", "1", "failed"),
        ("could not import 'docker'", "1", "failed"),
        ("no Docker engine can start on this machine", "", "skipped"),
        ("this gateway has no authentication", "1", "skipped"),
        ("this clone is shallow, and the earlier release is not in it", "1", "skipped"),
    ],
)
def test_in_ci_a_skip_needs_a_reason_that_is_listed(
    monkeypatch: pytest.MonkeyPatch, reason: str, ci: str, outcome: str
) -> None:
    monkeypatch.setenv("CI", ci)
    told = ("test_it.py", 1, f"Skipped: {reason}")
    test = pytest.TestReport("test_it.py::test_it", told, {}, "skipped", told, "setup")
    module = pytest.CollectReport("test_it.py", "skipped", told, [])
    for report in (test, module):
        fail_in_ci(report)
        assert report.outcome == outcome
        assert reason in str(report.longrepr)


def test_every_reason_that_is_listed_is_given_somewhere() -> None:
    sources = [file.read_text() for file in (ROOT / "tests").rglob("*.py") if file.name != "skips.py"]
    mine = Path(__file__).read_text()
    assert [reason for reason in TOLERATED if not any(reason in text for text in sources if text != mine)] == []
