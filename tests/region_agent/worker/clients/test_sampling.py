"""Which clients train, where and on what: the same however the region's workers are cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from geofed_pb.errors import GeofedError
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.data.shard import joined, split_clients
from region_agent.worker.invocation import ClientRounds
from sync.policy import clients_of_round

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=30)


class Named:
    def __init__(self, clients: Any) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)

    def __getitem__(self, index: int) -> int:
        return index


def _clients(sizes: list[int], **how: Any) -> ClientSampler:
    ids = np.repeat(np.arange(len(sizes)), sizes)
    # Not together, and not in the order of their numbers.
    mixed = np.random.default_rng(0).permutation(ids)
    return ClientSampler(
        Named([f"c{one}" for one in mixed]), 3, "east", ClientRounds(**{"fraction": 1.0, "batch": 2} | how)
    )


@given(sizes=SIZES, fraction=st.floats(0.01, 1.0), workers=st.integers(1, 7), step=st.integers(1, 99))
def test_workers_divide_the_clients_of_a_round(sizes: list[int], fraction: float, workers: int, step: int) -> None:
    clients = _clients(sizes, fraction=fraction, epochs=1)
    drawn = clients.drawn(step)
    assert len(drawn) == clients.of_round == clients_of_round(len(sizes), fraction, 1)
    shares = [clients.share(step, worker, workers) for worker in range(workers)]
    assert sorted(client for share in shares for client in share) == drawn
    assert min(len(share) for share in shares) >= (len(drawn) >= workers), "none is idle while there are clients"
    loads = [sum(clients.samples(client) for client in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)


@given(sizes=SIZES, epochs=st.integers(0, 3), steps=st.integers(1, 11), batch=st.integers(1, 4))
def test_a_client_trains_on_its_own_samples(sizes: list[int], epochs: int, steps: int, batch: int) -> None:
    how = {"epochs": epochs} if epochs else {"steps": steps}
    clients = _clients(sizes, batch=batch, **how)
    seen: Counter[int] = Counter()
    trained = [clients.trained_samples(client) for client in range(clients.total)]
    assert clients.mean_trained_samples() == pytest.approx(sum(trained) / clients.total)
    for client in range(clients.total):
        batches = list(clients.batches(client, 4))
        assert [list(one) for one in clients.batches(client, 4)] == batches
        assert sum(map(len, batches)) == clients.trained_samples(client)
        assert not steps or epochs or len(batches) == steps
        own = {index for one in batches for index in one}
        seen.update(own)
        counts = Counter(index for one in batches for index in one)
        assert max(counts.values()) - min(counts.values()) <= 1
        if epochs:
            assert set(counts.values()) == {epochs}
            assert len(own) == clients.samples(client)
    assert max(seen.values()) == 1, "no sample is of two clients"
    assert len(seen) == sum(sizes) or not epochs


def test_each_round_draws_others_and_no_client_is_preferred() -> None:
    clients = _clients([1] * 50, fraction=0.1, epochs=1)
    drawn = Counter(client for step in range(1, 2001) for client in clients.drawn(step))
    # 200 of each are expected, with a standard deviation of 13.
    assert len(drawn) == 50
    assert all(140 < count < 260 for count in drawn.values())
    other = ClientSampler(Named(list(range(50))), 3, "west", ClientRounds(fraction=0.1, epochs=1, batch=1))
    assert [other.drawn(step) for step in range(1, 9)] != [clients.drawn(step) for step in range(1, 9)]


def test_so_many_clients_train() -> None:
    assert [clients_of_round(100, 0.07, 1), clients_of_round(10, 0.01, 1), clients_of_round(10, 0.1, 4)] == [7, 1, 4]
    assert [clients_of_round(3, 0.1, 8), clients_of_round(1000, 0.0001, 1), clients_of_round(7, 1.0, 1)] == [3, 1, 7]


def test_clients_of_two_shards_are_different_ones() -> None:
    found = split_clients(joined([Named(["a", "b", "a"]), Named(["a", "c"])]))
    assert found is not None
    assert found.tolist() == [0, 1, 0, 2, 3]
    assert split_clients(joined([Named(["a"]), TensorDataset(torch.zeros(2))])) is None
    assert split_clients(Named(torch.tensor([7, 7, 9]))).tolist() == [0, 0, 1]  # type: ignore[union-attr]


class _Short(Named):
    def __len__(self) -> int:
        return 9


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (TensorDataset(torch.zeros(4)), "TASK_INVALID", "do not tell which client a sample is of"),
        (Named([1.5, 2.5]), "TASK_INVALID", "neither integers nor text"),
        (_Short(["a"]), "TASK_INVALID", "has 1 entries for 9 samples"),
        (Named(["a", "b", "c"]), "SAMPLES_MISMATCH", "states 2 clients, the training data have 3"),
    ],
)
def test_data_that_do_not_tell_whose_they_are_are_refused(data: Any, code: str, text: str) -> None:
    with pytest.raises(GeofedError, match=text) as caught:
        ClientSampler(data, 0, "east", ClientRounds(fraction=1.0, epochs=1, batch=1, stated=2))
    assert caught.value.code == code
