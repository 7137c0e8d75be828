"""A model as other programs take it: a folder for a model hub, whose card tells how it came about, a state dict, and a
program."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from support.running import TEMPLATES, Running, check_succeeded

from control_plane.cli.commands.views._card import _loading, model_card

CLI_PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_folder_for_a_hub_loads_as_its_card_says(
    running_pair: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running_pair.submit("train.end.epochs=3", "task.env={KEY_OF_MINE: abc}", "task.config.my_token=abc-def")
    described = running_pair.wait_end(job)
    check_succeeded(described)
    folder, plain = tmp_path / "hub", tmp_path / "model.pt"
    export = ("export", job, "--yes", "--as")
    for _ in range(2):
        running_pair.federation.control_plane(*export, "hub", "--output-file", str(folder))
        running_pair.federation.control_plane(*export, "state-dict", "--output-file", str(plain))
    assert {file.name for file in folder.iterdir()} == {
        "README.md", "config.json", "model.safetensors", "model.safetensors.manifest.json",
    }  # fmt: skip
    card = (folder / "README.md").read_text()
    head = YAML(typ="safe").load(card.split("---\n")[1])
    assert (head["library_name"], "federated-learning" in head["tags"]) == ("pytorch", True)
    _check_card(card, described)
    published = json.loads((folder / "model.safetensors.manifest.json").read_text())
    assert "KEY_OF_MINE" not in json.dumps(published)
    assert "abc-def" not in "".join(file.read_text(errors="replace") for file in folder.iterdir())
    assert published["spec"]["task"]["module"] == "task.py"
    manifest = json.loads(Path(f"{plain}.manifest.json").read_text())
    assert "KEY_OF_MINE" in manifest["spec"]["task"]["env"]
    assert (manifest["format"], manifest["bytes"]) == ("state_dict", plain.stat().st_size)
    loaded = torch.load(plain, weights_only=True)
    tensors = load_file(folder / "model.safetensors")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    # As a reader of the card does, beside the task module.
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(TEMPLATES / "image-classification"))
    names: dict[str, Any] = {}
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    exec(code, names)
    assert names["trained"](torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    program, images = folder / "digits.pt2", torch.rand(3, 1, 8, 8)
    asked = ("--task", str(TEMPLATES / "image-classification"), "--input", "1x1x8x8", "--output-file", str(program))
    told = running_pair.federation.control_plane(*export, "torch-export", *asked, "-o", "json").stdout
    assert json.loads(told)["data"]["inputs"] == ["Nx1x8x8:float32"]
    torch.testing.assert_close(torch.export.load(program).module()(images), names["trained"](images))
    (code,) = re.findall(r"^```python\n(import torch\n.*?)^```$", CLI_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(code, names)
    assert names["outputs"].shape == (5, 10)


def test_a_card_of_a_job_in_one_region_that_runs_holds_odd_names() -> None:
    view: dict[str, Any] = {
        "id": "j-1", "name": "j", "state": "running", "finished_at": None, "usd": 0.5,
        "initial_model": {"file": "w`\n# x", "job": "", "digest": "sha256:1"},
        "result": None, "model": {"round": 2, "digest": "sha256:0", "bytes": 7, "metrics": {"a|b\nc": 0.5}},
        "spec": {"task": {"module": "sub/my-task.py"}, "data": {"dataset": "`x`\n# y", "residency": ["a", "b"]},
            "train": {"local": ["head.*"]}},
        "plan": {
            "partitions": [{"region": "a", "samples": 1000}], "residency": {}, "interval": 1, "wan_policy": "ma",
            "codec": "fp32", "topology": "mesh", "wan_settings": {"secure": 3.0},
        },
    }  # fmt: skip
    lines = model_card(view).splitlines()
    assert "Trained by geofed in a." in lines
    assert "- job: `j-1`, which is running" in lines
    assert "Dataset `'x' # y`; residency: a, b." in lines
    assert "| a\\|b c | 0.5 |" in lines
    assert not any(line.startswith("- between regions") for line in lines)
    assert "`sub/my-task.py` and what that imports" in model_card(view)
    assert any(line.startswith("- privacy: secure aggregation") for line in lines)
    assert not any(line.startswith("- time") for line in lines)
    assert 'task = import_module("sub.my-task")  # the task module that the model was trained with' in lines
    assert 'trained.load_state_dict(load_file("model.safetensors"), strict=False)' in lines
    assert (
        "The tensors of `train.local` stay in their regions: here they have the values that the task gives them."
        in lines
    )
    assert "- starts from: `w' # x`, `sha256:1`" in lines


def test_a_card_of_a_task_of_layers_loads_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"task": {"module": "my-task.py"}, "train": {"local": []}}
    (tmp_path / "my-task.py").write_text(
        "from torch import nn\ndef layers(config):\n    return [lambda: nn.Linear(2, config['size'])] * 2\n"
    )
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    save_file(layers.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"size": 2}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (code,) = re.findall(r"^```python\n(.*?)^```$", _loading(spec), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert torch.equal(names["trained"](torch.ones(2)), layers(torch.ones(2)))


def _check_card(card: str, described: dict[str, Any]) -> None:
    result, lines = described["result"], card.splitlines()
    for part in described["plan"]["partitions"]:
        stays = f"stays in {part['region']} (rule: region)"
        assert f"| {part['region']} | {part['samples']:,} | {stays} |" in lines
    for name, value in result["metrics"].items():
        assert f"| {name} | {value:.6g} |" in lines
    assert f"- rounds of the job: {result['rounds']}, each of {described['plan']['interval']} local steps" in lines
    assert described["models"][-1]["digest"] in card
    assert "- cost: $" in card
