"""`geofed sweep`: trials as jobs, an interrupted sweep, a budget, and the page's files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.running import TEMPLATES, Running, eventually, named

import geofed

pytestmark = [pytest.mark.e2e, pytest.mark.processes, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
(FILE,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "sweeps.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def job(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the job of the image template, as short as it can be; commands run there."""
    monkeypatch.setenv("GEOFED_CONTEXT", str(running.federation.context_file))
    folder = tmp_path / "my-job"
    shutil.copytree(TEMPLATES / "image-classification", folder)
    (folder / "task.py").write_text(named(tmp_path.name))
    job = folder / "job.yaml"
    job.write_text(job.read_text().replace("epochs: 15", "epochs: 2"))
    monkeypatch.chdir(folder)
    return folder


def trials_of(running: Running, sweep: str) -> list[dict[str, Any]]:
    """The jobs of a sweep by what begins its ID, the newest first."""
    told = running.federation.control_plane("list", "--all", "-o", "json").stdout
    return [job for job in json.loads(told)["data"] if job["labels"].get("sweep", "").startswith(sweep)]


def sweep_file(folder: Path, **changes: Any) -> Path:
    file = {
        "apiVersion": "geofed/v1", "kind": "Sweep", "metadata": {"name": "rates"}, "job": "my-job/job.yaml",
        "parameters": {"task.config.lr": [0.05, 0.0, 0.2]}, **changes,
    }  # fmt: skip
    path = folder.parent / "sweep.yaml"
    path.write_text(json.dumps(file))
    return path


def command(*arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "geofed.cli", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_grid_finds_the_best_of_its_trials(running: Running, job: Path) -> None:
    path = sweep_file(job, metric="accuracy", mode="max")
    shown = command("sweep", str(path), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "3 trials, about $" in shown.stdout
    done = command("sweep", str(path), "--yes", "-o", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["data"]
    values = {row["parameters"]["task.config.lr"]: row["value"] for row in told["trials"]}
    assert set(values) == {0.05, 0.0, 0.2}
    best = told["best"]
    assert best["value"] == max(values.values()) > values[0.0]
    view = running.describe(best["job"])
    assert (view["labels"]["sweep"], view["labels"]["trial"]) == (told["sweep"], str(best["trial"]))
    assert view["spec"]["task"]["config"]["lr"] == best["parameters"]["task.config.lr"]
    # What regions report after the end of a job is in its account, and not in the sweep's.
    assert told["usd"] == pytest.approx(sum(running.describe(row["job"])["usd"] for row in told["trials"]), rel=0.2)
    assert done.stderr.count("trial ") == 3, "each trial is told when it has ended"

    again = command("sweep", str(path), "--yes")
    assert again.returncode == 0, again.stderr
    assert f"geofed export {best['job']}" in again.stdout, "no job runs twice"
    assert len(trials_of(running, told["sweep"])) == 3


def test_an_interrupted_sweep_continues(running: Running, job: Path) -> None:
    path = sweep_file(job, metadata={"name": "halves"}, search="random", trials=3, parallel=1, seed=4, parameters={
        "task.config.lr": {"min": 0.01, "max": 0.1, "scale": "log"}, "train.batch": [16, 32]})  # fmt: skip
    first = subprocess.Popen([sys.executable, "-m", "geofed.cli", "sweep", str(path), "--yes"])
    try:
        eventually(lambda: trials_of(running, "halves-"), "the first trial runs")
    finally:
        first.kill()
        first.wait()
    with geofed.Client() as client:
        told = client.sweep(path)
    assert [row["state"] for row in told["trials"]] == ["succeeded"] * 3
    assert [running.describe(row["job"])["name"] for row in told["trials"]] == ["halves-1", "halves-2", "halves-3"]
    assert len(trials_of(running, told["sweep"])) == 3


def test_a_search_with_optuna_continues_with_the_values_that_it_proposed(running: Running, job: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    path = sweep_file(job, metadata={"name": "learnt"}, search="optuna", trials=2, parameters={
        "train.end.epochs": [1, 2], "task.config.lr": {"min": 0.01, "max": 0.1, "scale": "log"}})  # fmt: skip
    with geofed.Client() as client:
        first, again = client.sweep(path), client.sweep(path)
    for row in first["trials"]:
        spec = running.describe(row["job"])["spec"]
        assert spec["task"]["config"]["lr"] == row["parameters"]["task.config.lr"]
        assert spec["train"]["end"]["epochs"] == row["parameters"]["train.end.epochs"]
    told = [(row["job"], row["parameters"], row["value"]) for row in first["trials"]]
    assert [(row["job"], row["parameters"], row["value"]) for row in again["trials"]] == told
    assert again["usd"] == pytest.approx(first["usd"], rel=0.2)


def test_a_budget_ends_a_sweep_before_it_is_exceeded(running: Running, job: Path) -> None:
    with geofed.Client() as client:
        high = client.plan(job / "job.yaml", set={"task.config.lr": 0.05})["estimate"]["usd"]["high"]
        budget = 1.5 * high
        told = client.sweep(sweep_file(job, budget=budget, parallel=2, metadata={"name": "cheap"}))
    assert 1 <= len(told["trials"]) <= 3
    trials = [running.describe(row["job"]) for row in told["trials"] if row["state"] != "declined"]
    beyond = [trial for trial in trials if trial["usd"] > trial["spec"]["objective"]["budget"]]
    # A trial may exceed its part by the round in which that is spent, as on a machine that stands still for seconds.
    assert told["usd"] <= budget or beyond
    for trial in beyond:
        ended = any(event["kind"] == "job.goal" for event in running.events(trial["id"]))
        assert ended or trial["result"]["rounds"] == trial["plan"]["rounds"]
    if len(told["trials"]) < 3:
        assert f"trial {len(told['trials']) + 1} may cost up to" in told["stopped"]
    for row in told["trials"]:
        # What is left of the budget may be too little for a plan.
        left = running.describe(row["job"])["spec"]["objective"]["budget"] if row["state"] != "declined" else budget
        assert 0 < left <= budget


def test_trials_that_cannot_run_are_told(running: Running, job: Path) -> None:
    with geofed.Client() as client:
        told = client.sweep(sweep_file(job, parameters={"train.end.epochs": [1, -1], "task.config.lr": [0.05]}))
        assert [row["state"] for row in told["trials"]] == ["succeeded", "declined"]
        assert told["trials"][1]["note"].startswith("SPEC_INVALID: ")
        with pytest.raises(geofed.GeofedError, match="no_such_key") as raised:
            client.sweep(sweep_file(job, parameters={"train.no_such_key": [1]}))
        assert raised.value.code == "SPEC_INVALID"
        told = client.sweep(sweep_file(job, parameters={"task.config.arch": ["a", "b", "c", "d", "e"]}, parallel=1))
        assert len(told["trials"]) == 3
        assert told["stopped"].startswith("the first 3 trials gave no loss: ")


def test_the_file_of_the_page_is_valid(job: Path) -> None:
    (job / "sweep.yaml").write_text(FILE)
    shown = command("sweep", "sweep.yaml", "--dry-run", "-o", "json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["data"]["trials"] == 20
