"""Packages that a task requires, installed by the regions, over the real daemons."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.running import Federation, Running, digits_sites, named
from support.wheels import wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

USES = """
import os
import sys
import greeting
import numpy
import torch
assert greeting.__file__.startswith(next(path for path in sys.path if "/environments/" in path))
assert sys.path.index(next(path for path in sys.path if "site-packages" in path)) < sys.path.index(
    next(path for path in sys.path if "/environments/" in path)
)
print(greeting.text(), "from", "a sandbox" if os.environ["HOME"] == "/home/function" else "no sandbox", flush=True)
"""


def test_a_region_installs_what_a_task_requires_once_and_says_what_it_cannot(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheel(wheels, "greeting", "1.2", "import words\n\ndef text(): return words.HELLO\n", "words>=1", "numpy", "torch")
    wheel(wheels, "words", "1.0", "HELLO = 'hello from a wheel'\n")
    sites = digits_sites(tmp_path, ["bergen", "oslo"])
    sites[1].config["taskPackages"] = {"wheels": str(wheels)}
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        folder = running.job_folder(named("has requirements") + USES)
        requires = "task.requirements=requirements.txt"
        only = (requires, "regions.avoid=[bergen]", "train.end={steps: 4}", "train.evaluateEvery=0")

        def refusal(wanted: str, *settings: str, command: str = "submit") -> str:
            (folder / "requirements.txt").write_text(wanted)
            arguments = [part for setting in settings for part in ("--set", setting)]
            done = federation.control_plane(command, str(folder / "job.yaml"), *arguments, check=False)
            return f"{done.returncode} {done.stderr}"

        sandboxed = "job code is not isolated" not in federation.log("agent-oslo")
        good = "# what it needs\nGreeting>=1  # and words\n"
        declined = refusal(good, requires)
        assert declined.startswith("9 error[PACKAGES_UNAVAILABLE]: region bergen installs no packages"), declined
        odd = refusal("greeting\n-r more.txt\n", *only, command="validate")
        assert odd.startswith("3 error[TASK_INVALID]: requirements.txt:2: '-r more.txt' names no package"), odd
        (folder / "requirements.txt").write_text(good)
        for _ in range(2):
            job = running.submit(*only)
            described = running.wait_end(job)
            assert described["state"] == "succeeded", described["error"]
            place = "from a sandbox" if sandboxed else "from no sandbox"
            assert f"hello from a wheel {place}" in federation.control_plane("logs", job).stdout
        environments = federation.region_state("oslo") / "state" / "environments"
        (installed,) = [path for path in environments.iterdir() if not path.name.startswith(".")]
        modules = {path.name for path in (installed / "site").glob("*.py")}
        assert modules == {"greeting.py", "words.py"}, "what the workers have is not installed again"
        assert federation.log("agent-oslo").count("packages installed") == 1
        for wanted, told in (
            ("torch==1.0", "the task requires torch==1.0, but the workers of region oslo have "),
            ("nothing-of-this-name", "region oslo: there is no wheel of nothing-of-this-name for Python 3."),
        ):
            (folder / "requirements.txt").write_text(wanted)
            error = running.wait_end(running.submit(*only))["error"]
            assert error["code"] == "PACKAGES_UNAVAILABLE"
            assert told in error["message"]
