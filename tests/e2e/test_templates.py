"""The templates that ship: each is written, gets its example data, and trains over regions to what its page states."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from ruamel.yaml import YAML
from support.offered import counted, offered
from support.running import TEMPLATES, Running, check_succeeded, eventually
from support.templates import load_template, make_data

from sync.codec import codecs
from tests.e2e.conftest import PAIR, REGIONS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FORMAT = {"kind": "text", "sequence": 64}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Where a template is copied to, away from its data."""
    return tmp_path / "written"


@contextmanager
def _with_data(
    running: Running, regions: tuple[str, ...], template: str, dataset: str, folder: Path
) -> Iterator[dict[str, Any]]:
    """The regions offer the example data of a template; its files by region."""
    made, _ = make_data(template, "--regions", ",".join(regions), "--out", str(folder / "shards"))
    stated = TEMPLATES / template / "dataset.yaml"
    form = YAML(typ="safe").load(stated.read_text()) if stated.exists() else {"format": FORMAT}
    held = {
        region: form | {"splits": {split: {"uri": part["path"]} for split, part in made[region].items()}}
        for region in regions
    }
    # An earlier test's offer ends within seconds.
    eventually(lambda: not any(counted(running, name, dataset) for name in regions), "no offer", 20)
    with offered(running, held, dataset):
        eventually(lambda: all(counted(running, name, dataset).get("train") for name in regions), "samples", 20)
        yield made


def _run(running: Running, file: Path, *settings: str) -> dict[str, Any]:
    arguments = [part for setting in settings for part in ("--set", setting)]
    submitted = running.federation.control_plane("submit", str(file), *arguments, "-o", "name").stdout.strip()
    ended = running.wait_end(submitted, 280)
    assert ended["state"] == "succeeded", ended.get("error") or ended
    return ended


