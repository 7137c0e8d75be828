"""`import geofed`: the client against a federation, the examples of its page, and the notebook."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.running import TEMPLATES, UNHURRIED, Running, WarmFederation

import geofed
from deploy.emulator import Emulator

pytestmark = [pytest.mark.e2e, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)


NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "examples").glob("*.ipynb"))}


def _cells(notebook: str) -> list[str]:
    """Code of a notebook; what needs pandas only where that is installed."""
    cells = json.loads(NOTEBOOKS[notebook].read_text())["cells"]
    left_out = set() if importlib.util.find_spec("pandas") else {"pandas"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in code if not left_out & set(cell["metadata"].get("tags", ()))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the job of the image template."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TEMPLATES / "image-classification", tmp_path / "my-job")
    return tmp_path


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations whose daemons are forked; those of the notebook are executed, as a user's."""
    monkeypatch.setattr("geofed._simulate.LocalFederation", WarmFederation)


def _run(notebook: str) -> dict[str, Any]:
    """Run a notebook in a running event loop, where notebooks run their cells; return its variables."""
    names: dict[str, Any] = {}

    async def run() -> None:
        for cell in _cells(notebook):
            exec(compile(ast.parse(cell), "cell", "exec"), names)

    asyncio.run(run())
    return names


def test_the_notebook_of_a_simulation_runs(folder: Path) -> None:
    names = _run("simulate")
    assert names["accuracy"] > 0.9
    rows = names["training"].rounds()
    assert {row["region"] for row in rows} == {"region-1", "region-2", "region-3"}
    assert min(names["training"].result["applied_updates"].values()) > 0, "updates crossed between the regions"
    assert sum(row.get("loss", 0) > 0 for row in rows) >= 3, "each region has reported"


