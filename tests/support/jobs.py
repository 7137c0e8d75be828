"""Small jobs for the worker runtime: task folders, their data, and the invocations that run them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from support.server_process import JOB, Server

from geofed_pb.rpc import region_name
from geofed_pb.user_code.modules import drop_task_modules
from region_agent.worker.invocation import Invocation, Outcome, ShardFile
from sync.channel_clients import FileChannel

LINEAR_TASK = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def model(config):
    return nn.Linear(4, 2)


def dataset(uri, split, config):
    held = np.load(uri)
    return TensorDataset(torch.from_numpy(held["x"]), torch.from_numpy(held["y"]))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=config.get("lr", 0.1), momentum=0.9)
"""

RESTLESS_TASK = """
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 2)
        self.sometimes = nn.Linear(16, 2)

    def forward(self, x):
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        out = self.last(hidden)
        return out + self.sometimes(hidden) if self.training and torch.rand(()) < 0.5 else out


class Augmented(torch.utils.data.Dataset):
    def __init__(self, uri):
        held = np.load(uri)
        self.x, self.y = held["x"], held["y"]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)
        return torch.from_numpy(self.x[index] + np.float32(noise)), torch.from_numpy(self.y[index])


def model(config):
    return Net()


mean = None


def dataset(uri, split, config):
    # Whoever uses the data needs this, too.
    global mean
    found = Augmented(uri)
    mean = float(found.x.mean())
    return found


def loss(model, batch):
    x, y = batch
    x = x - mean
    return nn.functional.mse_loss(model(x), y)


def optimizer(parameters, config):
    return torch.optim.Adam(parameters, lr=0.01)


def metrics(model, batches):
    errors = [(model(x) - y).abs().mean(1) for x, y in batches]
    return {"error": float(torch.cat(errors).mean())}
"""


def pack(files: dict[str, str]) -> bytes:
    """A task folder as the control plane packs it: the same files are the same bytes, whenever they are packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return gzip.compress(packed.getvalue(), mtime=0)


def write_samples(path: Path, samples: int, seed: int = 0) -> Path:
    """Inputs of 4 and outputs of 2 numbers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((samples, 4)).astype(np.float32)
    np.savez(path, x=x, y=np.stack([x.sum(1), x[:, 0] - x[:, 1]], 1).astype(np.float32))
    return path


def invocation(server: Server, task: str, data: Path, worker: int = 0, **changed: Any) -> Invocation:
    """The first call of a worker; puts its task folder into the channel."""
    bundle = pack({"task.py": task})
    key = f"bundle/{hashlib.sha256(bundle).hexdigest()}"
    FileChannel(server.channel_folder).put(key, [bundle])
    files = (ShardFile(name=data.name, path=str(data)),)
    told = server.settings
    fields: dict[str, Any] = {
        "job": JOB, "region": server.region, "worker": worker, "workers": told["workers"], "attempt": 1,
        "token": server.token(worker), "ps_address": f"127.0.0.1:{server.ports.get('worker', 0)}",
        "ps_name": region_name(server.region), "ca_pem": server.identity.ca_pem.decode(), "channel": "file",
        "channel_address": str(server.channel_folder), "bundle_key": key, "module": "task.py", "config": {},
        "splits": {"train": files, "test": files}, "region_batch": 8 * told["workers"],
        "steps_per_round": told["steps_per_round"], "rounds": told["rounds"], "seed": 5,
        "slice_seconds": 100.0, **changed,
    }  # fmt: skip
    return Invocation(**fields)


@contextmanager
def worker_in_process(folder: Path) -> Iterator[None]:
    """Worker functions that run in this process put what they unpack below ``folder``, and leave nothing."""
    from region_agent.worker import handler

    # To look through all that the tests before have left in this process takes a third of a second each time.
    collector = SimpleNamespace(collect=lambda: 0)
    with patch.object(handler, "_scratch", lambda: folder / "scratch"), patch.object(handler, "gc", collector):
        try:
            yield
        finally:
            handler._drop_loaded()
            drop_task_modules()


def call(body: Invocation) -> Outcome:
    """One invocation in this process."""
    from region_agent.worker.handler import handle

    answer = handle(SimpleNamespace(body=body.model_dump_json().encode()), None)
    assert answer["statusCode"] == 200
    return Outcome.model_validate_json(str(answer["body"]))


def chain(body: Invocation) -> list[Outcome]:
    """A worker's whole life: invoked again until it is done, as the agent would."""
    outcomes = [call(body)]
    while outcomes[-1].status == "continue":
        outcomes.append(call(body.model_copy(update={"resume_key": outcomes[-1].resume_key})))
    return outcomes
