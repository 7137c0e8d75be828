"""What a worker holds beside model, gradients and optimiser: in the exchange at the end of a round, and in the merges
of a region's workers. Each worker is a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.jobs import pack
from support.stores import redis_server

from sync import framing
from sync.channel import Channel
from sync.channel_clients import open_channel

pytestmark = pytest.mark.processes

MOST = 1.5
"""Bar: the peak of an exchange or of merges, as a multiple of the bytes that are trained."""
MOST_OF_ISP = 4.5
"""The same for merges by `isp` in memory. It holds what it has not sent in float64, and the model before the step,
which are 3; and which coordinates are sent, a quarter."""
MOST_OVER_REDIS = 2.0
"""The same for merges over Redis, which take 1.0 to 1.4: on busy cores what a thread has sent is freed later."""
SIZE = 16_000_000
"""Parameters."""
COMMON = """
import sys
from pathlib import Path

import numpy as np
import torch

from geofed_pb.linux import keep_freed_memory
from sync import framing
from sync.channel_clients import open_channel
from sync.flat import FlatModel

keep_freed_memory()


def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure():
    Path("/proc/self/clear_refs").write_text("5")
    return held("VmRSS")


tensors = [torch.nn.Parameter(torch.zeros(1_000_000)) for _ in range(16)]
model = torch.nn.ParameterList(tensors)
channel = open_channel(sys.argv[1], sys.argv[2])
size = 16_000_000
"""
EXCHANGE = """
flat = FlatModel(model)
ones = np.ones(1_000_000, np.float32)
blocks = lambda: framing.encode_blocks("correction", size, (ones for _ in range(size // ones.size)), {})
snapshot, corrections = None, []
before = measure()
for number in range(3):
    channel.put_made(f"c/{number}", blocks)
    snapshot = flat.vector(snapshot)
    corrections.clear()
    channel.put("b/model", framing.encode({"model": snapshot}))
    corrections.append(np.asarray(framing.decode(channel.get(f"c/{number}")).tensors["correction"], np.float32))
    flat.add(corrections[-1])
assert torch.equal(tensors[0], torch.full((1_000_000,), 3.0))
print((held("VmHWM") - before) / (4 * size))
"""
TASK = """
import __main__
import torch

def model(config):
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1_000_000)) for _ in range(16)])

def dataset(uri, split, config):
    return torch.utils.data.TensorDataset(torch.ones(64, 1))

def loss(model, batch):
    __main__.stepping()
    return 1e-3 * sum(parameter.sum() for parameter in model)

def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1)
"""
ROUNDS = """
import time

from geofed_pb.v1 import worker_pb2
from region_agent.worker import handler, loop
from region_agent.worker.invocation import Invocation

del model, tensors
steps = training = 0


def stepping():
    # The peak of the first steps, before the end of a round, is what training itself holds.
    global steps, training
    steps += 1
    if steps == 2:
        measure()
    training = held("VmHWM") if steps == 6 else training


class Server:
    # In the place of the parameter server: the values that it would put are in the channel.
    def __init__(self, call, slice_ends): ...

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def attach(self, request):
        return worker_pb2.AttachReply(step=0, round=0, model_key="m", until_step=6, background=True)

    def boundary(self, request):
        if request.round == 2:
            measure()
        if request.round == 5:
            print((held("VmHWM") - training) / (4 * size))
        over = request.round == 5
        return worker_pb2.BoundaryReply(
            round=request.round, until_step=request.step + 6, finished=over,
            correction_key="" if over else f"c/{request.round}", model_key="m" if over else "",
        )

    def evaluated(self, request): ...

    def stepped(self, request): ...


loop.PsClient = Server
print(handler._run(Invocation.model_validate_json(sys.argv[3]), time.monotonic()).status)
"""
MERGES = """
from types import SimpleNamespace

from region_agent.worker.training.merging import ChannelCollective, PeerTimeout, ServerReduce
from sync.collective import Settings, collective_named
from sync.merging import Member, open_collective

worker, workers, *patterns = sys.argv[3:]
worker, workers = int(worker), int(workers)
small = [torch.nn.Parameter(torch.zeros(1000)) for _ in range(4)]


def backward(merging, step):
    for tensor in own:
        tensor.grad = None
    loss = sum(tensor.sum() for tensor in own) * (1.0 + 2.0 * worker)
    merging.arm(step, 1)
    loss.backward()


def update():
    with torch.no_grad():
        for tensor in own:
            tensor -= tensor.grad


class Server:
    # In the place of the parameter server, which merges in a process of its own.
    def reduce(self, request):
        list(channel.wait([f"r/{request.step}"], 60.0))
        return SimpleNamespace(merged_key=f"r/{request.step}")


