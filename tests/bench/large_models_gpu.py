"""Steps a second of three regions that share one GPU and exchange a GPT-2 of 124 million parameters over loopback,
against as many processes of plain PyTorch that exchange nothing. With `--quick` it takes 4 minutes.

    .venv/bin/python tests/bench/large_models_gpu.py [--quick] [--json PATH] [--trial]

Three real regions of one worker each, with the real daemons and everything about the exchange `auto`. Batch 16 x 512
tokens, AdamW, bf16. Both have all three processes on the same GPU. Without a GPU it ends with status 2; with `--trial`
it trains a model of 0.2 million parameters on the CPU, which shows that it runs, and nothing of GPUs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from large_models_job import alone, sites, speed_of
from report import Bar, Report, options
from support.running import Running

from deploy.local import LocalFederation

BAR, AIM = 0.90, 0.97
"""Least steps a second, as a part of plain PyTorch's."""
FULL = {"width": 768, "blocks": 12, "heads": 12, "vocabulary": 50257, "length": 512}
TRIAL = {"width": 64, "blocks": 2, "heads": 4, "vocabulary": 256, "length": 32}
MEMORY_MB = 16384
STEPS, ALONE_STEPS = 100_000, 200
"""Of the job, which is cancelled before, and of a process of plain PyTorch."""
SECONDS, QUICK_SECONDS = 180.0, 60.0
"""That steps of the job are counted for."""
JOB = """
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: large-model-gpu}
task: {module: task.py, config: CONFIG}
data: {dataset: text, residency: region}
train: {batch: 16, seed: 1, workers: 1, precision: bf16, evaluateEvery: 0, end: {steps: STEPS}}
objective: {minimise: time}
"""
TASK = '''
"""GPT-2 over random tokens."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["width"]
        self.tokens, self.places = nn.Embedding(config["vocabulary"], width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, config["heads"]) for _ in range(config["blocks"]))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.tokens.weight.T


def model(config):
    return GPT(config)


def dataset(uri, split, config):
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(config["vocabulary"], (20_000, config["length"] + 1), generator=drawn))


def loss(model, batch):
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer(parameters, config):
    return torch.optim.AdamW(parameters, lr=3e-4)
'''


def main() -> int:
    given = options(__doc__, more=lambda parser: parser.add_argument("--trial", action="store_true", help="on the CPU"))
    if not torch.cuda.is_available() and not given.trial:
        print("this machine has no GPU that PyTorch sees; --trial runs a tiny model on the CPU", file=sys.stderr)
        return 2
    report = Report("large_models_gpu", given.quick)
    config, bound_steps = (TRIAL, 50) if given.trial else (FULL, ALONE_STEPS)
    device = "cpu" if given.trial else "cuda"
    job = JOB.replace("CONFIG", str(config).replace("'", "")).replace("STEPS", str(STEPS))
    seconds = QUICK_SECONDS if given.quick else SECONDS
    bound = alone(plain, config, device, bound_steps)
    with tempfile.TemporaryDirectory(prefix="geofed-gpu-") as place:
        folder = Path(place)
        made = sites(folder, memory_mb=1024 if given.trial else MEMORY_MB)
        with LocalFederation(folder / "federation", made) as federation:
            found = speed_of(Running(federation, folder), folder / "large-model", TASK, job, seconds)
    share = found["steps_per_second"] / bound
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    report.runs.append(
        {"what": "shared", "device": name, "alone": bound, "share": share, "load": os.getloadavg()[0], **found}
    )
    print(f"{name}: plain PyTorch {bound:.2f} steps/s a process, geofed {found['steps_per_second']:.2f} ({share:.3f})")
    for region, part in found["parts"].items():
        told = ", ".join(f"{key.removesuffix('_seconds')} {value:.1f}" for key, value in part.items())
        print(f"  {region}: {told} s")
    if not given.trial:
        report.bars.append(Bar.at_least("three regions on one GPU", share, "x plain PyTorch", BAR))
        report.bars.append(Bar.at_least("aim: three regions on one GPU", share, "x plain PyTorch", AIM))
    return report.close(given.json)


def plain(config: dict[str, Any], device: str, steps: int) -> float:
    """Return the steps a second of a loop in plain PyTorch."""
    names: dict[str, Any] = {}
    exec(TASK, names)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = names["model"](config).to(device)
    optimizer = names["optimizer"](model.parameters(), config)
    (tokens,) = names["dataset"]("", "train", config).tensors

    def run(number: int) -> None:
        for _ in range(number):
            batch = (tokens[torch.randint(len(tokens), (16,))].to(device),)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16):
                found = names["loss"](model, batch)
            found.backward()
            optimizer.step()
            # As a worker, who reports it.
            float(found.detach())

    # The first steps load kernels and allocate.
    run(5)
    begun = time.monotonic()
    run(steps)
    return steps / (time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
