"""The templates' task modules in plain PyTorch: they load their data, learn, and tell what is wrong with a shard."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.templates import make_data
from torch.utils.data import default_collate

from control_plane.spec import load
from sync.histograms import by_category

TEMPLATES = Path(str(files("deploy") / "templates"))
NAMES = [
    "federated-evaluation", "image-classification", "llm-lora", "matrix-factorisation", "pipeline",
    "sparse-logistic-regression", "tabular", "text",
]  # fmt: skip


def load_task(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"template_{name.replace('-', '_')}", TEMPLATES / name / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collated(data: Any, indices: Sequence[int]) -> Any:
    return default_collate(data.__getitems__(indices) if hasattr(data, "__getitems__") else [data[i] for i in indices])


def train(task: Any, data: Any, config: dict[str, Any], steps: int) -> tuple[Any, list[float]]:
    """What a worker does, in plain PyTorch."""
    torch.manual_seed(0)
    model = task.model(config)
    optimizer = task.optimizer(model.parameters(), config)
    order = np.random.default_rng(0)
    losses = []
    for _ in range(steps):
        batch = collated(data, order.integers(0, len(data), 32).tolist())
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval(), losses


@pytest.mark.parametrize("name", NAMES)
def test_task_modules_import_nothing_of_ours(name: str) -> None:
    tree = ast.parse((TEMPLATES / name / "task.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {"geofed_pb", "sync", "scheduler", "control_plane", "region_agent", "deploy"}
    assert not {module.split(".")[0] for module in imported} & ours


@pytest.mark.parametrize("name", NAMES)
def test_templates_hold_what_they_need(name: str) -> None:
    assert {"job.yaml", "task.py", "README.md"} <= {file.name for file in (TEMPLATES / name).iterdir()}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, out = np.random.default_rng(0), tmp_path_factory.mktemp("digits") / "train.npz"
    y = rng.integers(0, 10, 400)
    x = rng.integers(0, 60, (400, 8, 8), dtype=np.uint8)
    x[np.arange(400), y % 8, y // 2] = 255
    np.savez_compressed(out, x=x, y=y)
    return out


def test_the_cnn_learns(digits: Path) -> None:
    task = load_task("image-classification")
    config = {"width": 8, "lr": 0.1, "momentum": 0.9}
    data = task.dataset(str(digits), "train", config)
    _, first = data[3]
    x, y = collated(data, [3, 5])
    assert (tuple(x.shape), int(y[0])) == ((2, 1, 8, 8), int(first))
    assert float(x.max()) == 1.0
    model, losses = train(task, data, config, 100)
    assert losses[-1] < losses[0] / 3
    with torch.no_grad():
        batches = [collated(data, range(start, start + 100)) for start in (0, 100)]
        assert task.metrics(model, iter(batches))["accuracy"] > 0.9
        assert task.metrics(model, iter([])) == {}


def test_images_are_shifted_only_while_training() -> None:
    torch.manual_seed(0)
    shift = load_task("image-classification").model({"augment": True})[0]
    x = torch.arange(64.0).reshape(1, 1, 8, 8)
    assert any(not torch.equal(shift(x), x) for _ in range(10))
    assert torch.equal(shift.eval()(x), x)


def test_lenet_takes_28_by_28() -> None:
    task = load_task("image-classification")
    model = task.model({"arch": "lenet", "size": 28})
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 61_706
    with pytest.raises(ValueError, match="it can be cnn, resnet or lenet"):
        task.model({"arch": "resnet50"})


@pytest.mark.parametrize("size", [8, 28])
def test_the_resnet_learns_and_has_no_statistics_of_batches(digits: Path, size: int) -> None:
    task, config = load_task("image-classification"), {"arch": "resnet", "width": 8, "lr": 0.05, "size": size}
    assert task.model(config)(torch.zeros(2, 1, size, size)).shape == (2, 10)
    assert not list(task.model(config).buffers())
    if size == 8:
        assert sum(p.numel() for p in task.model(config).parameters()) == 19_714
        _, losses = train(task, task.dataset(str(digits), "train", config), config, 60)
        assert losses[-1] < losses[0] / 2


def test_what_templates_share_is_the_same() -> None:
    for one, other in (
        ("image-classification/task.py", "federated-evaluation/task.py"),
        ("text/transformer.py", "pipeline/task.py"),
        ("text/make_data.py", "pipeline/make_data.py"),
    ):
        assert (TEMPLATES / one).read_text() == (TEMPLATES / other).read_text(), (one, other)


def _tabular(module: str) -> ModuleType:
    found = ModuleType(module)
    found.__file__ = str(TEMPLATES / "tabular" / f"{module}.py")
    exec(compile(Path(found.__file__).read_text(), found.__file__, "exec"), found.__dict__)
    return found


def _customers() -> dict[str, Any]:
    nothing = float("nan")
    return {
        "age": torch.tensor([30.0, nothing, 50.0, 41.0]), "income": torch.tensor([nothing, nothing, 3e4, 5e4]),
        "visits": torch.tensor([1.0, 2.0, 3.0, 4.0]), "contract": ["monthly", "unheard of", "", "yearly"],
        "device": ["phone", "phone", "", "tablet"], "churned": torch.tensor([1, 0, 1, 0]),
    }  # fmt: skip


def test_missing_values_and_unknown_levels_have_inputs_of_their_own() -> None:
    task, batch = _tabular("task"), _customers()
    model = task.model({"hidden": 4})
    x = model[0](batch)
    assert x.shape == (4, 2 * 3 + 6 + 4)
    assert not x.isnan().any()
    assert x[:, :4].tolist()[1] == [0.0, 1.0, 0.0, 1.0]
    assert x[:, 6:12].argmax(1).tolist() == [3, 5, 5, 4]
    task.loss(model, batch).backward()
    with torch.no_grad():
        assert 0 <= task.metrics(model, [batch])["accuracy"] <= 1
    assert task.metrics(model, []) == {}


def test_trees_put_missing_values_and_unknown_levels_first_and_learn() -> None:
    task, batch = _tabular("trees_task"), _customers()
    assert task.dataset([0] * 4, "train", {}) == [0] * 4
    model = task.model({"trees": 2, "depth": 1, "bins": 8, "smoothing": 1e-6})
    rows = model.rows(batch)
    assert rows.shape == (4, 5)
    assert rows[1].tolist()[:2] == [0, 0]
    assert rows[:, 3].tolist() == [4, 0, 0, 5]
    assert int(rows.max()) < 8
    optimizer, losses = task.optimizer(model.parameters(), {}), []
    for _ in range(5):
        optimizer.zero_grad()
        found = task.loss(model, batch)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert losses[0] == pytest.approx(np.log(2))
    assert losses[-1] < losses[0] - 0.1
    with torch.no_grad():
        assert task.metrics(model.eval(), [batch])["loss"] == pytest.approx(losses[-1])


def test_what_columns_tell_gives_their_moments_and_levels() -> None:
    measure, columns = _tabular("columns_task"), _tabular("columns")
    measure.LEAST = 2
    told = measure.metrics(None, [_customers()])
    assert "tablet" not in told["device"], "too few have it"
    counted = by_category(told.pop("device").items())
    levels = {"device": {"categories": counted.categories, "counts": counted.counts}}
    agreed = columns.agreed(told, levels, "churned")
    assert agreed["levels"] == {"device": ["phone"]}
    assert agreed["numbers"]["income"] == {"mean": 40_000, "deviation": 10_000}
    assert agreed["numbers"]["visits"]["deviation"] == pytest.approx(1.25**0.5, rel=1e-5)
    with pytest.raises(SystemExit, match="no column left"):
        columns.agreed(told, levels, "left")
    small = {"present x": 1.0, "mean x": 1.25e-7, "square x": 2e-14, "present churned": 1.0}
    assert columns.agreed(small, {}, "churned")["numbers"]["x"] == {"mean": 1.25e-7, "deviation": 6.61438e-8}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"status": "error", "error": {"code": "TASK_FAILED", "message": "oops"}}', "has failed: TASK_FAILED: oops"),
        ('{"status": "ok", "data": {"result": null}}', "is not what `geofed submit columns"),
        ("", "is not what `geofed submit columns"),
    ],
)
def test_columns_are_not_made_of_a_job_that_has_failed(text: str, told: str) -> None:
    columns = _tabular("columns")
    with pytest.raises(SystemExit, match=told):
        columns.result_of(text)


def test_trees_need_a_bin_for_each_level() -> None:
    task = _tabular("trees_task")
    assert task.model({"bins": 6}).bins == 6
    with pytest.raises(ValueError, match="bins is 5; the columns need 6"):
        task.model({"bins": 5})


def test_a_table_of_the_users_is_partitioned_without_loss(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("x,y\n" + "".join(f"{number},{number % 2}\n" for number in range(100)))
    written, _ = make_data("tabular", "--regions", "a,b", "--out", str(tmp_path), "--table", str(table))
    files = [Path(part["path"]) for parts in written.values() for part in parts.values()]
    lines = [line for file in files for line in file.read_text().split()]
    assert lines.count("x,y") == 4
    assert sorted(line for line in lines if line != "x,y") == sorted(table.read_text().split()[1:])


def test_idx_folders_are_read_in_parts(tmp_path: Path) -> None:
    task = load_task("image-classification")
    for name, array in (("images-idx3", np.zeros((11, 8, 8))), ("labels-idx1", np.arange(11) % 10)):
        head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))
    whole = task.dataset(str(tmp_path), "train", {})
    part = task.dataset(str(tmp_path), "train", {"shard": [1, 3]})
    assert (len(whole), part.tensors[1].tolist()) == (11, [1, 4, 7, 0])
    with pytest.raises(ValueError, match=r"config\.shard"):
        task.dataset(str(tmp_path), "train", {"shard": [3, 3]})
    with pytest.raises(FileNotFoundError, match="t10k-images"):
        task.dataset(str(tmp_path), "test", {})


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((2, 8, 8), np.uint8)}, "must hold the arrays x and y, it holds x"),
        ({"x": np.zeros((2, 64), np.uint8), "y": np.zeros(2, np.int64)}, "x must be N x H x W"),
        ({"x": np.zeros((2, 8, 8)), "y": np.zeros(2, np.int64)}, "it is float64"),
        ({"x": np.zeros((2, 8, 8), np.uint8), "y": np.zeros(3, np.int64)}, "y must be 2 integers"),
        ({"x": np.zeros((2, 9, 9), np.uint8), "y": np.zeros(2, np.int64)}, "images are 9x9, config.size is 8"),
        ({"x": np.array([{}]), "y": np.zeros(1, np.int64)}, "is no .npz file"),
    ],
)
def test_what_is_wrong_with_a_shard_is_told_with_its_file(tmp_path: Path, arrays: Any, text: str) -> None:
    task = load_task("image-classification")
    np.savez(tmp_path / "shard.npz", **arrays)
    with pytest.raises(ValueError, match=r"shard\.npz") as failure:
        task.dataset(str(tmp_path / "shard.npz"), "train", {})
    assert text in str(failure.value)


def test_a_file_that_is_no_shard_is_refused(tmp_path: Path) -> None:
    task = load_task("image-classification")
    (tmp_path / "shard.npz").write_text("hello")
    with pytest.raises(ValueError, match=r"shard\.npz is no \.npz file"):
        task.dataset(str(tmp_path / "shard.npz"), "train", {})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        task.dataset(str(tmp_path / "nowhere"), "train", {})


def test_the_text_model_learns_the_made_up_text(tmp_path: Path) -> None:
    task, config = load_task("text"), {"length": 48, "width": 48, "lr": 0.01}
    argv = [sys.executable, str(TEMPLATES / "text" / "make_data.py"), "--regions", "a,b,c", "--out", str(tmp_path)]
    written = json.loads(subprocess.run(argv, capture_output=True, check=True, text=True).stdout)
    for region in "abc":
        for split, told in written[region].items():
            assert len(task.dataset(told["path"], split, config)) == told["samples"]
    assert len({written[region]["train"]["samples"] for region in "abc"}) == 3
    data = task.dataset(str(tmp_path / "a"), "train", config)  # a folder of files is a shard, too
    model, losses = train(task, data, config, 60)
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad():
        told = task.metrics(model, iter([default_collate(data.__getitems__(list(range(64))))]))
    assert told["accuracy"] > 0.2
    assert 0 < told["bits_per_character"] < 6


@pytest.mark.parametrize("train_a", [False, True])
def test_adapters_learn_and_the_rest_stays(tmp_path: Path, train_a: bool) -> None:
    task, text = load_task("llm-lora"), tmp_path / "train.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    config = {"width": 32, "blocks": 2, "heads": 2, "length": 24, "rank": 4, "lr": 0.01, "train_a": train_a}
    data = task.dataset(str(text), "train", config)
    torch.manual_seed(0)
    fresh = task.model(config).state_dict()
    model, losses = train(task, data, config, 40)
    assert losses[-1] < 0.8 * losses[0]
    changed = {name for name, held in model.state_dict().items() if not torch.equal(held, fresh[name])}
    assert changed == {n for n in fresh if "lora_B" in n or (train_a and "lora_A" in n)}
    x, y = collated(data, range(8))
    with torch.autocast("cpu", torch.bfloat16):
        assert 0 < float(task.loss(task.model(config), (x, y)).detach()) < 20


def test_no_template_replaces_the_data_of_another(tmp_path: Path) -> None:
    made = []
    for name in ("text", "sparse-logistic-regression", "matrix-factorisation"):
        written, _ = make_data(name, "--regions", "a,b", "--out", str(tmp_path))
        made += [part["path"] for parts in written.values() for part in parts.values()]
    assert len(set(made)) == 3 * 2 * 2
    assert {str(file) for file in tmp_path.glob("*/*")} == set(made)


def test_a_text_of_the_users_is_cut_without_loss(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {number}: ünïcode\n" for number in range(500)), encoding="utf-8")
    argv = [sys.executable, str(TEMPLATES / "text" / "make_data.py"), "--regions", "a,b"]
    subprocess.run([*argv, "--out", str(tmp_path), "--text", str(text)], capture_output=True, check=True)
    pieces = [(tmp_path / r / f"letters-{s}.txt").read_text(encoding="utf-8") for r in "ab" for s in ("train", "test")]
    assert "".join(pieces) == text.read_text(encoding="utf-8")


def test_texts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    task = load_task("text")
    (tmp_path / "short.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"short\.txt is shorter"):
        task.dataset(str(tmp_path / "short.txt"), "train", {})
    (tmp_path / "latin.txt").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        task.dataset(str(tmp_path / "latin.txt"), "train", {})


def test_the_transformer_learns_and_is_made_layer_by_layer(tmp_path: Path) -> None:
    task = load_task("pipeline")
    config = {"width": 32, "blocks": 2, "heads": 2, "length": 24, "lr": 0.003}
    model = torch.nn.Sequential(*(make() for make in task.layers(config)))
    text = b"the quick brown fox jumps over the lazy dog\n" * 40
    ids = torch.tensor(list(text[: 24 * 64])).reshape(64, 24)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, -4:] = -100
    optimizer, losses = task.optimizer(model.parameters(), config), []
    for _ in range(40):
        optimizer.zero_grad()
        found = task.loss(model, batch)
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert losses[-1] < losses[0] / 2
    with torch.no_grad():
        told = task.metrics(model, [batch])
    assert told["bits_per_byte"] == pytest.approx(losses[-1] / np.log(2), rel=0.2)
    assert told["accuracy"] > 0.3
    changed = ids.clone()
    changed[:, 12:] = 3
    torch.testing.assert_close(model(ids)[:, :12], model(changed)[:, :12], msg="it sees what comes later")


@pytest.mark.parametrize(
    ("file", "dataset"),
    [("text/job.yaml", "letters"), ("text/packed.yaml", "documents"), ("pipeline/job.yaml", "documents"),
     ("tabular/columns.yaml", "customers"), ("tabular/job.yaml", "customers"),
     ("tabular/trees.yaml", "customers")],
)  # fmt: skip
def test_further_job_files_are_valid(file: str, dataset: str) -> None:
    assert load(TEMPLATES / file, []).spec.data.dataset == dataset
