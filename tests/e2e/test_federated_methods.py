"""Methods of federated learning from a job file to its result: proximal term, server optimisers, robust rules."""

from __future__ import annotations

import pytest
from support.running import Running, check_succeeded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

LIAR = """

_dataset = dataset


def dataset(uri, split, config):
    data = _dataset(uri, split, config)
    if split == "train" and "virginia" in str(uri):
        x, y = data.tensors
        data = TensorDataset(x, (y + 1) % 10)
    return data
"""
ROUNDS = ("train.workers=1", "train.end.epochs=8", "wan.interval=10", "train.evaluateEvery=0")


@pytest.mark.parametrize("settings", [("fedprox", "mu: 0.05"), ("fedadam", "lr: 0.03")])
def test_a_job_learns_with(settings: tuple[str, str], running: Running) -> None:
    policy, outer = settings
    job = running.submit(*ROUNDS, f"wan.policy={policy}", f"wan.outer={{{outer}}}", "function.slice=1s")
    ended = running.wait_end(job)
    check_succeeded(ended)
    assert ended["plan"]["wan_policy"] == policy


def test_regions_with_different_numbers_of_local_steps_are_normalised(running: Running) -> None:
    ended = running.wait_end(running.submit(*ROUNDS, "wan.policy=fednova", "function.slice=1s"))
    check_succeeded(ended)
    assert ended["plan"]["wan_policy"] == "fednova"
    steps = {part["steps_per_round"] for part in ended["plan"]["partitions"]}
    assert len(steps) > 1, "the regions' shards are unequal"


def test_a_robust_rule_withstands_a_region_with_wrong_labels(running: Running) -> None:
    task = (running.job_folder() / "task.py").read_text() + LIAR
    accuracy = {}
    for rule in ("none", "median"):
        ended = running.wait_end(running.submit(*ROUNDS, "wan.exchange=synchronous", f"wan.robust={rule}", task=task))
        check_succeeded(ended, accuracy=0.0)
        accuracy[rule] = ended["result"]["metrics"]["accuracy"]
    assert accuracy["median"] > accuracy["none"] + 0.05, accuracy
    assert accuracy["median"] > 0.8, accuracy
