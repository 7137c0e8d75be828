"""A federation of the previous release becomes one of this version, one daemon after the other, while a job trains."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.previous import ROOT, previous_version, python_of
from support.running import TEMPLATES, Federation, Running, check_succeeded, digits_sites

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
LONG = ("train.end.epochs=400", "wan.interval=10", "train.evaluateEvery=0", "function.slice=3s")


class _Mixed(Federation):
    """A federation whose daemons in `previous` are of another version."""

    def __init__(self, *arguments: Any, python: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._python = python
        self.previous = {"control-plane", "east", "west"}

    def _popen(self, site: str, module: str, arguments: list[str], log_name: str) -> subprocess.Popen[bytes]:
        if log_name.removeprefix("agent-") not in self.previous:
            return super()._popen(site, module, arguments, log_name)
        # Python looks for modules in the working directory first, which is this checkout.
        argv = ["env", f"--chdir={self.folder}", str(self._python), "-c", f"from {module} import main; main()"]
        return self._logged(site, [*argv, *arguments], log_name)

    def submit(self, job_file: Path, *settings: str) -> str:
        """By the previous version's command: one that is newer than the control plane may send keys that it refuses."""
        options = [part for setting in settings for part in ("--set", setting)]
        program = (
            "-c",
            "from control_plane.cli.main import main; main()",
            "submit",
            str(job_file),
            *options,
            "-o",
            "name",
        )
        environment = {**os.environ, "GEOFED_CONTEXT": str(self.context_file)}
        argv = [str(self._python), *program]
        done = subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def restart(self, name: str) -> None:
        """As an operator does it, with the version that `previous` says."""
        self.processes[name].terminate()
        self.processes[name].wait(60)
        if name == "control-plane":
            self.start_control_plane()
        else:
            self.start_agent(name)


def test_daemons_are_upgraded_and_downgraded_one_by_one_while_a_job_trains(tmp_path: Path) -> None:
    python = python_of(previous_version(), tmp_path / "previous")
    where = "import control_plane, geofed_pb, region_agent, sync; print(control_plane.__file__, geofed_pb.__file__)"
    told = subprocess.run([python, "-c", where], cwd=tmp_path, capture_output=True, text=True)
    assert told.stdout.count(str(tmp_path)) == 2, told.stderr
    # The job, too, is one of that version.
    shipped = TEMPLATES.relative_to(ROOT) / "image-classification"
    shutil.copytree(tmp_path / "previous" / "source" / shipped, tmp_path / "job")
    sites = digits_sites(tmp_path, ("east", "west"))
    with _Mixed(tmp_path / "federation", sites, python=python) as federation:
        running = Running(federation, tmp_path)
        job = federation.submit(running.job_folder() / "job.yaml", *LONG)
        running.wait_round(job, 2)
        # One agent before the control plane, and back again; the other one after it, so that all are new in the end.
        for name in ("west", "control-plane", "west", "east", "west"):
            federation.previous ^= {name}
            federation.restart(name)
            _goes_on(running, job)
        assert not federation.previous
        federation.control_plane("finish", job)
        # It has made a few rounds only, whose updates are all counted: more than chance, which is 0.1.
        check_succeeded(running.wait_end(job), accuracy=0.15)


def _goes_on(running: Running, job: str) -> None:
    described = running.describe(job)
    assert described["state"] == "running", described
    made = {part["region"]: part["round"] for part in described["partitions"]}
    for region, rounds in made.items():
        running.wait_round(job, rounds + 2, region)
