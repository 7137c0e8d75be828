"""Memory and steps a second of a worker whose devices hold a part of the model each (`function.sharding: fsdp`),
against one whose devices hold it whole (`none`). With `--quick` it takes 2 minutes.

    .venv/bin/python tests/bench/sharding.py [--quick] [--json PATH]

The devices are the first two GPUs of this machine, with NCCL; where there are fewer, two processes on its CPU, with
gloo and one thread each. The model is a chain of blocks, trained by AdamW in float32. Of each rank that has an
optimiser: "held", the storage of parameters, gradients and optimiser state after a step; "grown", its resident memory
then, without what the C library keeps of freed memory, over that before the model is created; "peak", the largest
before then, with what it keeps. The process of rank 0 has the region's parameter server, too, here. With GPUs, "peak"
is the most memory that tensors took of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import Bar, Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.exchange_in_process import Federation
from support.jobs import call, invocation

from region_agent.worker import handler, loop
from region_agent.worker.invocation import Outcome

BAR = 0.55
"""Most memory of parameters, gradients and optimiser state of one of two ranks, as a part of the whole."""
FOLDER = "GEOFED_BENCH_FOLDER"
TASK = """
import ctypes
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


def resident():
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}


def tell(name, **numbers):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(os.environ["GEOFED_BENCH_FOLDER"], f"{name}-{rank}").write_text(json.dumps(numbers))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.inner(x)


class Counted(torch.optim.AdamW):
    def step(self):
        super().step()
        held = {}
        for group in self.param_groups:
            for p in group["params"]:
                for one in (p.detach(), p.grad, *self.state[p].values()):
                    storage = (one.to_local() if hasattr(one, "to_local") else one).untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        cuda = torch.cuda.is_available()
        tell("step", held=sum(held.values()), cuda=torch.cuda.max_memory_allocated() if cuda else 0, **resident())


def model(config):
    tell("model", **resident())
    return nn.Sequential(*(Block(config["width"]) for _ in range(config["blocks"])))


def dataset(uri, split, config):
    x = torch.randn(config["samples"], config["width"], generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1))


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters, config):
    return Counted(parameters, lr=1e-4)


def metrics(model, batches):
    return {}
"""


def main() -> int:
    if len(sys.argv) == 4 and sys.argv[1] == "worker":
        _worker(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return 0
    given = options(__doc__)
    report, gpus = Report("sharding", given.quick), torch.cuda.device_count() > 1
    size = {"width": 4096, "blocks": 12, "batch": 256} if gpus else {"width": 768, "blocks": 16, "batch": 32}
    config: dict[str, Any] = {**size, "steps": 6 if given.quick else 20, "samples": 4 * size["batch"]}
    config["devices"] = ["cuda:0", "cuda:1"] if gpus else ["cpu", "cpu"]
    found = {sharding: _run(config, sharding) for sharding in ("none", "fsdp")}
    parameters = size["blocks"] * (4 * size["width"] ** 2 + 3 * size["width"])
    print(f"{parameters / 1e6:.1f} million parameters, batch {size['batch']}, 2 x {config['devices'][0]}")
    for sharding, one in found.items():
        for rank in one["ranks"]:
            told = ", ".join(f"{name} {rank[name] / 2**20:8.1f} MiB" for name in ("held", "grown", "peak"))
            print(f"{sharding:<5} rank {rank['rank']}: {told}")
        print(f"{sharding:<5} {1 / one['step_seconds']:.2f} steps/s")
        report.runs.append({"sharding": sharding, **one, **config})
    (whole,) = (one for one in found["none"]["ranks"] if one["rank"] == 0)
    report.details["held"] = max(one["held"] for one in found["fsdp"]["ranks"]) / whole["held"]
    if not gpus:
        other = next(one for one in found["fsdp"]["ranks"] if one["rank"])
        report.details["grown"] = other["grown"] / whole["held"]
        print(f"rank 1 has grown by {report.details['grown']:.3f} of what a rank with the whole model holds")
    report.bars.append(
        Bar.at_most("parameters, gradients and optimiser state of one of two ranks", report.details["held"], "x", BAR)
    )
    return report.close(given.json)


def _run(config: dict[str, Any], sharding: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="geofed-sharding-") as folder:
        arguments = [sys.executable, __file__, "worker", json.dumps({**config, "sharding": sharding}), folder]
        subprocess.run(
            arguments, check=True, timeout=900, env={**os.environ, FOLDER: folder}, stdout=subprocess.DEVNULL
        )
        place, ranks = Path(folder), []
        for file in sorted(place.glob("step-*")):
            rank = int(file.name.removeprefix("step-"))
            step, model = json.loads(file.read_text()), json.loads((place / f"model-{rank}").read_text())
            peak = step["cuda"] or step["VmHWM"] - model["VmRSS"]
            grown = step["VmRSS"] - model["VmRSS"]
            ranks.append({"rank": rank, "held": step["held"], "grown": grown, "peak": peak})
        return {"ranks": ranks, **json.loads((place / "outcome").read_text())}


def _worker(config: dict[str, Any], place: Path) -> None:
    torch.set_num_threads(1)
    federation = Federation(place, ("here",), steps_per_round=config["steps"], rounds=1)
    loop.PsClient, handler._scratch = federation.client, lambda: place / "scratch"  # type: ignore[assignment,misc]
    (place / "data").write_bytes(b"x")
    server, settings = federation.regions["here"].place, {"region_batch": config["batch"]}
    more = {**settings, "devices": tuple(config["devices"]), "sharding": config["sharding"]}
    try:
        outcome: Outcome = call(invocation(server, TASK, place / "data", config=config, **more))
    finally:
        handler._drop_loaded()
    assert outcome.status == "done", outcome
    step_seconds = outcome.steady_seconds / outcome.steady_steps
    (place / "outcome").write_text(json.dumps({"step_seconds": step_seconds}))


if __name__ == "__main__":
    sys.exit(main())
