"""What a job has trained, without the rest."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from control_plane.cli.commands.export._adapter import write_peft, write_trained
from geofed_pb.errors import GeofedError

RNG = np.random.default_rng(0)
WHOLE = {
    "base.q.weight": RNG.normal(size=(4, 6)).astype(np.float32),
    "q.lora_A.weight": RNG.normal(size=(2, 6)).astype(np.float32),
    "q.lora_B.weight": RNG.normal(size=(4, 2)).astype(np.float16),
}


def whole(folder: Path, **more: np.ndarray) -> Path:  # type: ignore[type-arg]
    path = folder / "whole"
    save_file({**WHOLE, **more}, path, metadata={"job": "j", "base": json.dumps(["base.q.weight"])})
    return path


def test_what_was_trained_is_written_alone(tmp_path: Path) -> None:
    told = write_trained(whole(tmp_path), tmp_path / "trained")
    found = load_file(tmp_path / "trained")
    assert found.keys() == {"q.lora_A.weight", "q.lora_B.weight"}
    assert all(np.array_equal(found[name], WHOLE[name]) and found[name].dtype == WHOLE[name].dtype for name in found)
    assert told["bytes"] == (tmp_path / "trained").stat().st_size


def test_an_adapter_is_written_as_peft_reads_it(tmp_path: Path) -> None:
    write_peft(whole(tmp_path), tmp_path / "adapter", {"alpha": 16})
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name: array.shape for name, array in found.items()} == {
        "base_model.model.q.lora_A.weight": (2, 6), "base_model.model.q.lora_B.weight": (4, 2)
    }  # fmt: skip
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 16, ["q"])


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("head.weight", (2, 2), r"head\.weight was trained, and is no matrix of a LoRA adapter"),
        ("v.lora_A.weight", (2, 6), "v has no pair of lora_A"),
        ("v.lora_B.weight", (2,), r"v\.lora_B\.weight was trained"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path: Path, name: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(GeofedError, match=says) as raised:
        write_peft(whole(tmp_path, **{name: np.zeros(shape, np.float32)}), tmp_path / "adapter", {})
    assert raised.value.code == "MODEL_MISMATCH"
    assert not (tmp_path / "adapter").exists()
