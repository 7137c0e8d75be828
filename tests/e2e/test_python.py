"""`import geofed`: the client against a federation, the examples of its page, and the notebook."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.running import TEMPLATES, Running

import geofed
from deploy.emulator import Emulator

pytestmark = [pytest.mark.e2e, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)


def _cells() -> list[str]:
    """Code of the notebook; what needs pandas only where that is installed."""
    cells = json.loads((ROOT / "examples" / "simulate.ipynb").read_text())["cells"]
    left_out = set() if importlib.util.find_spec("pandas") else {"pandas"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in code if not left_out & set(cell["metadata"].get("tags", ()))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the job of the image template."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TEMPLATES / "image-classification", tmp_path / "my-job")
    return tmp_path


def test_the_notebook_runs_as_in_a_running_event_loop(folder: Path) -> None:
    """Where notebooks run their cells."""
    names: dict[str, Any] = {}

    async def run() -> None:
        for cell in _cells():
            exec(compile(ast.parse(cell), "cell", "exec"), names)

    asyncio.run(run())
    assert names["accuracy"] > 0.9
    rows = names["training"].rounds()
    assert {row["region"] for row in rows} == {"region-1", "region-2", "region-3"}
    assert min(names["training"].result["applied_updates"].values()) > 0, "updates crossed between the regions"
    assert sum(row.get("loss", 0) > 0 for row in rows) >= 3, "each region has reported"


def test_the_client_of_the_page_plans_submits_and_reads(
    running_pair: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEOFED_CONTEXT", str(running_pair.federation.context_file))
    _, _, _, block, of_async = BLOCKS
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


def test_the_training_of_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[0], names)
    assert names["training"].result["metrics"]["accuracy"] > 0.7
    assert "'accuracy': 0." in capsys.readouterr().out
    assert names["weights"]["0.weight"].shape == (8, 1, 3, 3)


@pytest.mark.skipif(bool(Emulator.supported()), reason=f"no emulator: {Emulator.supported()}")
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
