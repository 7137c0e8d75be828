"""No client, and no worker, depends on which clients were trained before, or elsewhere; nor on how many data it has."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.modules import drop_task_modules
from region_agent.shards.indexing import Indexes
from region_agent.worker.clients.model import ClientsModel
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.data.formats import check_format
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.data.streamed import Rows, Streamed
from region_agent.worker.invocation import ClientRounds, Invocation, ShardFile
from region_agent.worker.task import load_task
from sync.channel_clients import FileChannel

TASK = """
import torch


class ByClient(torch.utils.data.Dataset):
    clients = [0, 0, 1, 1, 1, 1, 2, 2]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        none = self.clients[index] == 0 or index == 2
        return None if none else (torch.full((1,), float(index + 1)), torch.full((1,), 2.0 * index))


class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean().detach()
        return self.linear(x - self.mean)


def model(config):
    return Centred()


def dataset(uri, split, config):
    return ByClient()


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.01)
"""


def _model(folder: Path, workers: int = 1) -> ClientsModel:
    (folder / "task.py").write_text(TASK)
    drop_task_modules()
    task = load_task(folder, "task.py", {})
    rounds = ClientRounds(fraction=1.0, epochs=1, batch=2)
    call = Invocation(
        job="j", region="east", worker=0, workers=workers, attempt=1, token="", ps_address="", ps_name="", ca_pem="",
        channel="file", channel_address="", bundle_key="", module="task.py", config={}, splits={}, region_batch=8,
        batch=2, steps_per_round=1, rounds=1, seed=1, slice_seconds=100.0, clients=rounds, collective="server-reduce",
    )  # fmt: skip
    return ClientsModel(
        rounds, call, task, {"train": task.dataset("x", "train")}, FileChannel(folder), time.monotonic()
    )


def test_buffers_that_are_not_part_of_the_state_do_not_go_from_client_to_client(tmp_path: Path) -> None:
    changes = []
    for before in ([1], []):
        model = _model(tmp_path)
        start, local = model.flat.vector(), model._local
        model._module.train()
        local._flat.vector(local._start)
        for client in [*before, 2]:
            local._train(client, 1, [])
        changes.append((model.flat.vector() - start).tolist())
        model.close()
    assert changes[0] == changes[1]


@pytest.mark.parametrize(("mine", "weight"), [([0], 0), ([0, 1], 3), ([2], 2)])
def test_a_worker_counts_by_the_samples_that_are_left(
    tmp_path: Path, mine: list[int], weight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(tmp_path, workers=2)
    told = []
    monkeypatch.setattr(model, "_mine", lambda _: mine)
    monkeypatch.setattr(model._merging, "step", lambda server, step, samples, loss: told.append(samples))
    model.step(None, 1, False)  # type: ignore[arg-type]
    assert told == [weight]
    assert not weight or model.counted == weight
    model.close()


def test_a_region_whose_samples_are_all_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path)
    monkeypatch.setattr(model, "_mine", lambda _: [0])
    with pytest.raises(GeofedError, match="all samples that dataset gives for round 1 of clients are None"):
        model.step(None, 1, False)  # type: ignore[arg-type]
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"steps": 1}, {"epochs": 2}, {"steps": 40}], ids=str)
def test_only_blocks_of_the_next_batches_are_read(
    tmp_path: Path, how: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block has samples of all clients."""
    pa = pytest.importorskip("pyarrow", reason="needs geofed[data]")
    import pyarrow.parquet as pq

    from region_agent.worker.data import streamed

    monkeypatch.setattr(streamed, "SMALL_BYTES", 0)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": np.arange(400), "who": np.arange(400) % 4}), path, row_group_size=4)
    files = [ShardFile(name="a.parquet", path=str(path), size=path.stat().st_size)]
    spec = check_format(FormatSpec.model_validate({"kind": "parquet", "clients": {"column": "who"}}))
    rows = Rows(spec, files, Indexes(tmp_path / "kept").of(spec, files))
    assert len(rows.index) == 100
    clients = ClientSampler(Streamed(rows, rows, 1), 1, "east", ClientRounds(fraction=1.0, batch=2, **how))
    plain = ClientSampler(_Ids(np.arange(400) % 4), 1, "east", ClientRounds(fraction=1.0, batch=2, **how))
    for client in range(4):
        expected = list(plain.batches(client, 1))
        found = []
        for indices in clients.batches(client, 1, range(client + 1, 4)):
            assert len(rows._held) <= 4, "two batches of two samples"
            clients.batch(indices, 0)
            assert len(rows._held) <= 4
            found.append(indices)
        assert found == expected
    rows.close()


class _Ids:
    def __init__(self, clients: object) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)  # type: ignore[arg-type]