def _agree(running: Running, folder: Path, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The commands of the template's page, of the training rows."""
    form = YAML(typ="safe").load((folder / "dataset.yaml").read_text())
    held = {
        region: form | {"splits": {split: {"uri": parts["train"]["path"]} for split in ("train", "test")}}
        for region, parts in made.items()
    }
    name, command = "customers-measured", ("submit", str(folder / "columns.yaml"), "--wait", "-o", "json")
    with offered(running, held, name):
        eventually(lambda: all(counted(running, region, name).get("train") for region in made), "samples", 20)
        told = running.federation.control_plane(*command, "--set", f"data.dataset={name}").stdout
    (folder.parent / "measured.json").write_text(told)
    monkeypatch.setattr(sys, "argv", ["columns.py", str(folder.parent / "measured.json")])
    exec(compile((folder / "columns.py").read_text(), folder / "columns.py", "exec"), {
        "__name__": "__main__", "__file__": str(folder / "columns.py"),
    })  # fmt: skip
    agreed: dict[str, Any] = json.loads((folder / "columns.json").read_text())
    return agreed


def _rows(made: dict[str, Any], split: str) -> list[dict[str, str]]:
    found = []
    for parts in made.values():
        with open(parts[split]["path"], newline="") as file:
            found += list(csv.DictReader(file))
    return found


def test_a_table_with_missing_values_and_categories(
    running_pair: Running, tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(TEMPLATES / "tabular", written)
    with _with_data(running_pair, PAIR, "tabular", "customers", tmp_path) as made:
        agreed = _agree(running_pair, written, made, monkeypatch)
        rows = _rows(made, "train")
        incomes = torch.tensor([float(row["income"]) for row in rows if row["income"]], dtype=torch.float64)
        assert agreed["numbers"]["income"]["mean"] == pytest.approx(float(incomes.mean()), rel=1e-5)
        assert agreed["numbers"]["income"]["deviation"] == pytest.approx(float(incomes.std(correction=0)), rel=1e-4)
        assert agreed["levels"] == {
            "contract": ["local-1", "local-2", "monthly", "yearly"],
            "device": ["desktop", "phone", "tablet"],
        }
        few = ("train.end.epochs=6", "advanced.wan.interval=10")
        found = {
            hidden: _run(running_pair, written / "job.yaml", f"task.config.hidden={hidden}", *few)["result"]["metrics"]
            for hidden in (0, 16)
        }
        rows = _rows(made, "test")
    part = sum(row["churned"] == "1" for row in rows) / len(rows)
    assert found[0]["accuracy"] > max(part, 1 - part), found
    assert found[16]["loss"] < found[0]["loss"] - 0.03, found


def _batch(rows: list[dict[str, str]]) -> dict[str, Any]:
    """As geofed reads these columns."""
    batch: dict[str, Any] = {name: [row[name] for row in rows] for name in ("contract", "device")}
    for name in ("age", "income", "visits", "churned"):
        batch[name] = torch.tensor([float(row[name] or "nan") for row in rows])
    return batch


def test_trees_are_those_that_one_process_grows_from_all_rows(
    running_pair: Running, tmp_path: Path, written: Path
) -> None:
    """A batch holds each region's shard three or four times, so that the average histogram is that of all rows."""
    shutil.copytree(TEMPLATES / "tabular", written)
    with _with_data(running_pair, PAIR, "tabular", "customers", tmp_path) as made:
        few = ("task.config.trees=3", "task.config.depth=2", "train.end.steps=10", "train.batch=2880")
        ended = _run(running_pair, written / "trees.yaml", *few)
    assert [part["samples"] for part in made[PAIR[0]].values()] == [720, 180]
    file = tmp_path / "trees.safetensors"
    running_pair.federation.control_plane("export", ended["id"], "--output-file", str(file))
    found = safetensors.torch.load_file(file)
    task = ModuleType("trees")
    task.__file__ = str(written / "trees_task.py")
    exec(compile(Path(task.__file__).read_text(), task.__file__, "exec"), task.__dict__)
    rows = _rows(made, "train")
    task.dataset(rows, "train", {})
    # The sums of all rows are twice the mean of those of two regions.
    model = task.model({"trees": 3, "depth": 2, "smoothing": 2 * 0.002})
    optimizer, batch = task.optimizer(model.parameters(), {}), _batch(rows)
    for _ in range(10):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert torch.equal(found["splits"].round(), model.splits.round())
    torch.testing.assert_close(found["leaves"], model.leaves.detach(), rtol=0, atol=1e-4)
    assert float(model.leaves.detach().abs().min()) > 0
    with torch.no_grad():
        expected = task.metrics(model.eval(), [_batch(_rows(made, "test"))])
    assert ended["result"]["metrics"] == pytest.approx(expected, abs=1e-3)


def test_evaluation_changes_nothing_and_tells_each_region(running_pair: Running, tmp_path: Path, written: Path) -> None:
    trained = running_pair.wait_end(running_pair.submit("train.end.epochs=2", "advanced.wan.interval=10"))
    check_succeeded(trained, 0.3)
    shutil.copytree(TEMPLATES / "federated-evaluation", written)
    ended = _run(running_pair, written / "job.yaml", f"train.initialModel.job={trained['id']}")
    assert ended["result"]["metrics"] == pytest.approx(trained["result"]["metrics"], abs=1e-6)
    regions = {e["region"] for e in running_pair.events(ended["id"]) if e["kind"] == "partition.evaluated"}
    assert regions == set(PAIR)
    models = []
    for job in (trained["id"], ended["id"]):
        file = tmp_path / f"{job}.safetensors"
        running_pair.federation.control_plane("export", job, "--output-file", str(file))
        models.append(safetensors.torch.load_file(file))
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], tensor) for name, tensor in models[1].items())


def test_a_resnet(running_pair: Running) -> None:
    ended = running_pair.wait_end(running_pair.submit("task.config.arch=resnet", "train.end.epochs=3"))
    check_succeeded(ended, 0.5)


def test_packed_text(running_pair: Running, tmp_path: Path, written: Path) -> None:
    """One and the same module trains in one function, and is cut into stages by the template for pipelines."""
    shutil.copytree(TEMPLATES / "text", written)
    with _with_data(running_pair, PAIR, "text", "documents", tmp_path):
        ended = _run(running_pair, written / "packed.yaml", "train.end.epochs=1", "task.config.width=32")
    assert ended["result"]["metrics"]["bits_per_byte"] < 4.5


UNHURRIED_LOSS = """
import time

_loss = loss


def loss(model, batch):
    time.sleep(0.02)
    return _loss(model, batch)
"""


