"""Tensors that stay in their region: they are trained there as one plain process trains them, while the others are
averaged."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation
from support.jobs import call, chain, invocation, write_samples
from support.pki import Authority
from support.server_process import Server
from torch import nn

from geofed_pb.errors import GeofedError
from region_agent.worker import loop
from region_agent.worker.data.shard import BatchStream
from sync import framing
from sync.channel_clients import FileChannel
from sync.flat import FlatModel
from sync.layout import LOCAL, Layout
from sync.local_tensors import local_names
from sync.ps.config import OWN_MODEL
from sync.ps.execution.base import BaseFiles
from sync.ps.execution.export import LOCAL_FACT, from_safetensors, to_safetensors
from sync.seeding import reseed, seed_all

STEPS, ROUNDS, BATCH, SEED = 3, 3, 8, 5
PATTERNS = ("*.bn.*", "head.*")

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential()
        self.body.add_module("first", nn.Linear(4, 8))
        self.body.add_module("bn", nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def model(config):
    return Net()


def dataset(uri, split, config):
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(config["data"][uri.rsplit("/", 1)[-1]]))
    return TensorDataset(x, x[:, :2] - x[:, 2:])


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters, config):
    return torch.optim.AdamW(parameters, lr=0.01)
"""
HELD: dict[str, Any] = {}
exec(TASK, HELD)  # the task itself makes the modules that one plain process trains


def _plain(regions: tuple[str, ...]) -> list[nn.Module]:
    """Each region by itself; what is not local is averaged after each round."""
    modules, optimizers = [], []
    for _ in regions:
        seed_all(SEED)
        modules.append(HELD["model"]({}))
        optimizers.append(torch.optim.AdamW(modules[-1].parameters(), lr=0.01))
    local = local_names(modules[0], PATTERNS)
    for round_ in range(ROUNDS):
        for number, (name, module, optimizer) in enumerate(zip(regions, modules, optimizers, strict=True), 1):
            x, y = HELD["dataset"](f"/{name}.bin", "train", {"data": {f"{name}.bin": number}}).tensors
            stream = BatchStream(range(len(x)), SEED, name, 0, 1, BATCH)
            for step in range(round_ * STEPS + 1, (round_ + 1) * STEPS + 1):
                reseed(SEED, zlib.crc32(name.encode()), 0, step)
                module.train()
                optimizer.zero_grad(set_to_none=True)
                rows = torch.tensor(stream.indices(step))
                nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            for names in zip(*(module.state_dict(keep_vars=True).items() for module in modules), strict=True):
                if names[0][0] not in local:
                    mean = torch.stack([tensor for _, tensor in names]).mean(0)
                    for _, tensor in names:
                        tensor.copy_(mean)
    return modules


