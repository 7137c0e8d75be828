"""Counting labels: the layouts that are known, and what is left alone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from region_agent.worker.data.streamed import Streamed
from region_agent.worker.labels import MOST_SAMPLES, label_counts, labels_of

X = torch.zeros(3, 2)
Y = torch.tensor([1, 0, 1])


@pytest.mark.parametrize(
    "batch",
    [
        (X, Y), [X, Y], (X, Y.to(torch.uint16)), {"x": X, "label": Y}, {"labels": Y}, {"target": Y}, {"targets": Y},
        {"y": Y.to(torch.uint8)},
    ],
)  # fmt: skip
def test_usual_layouts_are_known(batch: Any) -> None:
    assert labels_of(batch) == [1, 0, 1]


@pytest.mark.parametrize(
    "batch",
    [
        X, (X, Y, Y), (X, Y.float()), (X, Y.reshape(3, 1)), {"answer": Y}, (X, Y - 1), (X, Y + 99),
        (X, ["a", "b", "a"]), (X, torch.zeros(0, dtype=torch.int64)), None,
    ],
)  # fmt: skip
def test_all_else_has_no_labels(batch: Any) -> None:
    assert labels_of(batch) is None


def test_samples_are_drawn_once_each_up_to_a_number_and_a_time() -> None:
    x, y = torch.zeros(50, 2), torch.arange(50) % 5
    far = time.monotonic() + 60
    assert label_counts(TensorDataset(x, y), 1, 8, None, far) == dict.fromkeys(range(5), 10)
    many = TensorDataset(torch.zeros(3000, 1), torch.arange(3000) // 1500)
    counts = label_counts(many, 1, 64, None, far)
    assert sum(counts.values()) == MOST_SAMPLES
    assert counts[0] == pytest.approx(MOST_SAMPLES / 2, rel=0.1), "not the first samples of the split"
    assert sum(label_counts(many, 1, 64, None, 0.0).values()) == 64
    assert label_counts(TensorDataset(x, y.float()), 1, 8, None, far) == {}
    nothing: Any = [None] * 9
    assert label_counts(nothing, 1, 8, None, far) == {}


def test_a_split_that_is_not_shuffled_as_a_whole_is_left_alone() -> None:
    order = SimpleNamespace(small=False)

    class Large(Streamed):
        def __init__(self) -> None: ...

        def order(self, seed: Any, batch: int) -> Any:
            return order

    assert label_counts(Large(), 1, 8, None, time.monotonic() + 60) == {}
