"""Secrets that a region holds for tasks: who gets them, and where they never are, over the real daemons."""

from __future__ import annotations

import contextlib
import tarfile
from pathlib import Path

import pytest
from support.running import Federation, Running, digits_sites, eventually, named, paths_under

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

VALUE = "s3cr3t-of-oslo-71f0"
READS = """
import os
from geofed import secret
token = secret("hub-token")
assert token == "s3cr3t-of-" + "oslo-71f0"
print("the token is", token, flush=True)
assert token not in str(dict(os.environ))
"""
FAILS = """
def loss(model, batch):
    raise ValueError("401 for token " + token)
"""


def _holders_of(folder: Path, value: str) -> list[str]:
    holders = []
    for path in paths_under(folder):
        # Of a running federation, which may delete a file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink() and value.encode() in path.read_bytes():
                holders.append(str(path.relative_to(folder)))
    return sorted(holders)


def test_a_region_gives_its_secret_to_the_jobs_that_name_it_and_to_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(VALUE + "\n")
    sites = digits_sites(tmp_path, ["bergen", "oslo"])
    sites[1].config["secrets"] = {"hub-token": {"file": str(tmp_path / "token")}}
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        task = named("reads a secret") + READS
        secrets = "task.secrets=[hub-token]"
        folder = running.job_folder(task=task)
        declined = federation.control_plane("submit", str(folder / "job.yaml"), "--set", secrets, check=False)
        assert declined.returncode == 9, declined.stderr
        assert declined.stderr.startswith("error[SECRET_MISSING]: region bergen holds no secret hub-token")
        only = (secrets, "regions.avoid=[bergen]", "train.end={steps: 4}", "train.evaluateEvery=0")
        without = running.wait_end(running.submit(*only[1:], task=task))
        assert "LookupError: this task has no secret 'hub-token'" in without["error"]["message"]
        job = running.submit(*only, task=task)
        assert running.wait_end(job)["state"] == "succeeded", running.describe(job)["error"]
        assert "the token is [secret hub-token]" in federation.control_plane("logs", job).stdout
        running.job_folder(task + FAILS)
        arguments = [part for setting in only for part in ("--set", setting)]
        failed = federation.control_plane("submit", str(folder / "job.yaml"), *arguments, check=False)
        assert "401 for token [secret hub-token] at" in failed.stderr
        federation.control_plane("support-bundle", str(tmp_path / "bundle.tar.gz"), job)
        with tarfile.open(tmp_path / "bundle.tar.gz") as bundle:
            files = {one.name: bundle.extractfile(one) for one in bundle if one.isfile()}
            assert files
            assert not [name for name, file in files.items() if file is None or VALUE.encode() in file.read()]
        # The platform's own copy, which only the agent's user can read.
        # A function that is being deleted may still have its own.
        eventually(lambda: len(_holders_of(tmp_path / "federation", VALUE)) == 1, "one copy is left", 20)
        (held,) = _holders_of(tmp_path / "federation", VALUE)
        copy = tmp_path / "federation" / held
        assert held.endswith("secrets/hub-token")
        assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o600, 0o700)