def test_bytes_in_the_background_are_those_of_the_plan(running_pair: Running, tmp_path: Path, written: Path) -> None:
    """For money a plan sends few bytes, and room on the links lets no region send more while the job runs."""
    template = "matrix-factorisation"
    shutil.copytree(TEMPLATES / template, written)
    # Steps that take longer, so that updates are hidden behind them on a busy machine, too: there is always room.
    task = written / "task.py"
    task.write_text(f"{task.read_text()}\n{UNHURRIED_LOSS}")
    made, _ = make_data(template, "--regions", ",".join(PAIR), "--out", str(tmp_path / "shards"))
    held = {
        region: {
            "splits": {split: {"uri": part["path"], "samples": part["samples"]} for split, part in made[region].items()}
        }
        for region in PAIR
    }
    known = codecs()
    with offered(running_pair, held, "ratings"):
        eventually(lambda: all(counted(running_pair, name, "ratings").get("train") for name in PAIR), "samples", 20)
        for run in range(3):
            few = ("advanced.wan.exchange=background", "train.end.epochs=3")
            ended = _run(running_pair, written / "job.yaml", *few)
            result, plan = ended["result"], ended["plan"]
            assert plan["wan_settings"]["background"]
            assert plan["wan_settings"]["choose_codec"], "it is not fixed: the objective decides while the job runs"
            told, took = result["predicted"]["wan_bytes"], result["measured"]["wan_bytes"]
            print(plan["codec"], told, took, [link["codec"] for link in ended["links"]])
            assert len(ended["links"]) == 2
            for link in ended["links"]:
                assert known.index(link["codec"]) >= known.index(plan["codec"]), "no less lossy, so no more bytes"
            if run:
                assert plan["codec"] != "fp32", "egress is most of the money"
                assert told["low"] <= took <= told["high"]


@pytest.mark.soak
def test_a_pipeline_in_full(running_pair: Running, tmp_path: Path, written: Path) -> None:
    shutil.copytree(TEMPLATES / "pipeline", written)
    with _with_data(running_pair, PAIR, "pipeline", "documents", tmp_path):
        running_pair.federation.control_plane("profile", str(written / "job.yaml"), timeout=300)
        ended = _run(running_pair, written / "job.yaml")
    assert [len(part["pipeline"]["stages"]) for part in ended["plan"]["partitions"]] == [2, 2]
    print(ended["result"]["metrics"])
    assert ended["result"]["metrics"]["bits_per_byte"] < 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("template", "data", "dataset", "metric", "most"),
    [
        ("text", "text", "letters", "bits_per_character", 0.6),
        ("sparse-logistic-regression", "sparse-logistic-regression", "clicks", "loss", 0.6),
        ("matrix-factorisation", "matrix-factorisation", "ratings", "mse", 0.3),
        ("llm-lora", "text", "letters", "loss", 3.4),
    ],
)
def test_a_template_in_full(
    running: Running, tmp_path: Path, written: Path, template: str, data: str, dataset: str, metric: str, most: float
) -> None:
    """As its page says: with the example data that is made, whose samples the region files state."""
    shutil.copytree(TEMPLATES / template, written)
    made, _ = make_data(data, "--regions", ",".join(REGIONS), "--out", str(tmp_path / "shards"))
    held = {
        region: {"splits": {split: {"uri": part["path"], "samples": part["samples"]} for split, part in parts.items()}}
        for region, parts in made.items()
    }
    eventually(lambda: not any(counted(running, name, dataset) for name in REGIONS), "no offer", 20)
    with offered(running, held, dataset):
        eventually(lambda: all(counted(running, name, dataset).get("train") for name in REGIONS), "samples", 20)
        ended = _run(running, written / "job.yaml")
    print(template, ended["result"]["metrics"])
    assert ended["result"]["metrics"][metric] < most


@pytest.mark.soak
def test_a_table_in_full(running: Running, tmp_path: Path, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TEMPLATES / "tabular", written)
    with _with_data(running, REGIONS, "tabular", "customers", tmp_path) as made:
        _agree(running, written, made, monkeypatch)
        network = _run(running, written / "job.yaml")["result"]["metrics"]
        linear = _run(running, written / "job.yaml", "task.config.hidden=0")["result"]["metrics"]
        trees = _run(running, written / "trees.yaml")["result"]["metrics"]
    print(network, linear, trees)
    assert trees["loss"] < network["loss"] + 0.01
    assert network["accuracy"] > 0.69
    assert network["loss"] < linear["loss"] - 0.05


