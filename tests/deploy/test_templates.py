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

TEMPLATES = Path(str(files("deploy") / "templates"))
NAMES = ["image-classification", "llm-lora", "matrix-factorisation", "sparse-logistic-regression", "text"]


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
    with pytest.raises(ValueError, match="it can be cnn or lenet"):
        task.model({"arch": "resnet"})


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
    other = tmp_path / "weights.pt"
    torch.save({name: held for name, held in fresh.items() if ".lora_" not in name}, other)
    loaded = task.model({**config, "weights": str(other)}).state_dict()
    assert all(torch.equal(loaded[name], held) for name, held in fresh.items() if ".lora_" not in name)
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


def test_the_transformer_learns_and_is_made_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TEMPLATES / "text"))
    monkeypatch.delitem(sys.modules, "task", raising=False)
    spec = importlib.util.spec_from_file_location("text_transformer", TEMPLATES / "text" / "transformer.py")
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    text = tmp_path / "train.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    config = {"width": 32, "blocks": 2, "heads": 2, "length": 24, "lr": 0.003}
    task.model = lambda config: torch.nn.Sequential(*(make() for make in task.layers(config)))
    model, losses = train(task, task.dataset(str(text), "train", config), config, 60)
    assert losses[-1] < losses[0] / 2
    x = torch.randint(0, 90, (2, 24))
    changed = x.clone()
    changed[:, 12:] = 3
    torch.testing.assert_close(model(x)[:, :12], model(changed)[:, :12], msg="it sees what comes later")
    monkeypatch.delitem(sys.modules, "task", raising=False)


@pytest.mark.parametrize("file", ["pipeline.yaml", "job.yaml"])
def test_the_job_files_of_the_text_template_are_valid(file: str) -> None:
    assert load(TEMPLATES / "text" / file, []).spec.data.dataset == "letters"