@pytest.mark.parametrize("slice_seconds", [1e-3, 100.0], ids=["a step a slice", "one slice"])
def test_each_region_keeps_its_own_and_shares_the_rest(
    slice_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, ("east", "west"), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    config = {"data": {"east.bin": 1, "west.bin": 2}}
    federation.train(TASK, config, seed=SEED, batch=BATCH, slice_seconds=slice_seconds, local=PATTERNS)
    shared = safetensors.torch.load(federation.exported())
    assert shared.keys() == {"body.first.weight", "body.first.bias"}, "nothing else is exchanged"
    for expected, (name, region) in zip(_plain(("east", "west")), federation.regions.items(), strict=True):
        layout, replica = region.layout, region.replica
        assert layout is not None
        assert replica is not None
        held = framing.decode(region.state[ROUNDS]).tensors
        local = {one.removeprefix(LOCAL): content for one, content in held.items() if one.startswith(LOCAL)}
        own = safetensors.torch.load(b"".join(to_safetensors(layout, replica.model, {}, {}, local)))
        assert own.keys() == expected.state_dict().keys()
        for tensor, value in expected.state_dict().items():
            torch.testing.assert_close(own[tensor], value, rtol=1e-5, atol=1e-6, msg=f"{tensor} of {name}")
    first, second = (framing.decode(region.state[ROUNDS]).tensors for region in federation.regions.values())
    assert not np.array_equal(first[f"{LOCAL}head.weight"], second[f"{LOCAL}head.weight"])


def _made() -> nn.Module:
    made: nn.Module = HELD["model"]({})
    return made


@pytest.mark.parametrize(
    ("patterns", "text", "hint"),
    [
        (("haed.*",), "no tensor of the model matches 'haed.*'", "did you mean 'head.*'?"),
        (("head.wieght",), "no tensor of the model matches 'head.wieght'", "did you mean 'head.weight'?"),
        (("*.bm.*",), "no tensor of the model matches '*.bm.*'", "did you mean '*.bn.*'?"),
        (("*.head.*",), "no tensor of the model matches '*.head.*'", "did you mean 'head.*'?"),
        (("*",), "matches all trained parameters", "leave some"),
    ],
)
def test_patterns_that_fit_no_tensor_or_all_are_refused(patterns: tuple[str, ...], text: str, hint: str) -> None:
    with pytest.raises(GeofedError) as caught:
        local_names(_made(), patterns)
    assert caught.value.code == "TASK_INVALID"
    assert text in caught.value.message
    assert hint in str(caught.value.hint)


def test_a_layout_tells_what_is_local_and_how_two_differ() -> None:
    module = _made()
    whole, local = FlatModel(module).layout, FlatModel(module, local=local_names(module, PATTERNS)).layout
    assert Layout.from_json(local.to_json()) == local
    assert [slot.name for slot in local.slots] == ["body.first.weight", "body.first.bias"]
    assert local.trainable == 2
    assert "is local here and changes there" in local.difference(whole)
    assert "changes here and is local there" in whole.difference(local)
    assert local.difference(local) == ""


def test_a_model_to_start_from_may_hold_what_is_local_or_not(tmp_path: Path) -> None:
    module = _made()
    flat = FlatModel(module, local=local_names(module, PATTERNS))
    own, shared = tmp_path / "own.safetensors", tmp_path / "shared.safetensors"
    contents = flat.local.contents()
    own.write_bytes(b"".join(to_safetensors(flat.layout, flat.vector(), {}, {}, contents)))
    shared.write_bytes(b"".join(to_safetensors(flat.layout, flat.vector(), {})))
    channel = FileChannel(str(tmp_path / "channel"))
    for path, held in ((own, set(contents)), (shared, set[str]())):
        assert np.array_equal(from_safetensors(flat.layout, path), flat.vector())
        base = BaseFiles(tmp_path, channel, path)
        assert base.completed(flat.layout) == flat.layout
        key = base.publish(flat.layout)
        assert bool(key) == bool(held)
        if key:
            value = channel.get(key)
            assert value is not None
            assert framing.decode(value).tensors.keys() == held
    # The agent copies the region's own file while the server starts.
    late = tmp_path / "late.safetensors"
    base = BaseFiles(tmp_path, FileChannel(str(tmp_path / "other")), shared, late)
    late.write_bytes(own.read_bytes())
    base.completed(flat.layout)
    assert base.publish(flat.layout)
    with safetensors.safe_open(shared, "pt") as file:  # type: ignore[no-untyped-call]
        assert "head.weight" in file.metadata()[LOCAL_FACT]


@pytest.mark.processes
def test_a_server_keeps_the_regions_own_model_over_a_restart_and_a_new_attempt(tmp_path: Path) -> None:
    server = Server(tmp_path / "east", Authority(), "east", ("east",), rounds=3, steps_per_round=2, evaluate_every=1)
    server.launch()
    server.await_ready()
    try:
        data = write_samples(tmp_path / "data.npz", 20)
        task = TASK.replace(
            "def dataset(uri, split, config):\n", "def dataset(uri, split, config):\n    config = SEEDS\n"
        )
        task += "\nSEEDS = {'data': {'data.npz': 1}}\n"
        body = invocation(server, task, data, local=PATTERNS, slice_seconds=0.001)
        outcome = call(body)
        while server.status().round < 1:
            outcome = call(body.model_copy(update={"resume_key": outcome.resume_key}))
        server.kill()
        server.launch(attempt=2)
        server.await_ready()
        again = body.model_copy(
            update={"attempt": 2, "token": server.token(attempt=2), "ps_address": f"127.0.0.1:{server.ports['worker']}"}
        )
        assert chain(again.model_copy(update={"slice_seconds": 100.0}))[-1].status == "done"
    finally:
        server.kill()
    (path,) = tmp_path.rglob(OWN_MODEL)
    with safetensors.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        assert (file.metadata()["region"], file.metadata()["round"]) == ("east", "3")
    seed_all(5)
    module = _made()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    x, y = HELD["dataset"]("/data.npz", "train", {"data": {"data.npz": 1}}).tensors
    stream = BatchStream(range(21), 5, "east", 0, 1, 8)
    for step in range(1, 7):
        rows = torch.tensor(stream.indices(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
        optimizer.step()
    own = safetensors.torch.load_file(path)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-6, msg=name)
