"""What a task's `metrics` returns: numbers and histograms; and tasks of jobs that train nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.modules import drop_task_modules
from region_agent.worker.evaluation import load_evaluated
from region_agent.worker.measures import measure, numbers
from sync.histograms import Histogram

VALUES = torch.tensor([0.05, 0.15, 0.15, 0.95, 1.0])
EXPECTED = Histogram(tuple(round(0.1 * at, 1) for at in range(11)), counts=(1, 2, 0, 0, 0, 0, 0, 0, 0, 2))


@pytest.mark.parametrize(
    "value",
    [
        torch.histogram(VALUES, 10, range=(0.0, 1.0)),
        np.histogram(VALUES.numpy(), np.linspace(0, 1, 11).round(1)),
        (EXPECTED.counts, list(EXPECTED.edges)),
    ],
    ids=["torch", "numpy", "lists"],
)
def test_histograms_of_numbers(value: Any) -> None:
    found = measure("x", value)
    assert isinstance(found, Histogram)
    assert (found.counts, found.categories, found.withheld) == (EXPECTED.counts, (), 0)
    assert found.edges == pytest.approx(EXPECTED.edges, abs=1e-9)


def test_histograms_of_levels_and_numbers() -> None:
    assert measure("y", Counter("abba!b")) == Histogram(categories=("b", "a", "!"), counts=(3, 2, 1))
    assert measure("y", {1: torch.tensor(4)}) == Histogram(categories=("1",), counts=(4,))
    assert measure("y", {}) == Histogram()
    labels = Counter()
    labels.update(torch.tensor([3, 3, 4]))
    assert measure("y", labels) == Histogram(categories=("3", "4"), counts=(2, 1))
    assert measure("y", {1: 3, "1": 4}) == Histogram(categories=("1",), counts=(7,))
    assert measure("y", torch.tensor(0.5)) == 0.5
    assert numbers({"a": 1.0}) == {"a": 1.0}
    with pytest.raises(GeofedError, match="a histogram as a; in a pipeline") as caught:
        numbers({"a": Histogram()})
    assert caught.value.code == "TASK_INVALID"


@pytest.mark.parametrize(
    "value",
    [
        ((1, 2), (0, 1)), ((1, 0.5), (0, 1, 2)), ((1, -1), (0, 1, 2)), ((1, 1), (0, 1, 1)), (1, 2, 3), {"a": "many"},
        ((float("nan"),), (0, 1)), {"a": float("inf")}, ([1], [0, "high"]),
    ],
)  # fmt: skip
def test_what_is_no_histogram_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(GeofedError, match="no valid histogram as age") as caught:
        measure("age", value)
    assert caught.value.code == "TASK_INVALID"


TASK = """
import torch


def model(config):
    made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    made[0].bias.requires_grad_(False)
    with torch.no_grad():
        made[0].weight[0, 0] = float("nan")
    return made


def loss(model, batch):
    raise RuntimeError("is not called")


def optimizer(parameters, config):
    raise RuntimeError("is not called")


def metrics(model, batches):
    return {"count": sum(len(batch) for batch in batches)}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def loaded(text: str) -> Any:
        (tmp_path / "task.py").write_text(text)
        return load_evaluated(tmp_path, "task.py", {})

    yield loaded
    drop_task_modules()


def test_the_step_of_an_evaluation_changes_no_bit(load: Any) -> None:
    task = load(TASK)
    model = task.model()
    before = {name: held.clone() for name, held in model.state_dict().items()}
    optimizer = task.optimizer(one for one in model.parameters() if one.requires_grad)
    loss = task.loss(model, torch.randn(4, 3))
    loss.backward()
    optimizer.step()
    assert float(loss.detach()) == 0.0
    assert all(held.numpy().tobytes() == before[name].numpy().tobytes() for name, held in model.state_dict().items())
    assert task.schedule(model.parameters()) is None
    assert task.metrics(model, [torch.zeros(4, 3), torch.zeros(2, 3)]) == {"count": 6.0}


def test_a_frozen_model_is_measured(load: Any) -> None:
    text = TASK.replace("    return made\n", "    return made.requires_grad_(False)\n")
    task = load(text)
    model = task.model()
    assert all(one.requires_grad for one in model.parameters())
    task.loss(model, None).backward()
    assert all(float(one.grad.abs().max()) == 0 for one in model.parameters())


def test_a_task_may_measure_its_data_alone(load: Any) -> None:
    task = load("def metrics(model, batches):\n    return {}\n")
    task.loss(task.model(), None).backward()


def test_a_task_that_measures_nothing_is_refused(load: Any) -> None:
    with pytest.raises(GeofedError, match="defines neither metrics nor loss") as caught:
        load("def model(config): ...\n")
    assert caught.value.code == "TASK_INVALID"


def test_a_model_without_floating_point_numbers_is_refused(load: Any) -> None:
    integers = "torch.nn.Parameter(torch.ones(2, dtype=torch.int64), False)"
    text = f"import torch\ndef model(config):\n    return torch.nn.ParameterList([{integers}])\n"
    task = load(text + "def metrics(model, batches):\n    return {}\n")
    with pytest.raises(GeofedError, match="has no parameter of floating-point numbers") as caught:
        task.model()
    assert caught.value.code == "TASK_INVALID"
