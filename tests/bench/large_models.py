"""What a job sends that trains LoRA adapters of a large model, what it learns, and how fast servers exchange a large
model. With `--quick` it takes 3 minutes.

    .venv/bin/python tests/bench/large_models.py [--quick] [--json PATH]

Bytes: the template `llm-lora` with rank 8. The frames are those that workers and parameter servers make: the gradient
of a step, and the update of a round in each codec. They are compared with the adapter's values alone in that codec.

Loss: three regions train adapters and average them, one process trains them on the same samples, see
`large_models_loss.py`.

Exchange: three real parameter servers exchange 498 MB, see `large_models_exchange.py`.

WAN: steps a second of a job that trains as large a model over 100 Mbit/s, see `large_models_wan.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from large_models_exchange import measure_exchange
from large_models_loss import measure_loss
from large_models_wan import measure_wan
from report import Bar, Report, options

from sync import framing
from sync.base import frozen_parameters
from sync.codec import codec_named, codecs
from sync.flat import FlatModel
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

ROOT = Path(__file__).resolve().parents[2]
REGIONS = ("ams", "fra", "lon")
LARGE = {"width": 768, "blocks": 12, "heads": 12, "vocabulary": 50257, "length": 1024, "rank": 8}
"""GPT-2 with 124 million parameters."""
MEDIUM = {"width": 384, "blocks": 6, "heads": 6, "vocabulary": 50257, "length": 256, "rank": 8}
ROUND_BAR = 1.1
"""Most bytes, as a multiple of the adapter's."""


def main() -> int:
    given = options(__doc__)
    report = Report("large_models", given.quick)
    torch.set_num_threads(1)
    task = _template()
    measure_exchange(report, quick=given.quick)
    measure_wan(report, quick=given.quick)
    _bytes(report, task, MEDIUM if given.quick else LARGE)
    measure_loss(report, task, quick=given.quick)
    return report.close(given.json)


def _template() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llm_lora", ROOT / "deploy/templates/llm-lora/task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _made(task: ModuleType, config: dict[str, Any], seed: int) -> FlatModel:
    torch.manual_seed(seed)
    module = task.model(config)
    return FlatModel(module, base=frozen_parameters(module))


def _bytes(report: Report, task: ModuleType, size: dict[str, Any]) -> None:
    """The bytes of a step and of a round, in each codec."""
    flat = _made(task, {**size, "train_a": True}, 1)
    parameters = sum(p.numel() for p in flat.module.parameters())
    trained = sum(p.numel() for p in flat.module.parameters() if p.requires_grad)
    print(f"{parameters / 1e6:.1f} million parameters, {trained / 1e6:.3f} of them trained")
    x = torch.randint(0, 256, (2, 32))
    task.loss(flat.module, (x, x)).backward()
    step = _total(framing.encode({"gradient": flat.gradient()}, {"samples": 2}))
    _add(report, "a step", "fp32", step, 4 * trained, 4 * parameters)
    rng = np.random.default_rng(1)
    for name in codecs():
        codec, start = codec_named(name), flat.vector()
        replica = Replica(policy_of("ma"), ExchangeSettings(), codec, ReplicaState(start, start))
        replica.trained, replica.alone = flat.layout.trainable_size, False
        change = rng.normal(size=start.size).astype(np.float32) * 1e-3
        made = replica.own_update(start + change, 1, last=False)
        plain = sum(array.nbytes for array in codec.encode(change[:trained].copy()).values())
        _add(report, "a round", name, _total(framing.encode(made.tensors)), plain, 4 * parameters)


def _total(pieces: list[memoryview]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _add(report: Report, what: str, codec: str, sent: int, adapter: int, whole: int) -> None:
    print(f"{what:<8} {codec:<9} {sent:>10,} bytes, {sent / adapter:.4f} of the adapter, 1/{whole / sent:.0f} of fp32")
    report.runs.append({"what": what, "codec": codec, "bytes": sent, "adapter_bytes": adapter, "whole_bytes": whole})
    report.bars.append(Bar.at_most(f"bytes of {what}, {codec}", sent / adapter, "x adapter", ROUND_BAR))


if __name__ == "__main__":
    sys.exit(main())
