"""Models of evaluated rounds, as a user meets them: exported of a running and of a cancelled job, and resumed from."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from tests.control_plane.cli.conftest import KEEP, Federation, Run
from tests.control_plane.cli.scripted_agents import kept_model

pytestmark = pytest.mark.processes


def submitted(run: Run, job_file: str) -> str:
    """A job of which two rounds are kept, and that continues."""
    job = run("submit", job_file, "-o", "name", *KEEP).out.strip()
    deadline = time.monotonic() + 20
    while len(run("status", job, "-o", "json").data["models"]) < 2:
        assert time.monotonic() < deadline
    return job


def test_a_model_is_exported_of_a_job_that_runs_and_of_one_that_was_cancelled(
    live: Federation, run: Run, job_file: str, tmp_path: Path
) -> None:
    job = submitted(run, job_file)
    file = str(tmp_path / "m")
    for cancelled in (False, True):
        if cancelled:
            assert run("cancel", job, "--yes").status == 0
            assert run("wait", job).status == 1
        for option, round_ in (((), 2), (("--round", "best"), 1), (("--round", "1"), 1), (("--round", "2"), 2)):
            told = run("export", job, "--output-file", file, "--yes", "-o", "json", *option).data
            assert (told["round"], Path(file).read_bytes()) == (round_, kept_model(job, round_)), option
            manifest = json.loads(Path(told["manifest"]).read_text())
            assert manifest["metrics"] == {"accuracy": pytest.approx(0.9 if round_ == 1 else 0.8)}
            assert manifest["state"] == ("cancelled" if cancelled else "running")
        missing = run("export", job, "--round", "7", "-o", "json")
        assert (missing.status, missing.error["code"]) == (4, "MODEL_NOT_FOUND")
        hint = "kept: round 1 (accuracy 0.9000), the best; round 2 (accuracy 0.8000)"
        assert (missing.error["message"], missing.error["hint"]) == (f"job {job}: round 7 is not kept", hint)
        assert run("export", job, "--round", "last").status == 2
        assert "round 1 (accuracy 0.9000), the best; round 2 (accuracy 0.8000)" in run("status", job).out


def test_a_job_is_resumed_and_another_starts_from_it(live: Federation, run: Run, job_file: str) -> None:
    job = submitted(run, job_file)
    going = run("resume", job, "-o", "json")
    assert (going.status, going.error["code"]) == (8, "ILLEGAL_STATE")
    run("cancel", job, "--yes")
    run("wait", job)
    after = run("resume", job, "--request-id", f"after-{job}", "-o", "json").data
    assert (after["initial_model"]["job"], after["initial_model"]["round"], after["created"]) == (job, 2, True)
    again = run("resume", job, "--request-id", f"after-{job}", "-o", "json").data
    assert (again["id"], again["created"]) == (after["id"], False)
    assert run("describe", after["id"], "-o", "json").data["spec"]["train"]["end"]["steps"] == 4
    assert f"the model of {job}, round 2" in run("status", after["id"]).out
    other = run("submit", job_file, "--from", job, "-o", "json", "--set", "train.initialModel.round=best").data
    assert (other["initial_model"]["job"], other["initial_model"]["round"]) == (job, 1)
    for one in (after["id"], other["id"]):
        run("cancel", one, "--yes")


def test_a_job_starts_from_a_file(live: Federation, run: Run, job_file: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    content = save({"w": np.zeros(3, ml_dtypes.bfloat16)})
    path.write_bytes(content)
    asked = ("--set", "task.config.play=hold", "--set", "train.initialModel.partial=true", "-o", "json")
    for uploads in (True, False):
        told = run("submit", job_file, "--from", str(path), *asked)
        assert ("uploading" in told.err) is uploads
        job = told.data["id"]
        run("cancel", job, "--yes")
        initial = {"job": "", "round": None, "file": path.name, "partial": True, "bytes": len(content), "uri": ""}
        initial |= {"adapter": "", "adapter_bytes": 0, "adapter_file": ""}
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert run("describe", job, "-o", "json").data["initial_model"] == initial | {"digest": digest}
        assert "the file weights.safetensors (" in run("status", job).out
    adapter = path.with_name("adapter.safetensors")
    adapter.write_bytes(save({"w": np.zeros(2, np.float32)}))
    adapted = (*asked, "--set", f"train.initialModel.adapter.file={adapter}")
    told = run("submit", job_file, "--from", str(path), *adapted)
    assert "of adapter.safetensors" in told.err
    run("cancel", told.data["id"], "--yes")
    assert "with the adapter adapter.safetensors (" in run("status", told.data["id"]).out
    path.write_bytes(content[:-1])
    for command in ("validate", "explain"):
        wrong = run(command, job_file, "--set", f"train.initialModel.file={path}", "-o", "json")
        assert (wrong.status, wrong.error["code"]) == (3, "SPEC_INVALID")
        assert f"{path} is no file of safetensors: it has" in wrong.error["message"]
    path.unlink()
    # What is no file is a job.
    assert run("submit", job_file, "--from", str(path), "-o", "json").error["code"] == "JOB_NOT_FOUND"


def test_a_job_without_a_kept_model_is_told_how_to_have_one(live: Federation, run: Run, job_file: str) -> None:
    failed = run("submit", job_file, "--wait", "-o", "name", "--set", "task.config.play=fail").out.strip()
    told = run("resume", failed, "-o", "json")
    assert (told.status, told.error["code"]) == (4, "MODEL_NOT_FOUND")
    assert told.error["hint"] == "with `train.evaluateEvery` the control plane keeps models of evaluated rounds"


def test_files_that_no_export_has_written_are_asked_for(
    live: Federation, run: Run, job_file: str, tmp_path: Path
) -> None:
    job = submitted(run, job_file)
    folder = tmp_path / "hub"
    export = ("export", job, "--no-input", "-o", "json", "--output-file")
    hub = (*export, str(folder), "--as", "hub")
    folder.mkdir()
    for name in ("README.md", "config.json", "model.safetensors.manifest.json"):
        (folder / name).write_text("{}")
        told = run(*hub)
        assert (told.status, told.error["message"].split("?")[0]) == (2, f"Overwrite {folder / name}")
        assert [(file.name, file.read_text()) for file in folder.iterdir()] == [(name, "{}")]
        (folder / name).unlink()
    for _ in range(2):
        assert run(*hub).status == 0, "its own earlier export"
    peft = tmp_path / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text("mine")
    asked = run(*export, str(peft), "--as", "peft").error["message"]
    assert f"Overwrite {peft / 'adapter_config.json'}?" in asked
    run("cancel", job, "--yes")


def test_a_place_that_cannot_be_written_is_told_once(live: Federation, run: Run, job_file: str, tmp_path: Path) -> None:
    job = submitted(run, job_file)
    for part in ("whole", "trained", "state-dict"):
        for place, reason in ((tmp_path / "none" / "m", "No such file or directory"), (tmp_path, "Is a directory")):
            told = run("export", job, "--as", part, "--output-file", str(place), "-o", "json")
            assert (told.status, told.error["code"]) == (2, "USAGE"), part
            assert told.error["message"] == f"cannot write {place}: {reason}"
    (tmp_path / "file").touch()
    told = run("export", job, "--as", "hub", "--output-file", str(tmp_path / "file"), "-o", "json")
    assert told.error["message"] == f"cannot write {tmp_path / 'file'}: Not a directory"
    run("cancel", job, "--yes")