def test_the_client_of_the_page_plans_submits_and_reads(
    running_pair: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEOFED_CONTEXT", str(running_pair.federation.context_file))
    file = folder / "my-job" / "job.yaml"
    file.write_text(file.read_text().replace("epochs: 15", "epochs: 5"))
    _, _, _, block, _, of_async = BLOCKS
    names: dict[str, Any] = {}
    exec(block, names)
    described = running_pair.describe(names["job"].id)
    assert described["state"] == "succeeded"
    result, later = names["result"], described["result"]
    # The servers' last moments are charged once they have stopped.
    assert 0 < result["usd"] <= later["usd"] < 2 * result["usd"]
    charged = {"money", "usd", "measured", "regions"}
    assert {key: later[key] for key in later.keys() - charged} == {key: result[key] for key in result.keys() - charged}
    assert {part["region"] for part in described["partitions"]} == {p["region"] for p in names["plan"]["partitions"]}
    with geofed.Client() as client:
        job = client.job(names["job"].id)
        _check_reading(job, names["weights"])
        assert job.id in [each.id for each in client.jobs(ended=True)]
        assert {region["name"] for region in client.regions()} == {"shanghai", "virginia"}
        with pytest.raises(geofed.GeofedError, match="batches") as refused:
            client.submit("my-job/job.yaml", set={"train.batches": 1})
        assert refused.value.code == "SPEC_INVALID"
    exec(of_async, {})


def test_the_notebooks_of_jobs_and_of_a_sweep_run(
    running_pair: Running, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert NOTEBOOKS.keys() == {"client", "simulate", "sweep"}, "each notebook has a test"
    monkeypatch.setenv("GEOFED_CONTEXT", str(running_pair.federation.context_file))
    names = _run("client")
    assert names["result"]["metrics"]["accuracy"] > 0.3
    described = running_pair.describe(names["job"].id)
    assert (described["state"], described["name"]) == ("succeeded", "from-a-notebook")
    assert names["written"]["digest"] == described["result"]["model"]["digest"]
    assert "accuracy" in capsys.readouterr().out
    names = _run("sweep")
    values = {trial["parameters"]["task.config.lr"]: trial["value"] for trial in names["told"]["trials"]}
    assert values.keys() == {0.01, 0.1}
    assert running_pair.describe(names["best"].id)["spec"]["task"]["config"]["lr"] == max(
        values, key=values.__getitem__
    )
    assert "task.config.lr" in [row["key"] for row in names["compared"]["differing"]]
    if importlib.util.find_spec("pandas"):
        assert set(names["rounds"]["lr"]) == {"0.01", "0.1"}


def test_a_cancelled_job_of_the_page_is_continued(
    running_pair: Running, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GEOFED_CONTEXT", str(running_pair.federation.context_file))
    (folder / "my-job" / "task.py").write_text(UNHURRIED)
    names: dict[str, Any] = {"geofed": geofed}
    exec(BLOCKS[4], names)
    before, after = (running_pair.describe(names[one].id) for one in ("job", "again"))
    assert "JOB_CANCELLED" in capsys.readouterr().out
    assert (before["state"], before["name"]) == ("cancelled", "early")
    assert (after["state"], after["name"], after["initial_model"]["job"]) == ("succeeded", "late", before["id"])
    written = {file.name for file in (folder / "late-model").iterdir()}
    assert written >= {"README.md", "config.json", "model.safetensors"}
    with geofed.Client() as client:
        _check_changing(client, client.job(before["id"]), client.job("late"))


def _check_changing(client: geofed.Client, early: geofed.Job, late: geofed.Job) -> None:
    assert late.export("late.pt", as_="state-dict")["format"] == "state_dict"
    written = torch.load("late.pt")
    assert all(torch.equal(tensor, written[name]) for name, tensor in late.model().items())
    assert late.export("late.safetensors")["digest"] == late.view["models"][-1]["digest"]
    with pytest.raises(geofed.GeofedError, match=r"late\.safetensors would be overwritten") as refused:
        early.export("late.safetensors")
    assert (refused.value.code, refused.value.hint) == ("USAGE", "pass overwrite=True")
    assert early.export("late.safetensors", overwrite=True)["digest"] == early.view["models"][-1]["digest"]
    keys = [row["key"] for row in client.compare(early, late.id)["differing"]]
    assert "train.initialModel.job" in keys
    assert late.logs(since="1h") == late.logs()
    assert late.logs(since="2100-01-01T00:00:00Z") == []
    for wrong, says in (({"since": "soon"}, "neither a duration"), ({"since": "2026-11-27"}, "no time zone")):
        with pytest.raises(geofed.GeofedError, match=says):
            late.logs(**wrong)
    for refused_call, code in (
        (lambda: late.share("nobody"), "USER_NOT_FOUND"),
        (lambda: late.scale({"shanghai": 1}), "ILLEGAL_STATE"),
        (lambda: late.replan("why not"), "ILLEGAL_STATE"),
        (lambda: client.compare(late), "USAGE"),
        (lambda: late.export("x", as_="pickle"), "USAGE"),
    ):
        with pytest.raises(geofed.GeofedError) as told:
            refused_call()
        assert told.value.code == code
    assert late.unshare("nobody")["shared_with"] == []
    started = client.plan("my-job/job.yaml", start=late)["initial_model"]
    assert (started["job"], client.plan("my-job/job.yaml", start="late.safetensors")["initial_model"]["file"]) == (
        late.id, "late.safetensors",
    )  # fmt: skip
    assert early.delete()["id"] == early.id
    with pytest.raises(geofed.GeofedError) as told:
        early.rename("gone")
    assert told.value.code == "JOB_NOT_FOUND"


def test_both_clients_have_the_same_methods() -> None:
    """But for how each is connected, and how a job is looked at again: `view` of the other asks at each time."""

    def methods(of: type) -> dict[str, list[str]]:
        found = {name: value for name, value in vars(of).items() if not name.startswith("_") and callable(value)}
        return {name: list(inspect.signature(value).parameters) for name, value in found.items()}

    one, other = methods(geofed.AsyncClient), methods(geofed.Client)
    assert other.pop("close") == ["self"]
    assert one == other
    one, other = methods(geofed.AsyncJob), methods(geofed.Job)
    assert one.pop("refresh") == ["self"]
    assert one == other


def _check_reading(job: geofed.Job, weights: dict[str, torch.Tensor]) -> None:
    rows, described = job.rounds(), job.view
    assert 2 <= len(rows) <= sum(part["round"] for part in described["partitions"])
    evaluated = [row for row in rows if "accuracy" in row]
    assert evaluated
    assert all(row["test_loss"] > 0 for row in evaluated)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in job.model().items())
    assert "job.succeeded" in [event["kind"] for event in job.events()]
    with pytest.raises(geofed.GeofedError) as missing:
        job.model(10_000)
    assert missing.value.code == "MODEL_NOT_FOUND"
    if importlib.util.find_spec("pandas"):
        assert list(job.metrics()["round"]) == [row["round"] for row in rows]
    else:
        with pytest.raises(geofed.GeofedError, match="needs pandas"):
            job.metrics()


@pytest.mark.usefixtures("_warm")
def test_the_training_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    assert names["training"].result["metrics"]["accuracy"] > 0.7
    assert "'accuracy': 0." in capsys.readouterr().out
    assert names["weights"]["0.weight"].shape == (8, 1, 3, 3)


@pytest.mark.skipif(bool(Emulator.supported()), reason=f"no emulator: {Emulator.supported()}")
@pytest.mark.usefixtures("_warm")
def test_the_training_over_an_emulated_wan_of_the_page_runs(folder: Path) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[0].split("training = ")[0] + BLOCKS[1], names)
    training = names["training"]
    assert training.emulator in ("netem", "hold")
    assert {row["region"] for row in training.rounds()} == {"lyon", "osaka"}
    assert min(training.result["applied_updates"].values()) > 0, "updates crossed between the regions"
    # In each round the updates take half of the round trip of 500 ms, and nobody continues without them.
    assert training.result["rounds"] >= 4
    assert training.result["training_seconds"] > 0.25 * training.result["rounds"]
    assert training.model()["0.weight"].shape == (8, 1, 3, 3)


def test_the_clients_of_the_page_train_in_this_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    source = BLOCKS[0].split("training = ")[0]
    exec(source + BLOCKS[2], names)
    assert names["training"].plan == {"clients": 500, "clients_per_round": 50, "rounds": 60}
    assert names["training"].result["metrics"]["accuracy"] > 0.7, names["training"].rounds()[-1]
    assert "50.0" in capsys.readouterr().out
