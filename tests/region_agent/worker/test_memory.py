"""What a worker's exchange at the end of a round holds beside the model, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

pytestmark = pytest.mark.processes

MOST = 1.5
"""Bar: the peak of the exchange, as a multiple of the bytes that are trained."""
EXCHANGE = """
import sys
from pathlib import Path

import numpy as np
import torch

from geofed_pb.linux import keep_freed_memory
from sync import framing
from sync.channel_clients import FileChannel
from sync.flat import FlatModel

keep_freed_memory()


def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


channel = FileChannel(sys.argv[1])
tensors = [torch.nn.Parameter(torch.zeros(1_000_000)) for _ in range(8)]
model = torch.nn.ParameterList([*tensors, torch.nn.Parameter(torch.zeros(8_000_000))])
flat = FlatModel(model)
size = flat.layout.size
ones = np.ones(1_000_000, np.float32)
blocks = lambda: framing.encode_blocks("correction", size, (ones for _ in range(size // ones.size)), {})
snapshot, corrections = None, []
before = held("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
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


def test_the_end_of_a_round_holds_one_copy_of_the_model() -> None:
    """As of a worker that is not alone, or whose model is on a GPU: it copies its model and adds a correction."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as channel:
        command = [sys.executable, "-c", EXCHANGE, channel]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= MOST, f"{done.stdout.strip()} models"