@pytest.mark.soak
def test_packed_text_in_full(running: Running, tmp_path: Path, written: Path) -> None:
    shutil.copytree(TEMPLATES / "text", written)
    with _with_data(running, REGIONS, "text", "documents", tmp_path):
        ended = _run(running, written / "packed.yaml")
    print(ended["result"]["metrics"])
    assert ended["result"]["metrics"]["bits_per_byte"] < 1


@pytest.mark.soak
def test_a_resnet_in_full(running: Running) -> None:
    ended = running.wait_end(running.submit("task.config.arch=resnet"), 280)
    print(ended["result"]["metrics"])
    check_succeeded(ended, 0.95)


def _windows(file: Path, length: int) -> dict[str, Any]:
    """A split of `llm-lora`."""
    return {"uri": str(file), "samples": (file.stat().st_size - 1) // length}


def test_what_an_adapter_has_learnt_goes_on_from_its_file_and_its_weights(
    running_pair: Running, tmp_path: Path, written: Path
) -> None:
    """Nothing is learnt in the later jobs, and their own seed makes other weights and adapters: the model that comes
    out is the one of the two files, bit for bit."""
    shutil.copytree(TEMPLATES / "llm-lora", written)
    config = {"length": 24, "width": 32, "blocks": 2, "heads": 2, "rank": 4, "alpha": 8, "train_a": True}
    torch.manual_seed(7)
    weights = {
        name: held
        for name, held in load_template("llm-lora").model(config).state_dict().items()
        if ".lora_" not in name
    }
    base, adapter, peft = tmp_path / "base.safetensors", tmp_path / "adapter.safetensors", tmp_path / "peft"
    safetensors.torch.save_file(weights, base)
    small = (*(f"task.config.{name}={json.dumps(value)}" for name, value in config.items()), "train.end={steps: 8}")
    small = (*small, "train.evaluateEvery=0", "train.workers=1", "advanced.wan.interval=4")
    still = (*small, "task.config.lr=0.0", "train.seed=2", f"train.initialModel.file={base}")
    made, _ = make_data("text", "--regions", ",".join(PAIR), "--out", str(tmp_path / "shards"))
    held = {
        region: {"splits": {split: _windows(Path(part["path"]), 24) for split, part in made[region].items()}}
        for region in PAIR
    }
    export = running_pair.federation.control_plane
    eventually(lambda: not any(counted(running_pair, name, "letters") for name in PAIR), "no offer", 20)
    with offered(running_pair, held, "letters"):
        eventually(lambda: all(counted(running_pair, name, "letters") for name in PAIR), "samples", 20)
        partial = "train.initialModel.partial=true"
        first = _run(running_pair, written / "job.yaml", *small, f"train.initialModel.file={base}", partial)
        export("export", first["id"], "--output-file", str(tmp_path / "first.safetensors"))
        export("export", first["id"], "--as", "trained", "--output-file", str(adapter))
        export("export", first["id"], "--as", "peft", "--output-file", str(peft))
        whole = safetensors.torch.load_file(tmp_path / "first.safetensors")
        assert adapter.stat().st_size < base.stat().st_size / 3
        assert all(torch.equal(whole[name], held) for name, held in weights.items())
        assert all(float(held.abs().max()) > 0 for name, held in whole.items() if ".lora_B" in name)
        for file in (adapter, peft / "adapter_model.safetensors"):
            second = _run(running_pair, written / "job.yaml", *still, f"train.initialModel.adapter.file={file}")
            out = tmp_path / f"{second['id']}.safetensors"
            export("export", second["id"], "--output-file", str(out))
            found = safetensors.torch.load_file(out)
            assert found.keys() == whole.keys()
            assert all(torch.equal(held, whole[name]) for name, held in found.items()), file
            assert second["initial_model"]["adapter_file"] == file.name
        # The model's rank is another one.
        wrong = (*still, f"train.initialModel.adapter.file={adapter}", "task.config.rank=2", partial)
        arguments = [part for setting in wrong for part in ("--set", setting)]
        refused = running_pair.wait_end(
            export("submit", str(written / "job.yaml"), *arguments, "-o", "name").stdout.strip()
        )
    assert refused["error"]["code"] == "MODEL_MISMATCH"
    assert (
        "lora_A.weight of the model to start from is F32 [4, 32], the task's F32 [2, 32]" in refused["error"]["message"]
    )