# What the first merges load is not measured, so these are of a small model.
for number, pattern in enumerate(("scatter-reduce", *patterns)):
    own = tensors if number else small
    flat = FlatModel(torch.nn.ParameterList(own))
    for step in range(1, 4) if number == 1 else ():
        # Gradients alone, so that what they take of the heap counts as training's.
        backward(SimpleNamespace(arm=lambda step, samples: None), step)
    start = measure() if number < 2 else start
    measure()
    if pattern == "server-reduce":
        merging = ServerReduce(update, flat, channel, SimpleNamespace(attempt=1, worker=worker))
    else:
        changes = collective_named(pattern).shares == "changes"
        settings = Settings(pattern, in_parts=not (changes or channel.in_memory), timeout_seconds=60.0)
        size_of = flat.layout.size if changes else flat.layout.gradient_size
        place = Member(worker, workers, 1), channel, f"m{number}", size_of
        timeout = PeerTimeout(1e9)
        merging = ChannelCollective(update, flat, open_collective(settings, *place), pattern, timeout)
    for step in range(4, 8):
        backward(merging, step)
        merging.step(Server(), step, 1, 1.0)
    merging.settle(7)
    if number:
        print(pattern, (held("VmHWM") - start) / (4 * size))
    if pattern != "server-reduce":
        merging.close()
with torch.no_grad():
    assert all(torch.equal(tensor, tensors[0].mean().expand(1_000_000)) for tensor in tensors)
    print("model", float(tensors[0][0]))
"""


@contextmanager
def store(kind: str) -> Iterator[tuple[str, Channel]]:
    """A channel in memory, or a Redis server: its address, and the channel as it is opened here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if kind == "file":
            yield folder, open_channel("file", folder)
            return
        with redis_server(Path(folder)) as server:
            yield server.unix("memory"), open_channel("redis", server.unix("memory"))


def started(code: str, kind: str, address: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMON + code, kind, address, *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def said(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    return out.split()


def test_the_end_of_a_round_holds_one_copy_of_the_model() -> None:
    """As of a worker that is not alone, or whose model is on a GPU: it copies its model and adds a correction."""
    with store("file") as (address, _):
        (peak,) = said(started(EXCHANGE, "file", address))
    assert float(peak) <= MOST, f"{peak} models"


def test_the_copy_of_the_model_is_freed_before_the_correction_comes(tmp_path: Path) -> None:
    """Over Redis, where the worker holds each as a whole."""
    with store("redis") as (address, channel):
        bundle = pack({"task.py": TASK})
        key = f"bundle/{hashlib.sha256(bundle).hexdigest()}"
        channel.put(key, [bundle])
        for where, name in (("m", "model"), *((f"c/{number}", "correction") for number in range(1, 5))):
            channel.put(where, framing.encode({name: np.ones(SIZE, np.float32)}))
        data = tmp_path / "data"
        data.write_bytes(b"x")
        files = [{"name": "data", "path": str(data)}]
        call = {
            "job": "j", "region": "north", "worker": 0, "workers": 1, "attempt": 1, "token": "t", "ps_address": "-",
            "ps_name": "-", "ca_pem": "", "channel": "redis", "channel_address": address, "bundle_key": key,
            "module": "task.py", "config": {}, "splits": {"train": files}, "region_batch": 2, "steps_per_round": 6,
            "rounds": 5, "seed": 5, "slice_seconds": 100.0,
        }  # fmt: skip
        peak, status = said(started(ROUNDS, "redis", address, json.dumps(call)))
    assert status == "done"
    assert float(peak) <= MOST, f"{peak} models"


@pytest.mark.parametrize(
    ("kind", "workers", "patterns"),
    [
        ("file", 2, ("server-reduce", "all-reduce", "scatter-reduce", "isp")),
        ("redis", 2, ("server-reduce", "all-reduce", "pipelined-scatter-reduce")),
        ("file", 4, ("all-reduce",)),
        ("redis", 4, ("scatter-reduce",)),
        ("redis", 4, ("all-reduce",)),
    ],
)
def test_merges_of_a_regions_workers(kind: str, workers: int, patterns: tuple[str, ...]) -> None:
    with store(kind) as (address, channel):
        all_ = [started(MERGES, kind, address, str(worker), str(workers), *patterns) for worker in range(workers)]
        for step in range(4, 8) if "server-reduce" in patterns else ():
            keys = [f"g/1/{step}/{worker}" for worker in range(workers)]
            parts = [framing.decode(value).tensors["gradient"] for _, value in channel.wait(keys, 60.0)]
            channel.put(f"r/{step}", framing.encode({"gradient": sum(parts) / np.float32(workers)}))
        # Four steps with each; means of the gradients 1, 3, ... of the workers, and with isp their sum.
        model = sum(-4.0 * workers * (workers if pattern == "isp" else 1) for pattern in patterns)
        for process in all_:
            words = said(process)
            peaks = dict(zip(words[::2], map(float, words[1::2]), strict=True))
            assert peaks.pop("model") == model
            assert peaks.pop("isp", 0.0) <= MOST_OF_ISP, peaks
            assert max(peaks.values()) <= (MOST_OVER_REDIS if kind == "redis" else MOST), peaks
