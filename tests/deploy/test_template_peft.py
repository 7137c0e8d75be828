"""`llm-lora` with `transformers` and `peft`: it starts from a folder, and PEFT reads what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation
from support.jobs import worker_in_process

from control_plane.cli.commands.export._adapter import write_peft
from control_plane.spec import load
from deploy import templates
from region_agent.worker import loop

# Of peft, which uses what transformers deprecates. Both are imported by the tests: it takes 3 s of every process that
# collects this module.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TASK = (Path(str(templates.__path__[0])) / "llm-lora" / "peft_task.py").read_text()
TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
SMALL = {"width": 16, "blocks": 2, "heads": 2, "length": 24, "rank": 4, "alpha": 8, "lr": 0.02}
STEPS, ROUNDS = 4, 3


def _folder(place: Path) -> Path:
    """A model as its maker has stored it."""
    import transformers

    torch.manual_seed(9)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


def _trained(folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> Path:
    """Train in two regions; returns the file of the job's model."""
    federation = Federation(folder, ("east", "west"), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    task = TASK.replace("path, length = Path(uri),", f"path, length = Path({str(folder / 'text.txt')!r}),")
    (folder / "text.txt").write_text(TEXT)
    with worker_in_process(folder):
        federation.train(task, config, seed=5, batch=8, slice_seconds=100.0)
    (folder / "whole.safetensors").write_bytes(federation.exported())
    return folder / "whole.safetensors"


@pytest.mark.parametrize("train_a", [True, False])
def test_adapters_of_a_model_in_a_folder_are_trained_and_the_rest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_a: bool
) -> None:
    place = _folder(tmp_path / "model")
    before = safetensors.torch.load_file(place / "model.safetensors")
    whole = safetensors.torch.load_file(
        _trained(tmp_path, monkeypatch, {**SMALL, "folder": str(place), "train_a": train_a})
    )
    layers = {name for name in before if "_proj" in name}
    for name in before:
        kept = f"base_model.model.{name.removesuffix('weight')}base_layer.weight" if name in layers else None
        torch.testing.assert_close(whole[kept or f"base_model.model.{name}"], before[name], rtol=0, atol=0)
    changed = [float(held.abs().max()) > 0 for name, held in whole.items() if ".lora_B." in name]
    assert len(changed) == len(layers)
    assert all(changed)


def test_peft_loads_what_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, config = _folder(tmp_path / "model"), {**SMALL, "train_a": True}
    whole = _trained(tmp_path, monkeypatch, {**config, "folder": str(place)})
    write_peft(whole, tmp_path / "adapter", config)
    names: dict[str, Any] = {}
    exec(TASK, names)
    own = names["model"]({**config, "folder": str(place)})
    own.load_state_dict(safetensors.torch.load_file(whole), strict=False)
    import peft
    import transformers

    plain = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    tokens = torch.frombuffer(bytearray(TEXT[:24].encode()), dtype=torch.uint8).long()[None]
    with torch.no_grad():
        out, untrained = loaded(input_ids=tokens).logits, names["model"]({**config, "folder": str(place)})
        torch.testing.assert_close(out, own(input_ids=tokens).logits)
        assert not torch.allclose(out, untrained(input_ids=tokens).logits, atol=1e-3), "it has learnt"


def test_without_a_folder_a_small_model_learns(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(TASK, names)
    (tmp_path / "text.txt").write_text(TEXT)
    data = names["dataset"](str(tmp_path / "text.txt"), "train", SMALL)
    assert len(data) == (len(TEXT) - 1) // 24
    torch.manual_seed(1)
    model = names["model"](SMALL)
    optimizer = names["optimizer"](model.parameters(), SMALL)
    losses = []
    for step in range(30):
        x, y = zip(*(data[(step * 16 + place) % len(data)] for place in range(16)), strict=True)
        optimizer.zero_grad()
        found = names["loss"](model, (torch.stack(x), torch.stack(y)))
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_its_job_is_valid() -> None:
    assert load(Path(str(templates.__path__[0])) / "llm-lora" / "peft.yaml").spec.task.module == "peft_task.py"
