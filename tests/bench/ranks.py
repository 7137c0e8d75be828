"""Steps a second of a worker with several devices (`function.gpus`), against plain DistributedDataParallel of the same
model, batch and devices, and against one of the devices alone. With `--quick` it takes 2 minutes.

    .venv/bin/python tests/bench/ranks.py [--quick] [--json PATH]

The devices are all GPUs of this machine, with NCCL; where there are fewer than two, two processes on its CPU, with gloo
and one thread each. The CPU's figures show that it works: what they say of GPUs is nothing. The model is a chain of
layers of the same width, which is trained by AdamW in float32; its parameters are sent after each step, which plain
DistributedDataParallel does not need, since each process has an optimiser.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Bar, Report, options
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.exchange_in_process import Federation
from support.jobs import call, invocation

from region_agent.worker import handler, loop
from region_agent.worker.invocation import Outcome
from region_agent.worker.ranks.group import join

BAR = 0.95
"""Least steps a second, as a multiple of plain DistributedDataParallel's, on GPUs."""
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def model(config):
    width, layers = config["width"], config["layers"]
    return nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(width, width), nn.GELU())))


def dataset(uri, split, config):
    x = torch.randn(config["samples"], config["width"], generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters, config):
    return torch.optim.AdamW(parameters, lr=1e-4)


def metrics(model, batches):
    return {}
"""


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "rank":
        _plain_rank(int(sys.argv[2]), sys.argv[3])
        return 0
    given = options(__doc__)
    report, seen = Report("ranks", given.quick), torch.cuda.device_count()
    devices = tuple(f"cuda:{one}" for one in range(seen)) if seen > 1 else ("cpu", "cpu")
    size = {"width": 4096, "layers": 8, "batch": 2048} if seen > 1 else {"width": 1024, "layers": 4, "batch": 512}
    config: dict[str, Any] = {**size, "steps": 12 if given.quick else 40, "samples": 4 * size["batch"]}
    config["devices"] = devices
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"one device": [], "plain": [], "worker": []}
    # In turn, so that what else the machine does meets all of them.
    for _ in range(2 if given.quick else 4):
        found["one device"].append(_worker(config, devices[:1]))
        found["plain"].append(_plain(config))
        found["worker"].append(_worker(config, devices))
    parameters = size["layers"] * size["width"] * (size["width"] + 1)
    print(f"{parameters / 1e6:.1f} million parameters, batch {size['batch']}, {len(devices)} x {devices[0]}")
    for name, seconds in found.items():
        print(f"{name:<12} {1 / statistics.median(seconds):8.2f} steps/s")
        report.runs.append({"what": name, "step_seconds": seconds, **config})
    ratio = statistics.median(found["plain"]) / statistics.median(found["worker"])
    report.details["ratio"] = ratio
    print(f"a worker of {len(devices)} ranks makes {ratio:.3f} of the steps of plain DistributedDataParallel")
    if seen > 1:
        report.bars.append(Bar.at_least("steps a second of a worker with all GPUs", ratio, "x plain", BAR))
    return report.close(given.json)


def _worker(config: dict[str, Any], devices: tuple[str, ...]) -> float:
    """Return the median seconds of a step of a worker, in a round of so many."""
    with tempfile.TemporaryDirectory(prefix="geofed-ranks-") as folder:
        place = Path(folder)
        federation = Federation(place, ("here",), steps_per_round=config["steps"], rounds=1)
        loop.PsClient, handler._scratch = federation.client, lambda: place / "scratch"  # type: ignore[assignment,misc]
        (place / "data").write_bytes(b"x")
        server = federation.regions["here"].place
        try:
            outcome: Outcome = call(
                invocation(server, TASK, place / "data", config=config, region_batch=config["batch"], devices=devices)
            )
        finally:
            handler._drop_loaded()
    assert outcome.status == "done", outcome
    return outcome.steady_seconds / outcome.steady_steps


def _plain(config: dict[str, Any]) -> float:
    """Return the median seconds of a step of plain DistributedDataParallel, of the slowest process."""
    with tempfile.TemporaryDirectory(prefix="geofed-ranks-") as folder:
        torch.save(config, Path(folder) / "config")
        ranks = [
            subprocess.Popen([sys.executable, __file__, "rank", str(rank), folder], stdout=subprocess.PIPE, text=True)
            for rank in range(len(config["devices"]))
        ]
        return max(float(rank.communicate(timeout=600)[0]) for rank in ranks)


def _plain_rank(rank: int, folder: str) -> None:
    config = torch.load(Path(folder) / "config")
    number, device = len(config["devices"]), torch.device(config["devices"][rank])
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join(rank, number, device, Path(folder) / "meeting")
    names: dict[str, Any] = {}
    exec(TASK, names)
    torch.manual_seed(5)
    model = DistributedDataParallel(names["model"](config).to(device))
    optimizer = names["optimizer"](model.parameters(), config)
    x, y = names["dataset"]("", "train", config).tensors
    seconds = []
    for step in range(config["steps"]):
        begun = time.monotonic()
        rows = torch.randint(len(x), (math.ceil(config["batch"] / number),))
        batch = x[rows].to(device), y[rows].to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = names["loss"](model, batch)
        loss.backward()
        optimizer.step()
        # As a worker, who reports it.
        float(loss.detach())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds += [time.monotonic() - begun] if step else []
    print(statistics.median(seconds), flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
