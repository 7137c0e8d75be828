"""A job that trains nothing: histograms of the regions' data, whose small counts stay in their region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.offered import counted, offered
from support.running import Running, eventually

from sync.privacy import Release, epsilon_of
from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TASK = """
from collections import Counter

import numpy as np
import torch



def dataset(uri, split, config):
    global EDGES
    EDGES = torch.tensor(config["edges"])
    held = np.load(uri)
    return list(zip(held["age"].tolist(), held["ward"].tolist()))


def metrics(model, batches):
    ages, wards, count = torch.zeros(len(EDGES) - 1), Counter(), 0
    for age, ward in batches:
        ages += torch.histogram(age.float().cpu(), EDGES).hist
        wards.update(ward)
        count += len(age)
    return {"age": (ages, EDGES), "ward": wards, "mean": 1.0}
"""
DRAWN = {"shanghai": 60, "virginia": 45}
SETTINGS = (
    "task.config={edges: [0.0, 20.0, 40.0, 60.0, 100.0]}", "train.end={steps: 0}", "train.workers=2", "train.batch=8",
    "train.evalBatch=7",
)  # fmt: skip


def _patients(region: str) -> dict[str, Any]:
    rng = np.random.default_rng(PAIR.index(region))
    ward = np.where(np.arange(DRAWN[region]) < 3, f"rare in {region}", rng.choice(["a", "b"], DRAWN[region]))
    return {"age": rng.integers(0, 100, DRAWN[region]), "ward": ward}


def _offer(folder: Path, name: str, least: int | None) -> dict[str, Any]:
    file = folder / f"{name}.npz"
    np.savez(file, **_patients(name))
    splits = {split: {"uri": str(file), "samples": DRAWN[name]} for split in ("train", "test")}
    return {"splits": splits} | ({"minimumCount": least} if least else {})


def test_histograms_are_summed_and_small_counts_stay(running_pair: Running, tmp_path: Path) -> None:
    first, second = PAIR
    held = {first: _offer(tmp_path, first, 5), second: _offer(tmp_path, second, None)}
    with offered(running_pair, held, "patients"):
        eventually(lambda: all(counted(running_pair, name, "patients") for name in PAIR), "the data are offered", 20)
        ended = running_pair.wait_end(running_pair.submit("data.dataset=patients", *SETTINGS, task=TASK))
    assert ended["state"] == "succeeded", ended["error"]
    result = ended["result"]
    ages = np.concatenate([_patients(name)["age"] for name in PAIR])
    counts, edges = np.histogram(ages, [0, 20, 40, 60, 100])
    age = result["histograms"]["age"]
    assert (age["edges"], age["counts"], age["withheld"]) == (edges.tolist(), counts.tolist(), 0)
    assert age["total"] == sum(DRAWN.values())
    assert abs(age["quantiles"]["0.5"] - float(np.median(ages))) <= 20
    # What the first region says of the ward with 3 patients: that there is one, and no more.
    wards = {region["name"]: region["histograms"]["ward"] for region in result["regions"]}
    assert f"rare in {second}" in wards[second]["categories"]
    assert f"rare in {first}" not in str(ended)
    assert wards[first]["withheld"] > 0
    told = running_pair.federation.control_plane("describe", ended["id"]).stdout
    assert "105 samples, median" in told
    assert f"rare in {first}" not in told


def test_fewer_samples_than_the_minimum_are_not_measured(running_pair: Running, tmp_path: Path) -> None:
    first, second = PAIR
    held = {first: _offer(tmp_path, first, DRAWN[first] + 1), second: _offer(tmp_path, second, None)}
    with offered(running_pair, held, "few"):
        eventually(lambda: all(counted(running_pair, name, "few") for name in PAIR), "the data are offered", 20)
        ended = running_pair.wait_end(running_pair.submit("data.dataset=few", *SETTINGS, task=TASK))
    assert ended["state"] == "succeeded", ended["error"]
    measured = {region["name"]: region["metrics"] for region in ended["result"]["regions"]}
    assert measured == {first: {}, second: {"mean": 1.0}}
    assert ended["result"]["histograms"]["age"]["total"] == DRAWN[second]
    texts = [event["text"] for event in running_pair.events(ended["id"]) if event["kind"] == "partition.unmeasured"]
    assert any("fewer samples than the region's minimumCount, 61" in text for text in texts)


def test_counts_of_data_with_a_budget_have_noise_that_their_owner_pays_for(
    running_pair: Running, tmp_path: Path
) -> None:
    held = {name: _offer(tmp_path, name, None) for name in PAIR}
    held[PAIR[0]]["privacy"] = {"epsilon": 6, "delta": 1e-5}
    # The histogram's own name is the key of its bins; the categories are those that the job knows of.
    task = TASK.replace('config["edges"]', 'config["age"]').replace(
        "wards.update(ward)", 'wards.update(one for one in ward if one in ("a", "b"))'
    )
    settings = (
        "data.dataset=counted", "task.config={age: [0.0, 20.0, 40.0, 60.0, 100.0], ward: [a, b, c]}", *SETTINGS[1:],
        "privacy.differential={level: sample, noiseMultiplier: 1, delta: 1e-5}",
    )  # fmt: skip
    with offered(running_pair, held, "counted"):
        eventually(lambda: all(counted(running_pair, name, "counted") for name in PAIR), "the data are offered", 20)
        plain = running_pair.wait_end(running_pair.submit(*settings[:-1], task=task))
        ended = running_pair.wait_end(running_pair.submit(*settings, task=task))
        again = running_pair.wait_end(running_pair.submit(*settings, task=task))
    assert (plain["state"], plain["error"]["code"]) == ("failed", "FORBIDDEN")
    assert ended["state"] == "succeeded", ended["error"]
    expected = epsilon_of([(Release(1.0), 1)], 1e-5)
    assert ended["plan"]["wan_settings"]["epsilon"] == pytest.approx(expected)
    for region in ended["result"]["regions"]:
        assert region["privacy"] == {"epsilon": pytest.approx(expected), "delta": 1e-5, "releases": 1}
        assert region["metrics"] == {}, "a mean has no noise"
        assert region["histograms"]["ward"]["categories"][-1] == "c" or region["histograms"]["ward"]["counts"][-1] < 9
    truth, _ = np.histogram(np.concatenate([_patients(name)["age"] for name in PAIR]), [0, 20, 40, 60, 100])
    age = ended["result"]["histograms"]["age"]["counts"]
    # Two regions' noise for two histograms each: a deviation of 2, of which six are as good as never exceeded.
    assert all(abs(noisy - true) <= 12 for noisy, true in zip(age, truth.tolist(), strict=True))
    assert "noise 1 on counts of a histogram" in running_pair.federation.control_plane("describe", ended["id"]).stdout
    assert (again["state"], again["error"]["code"]) == ("failed", "PRIVACY_EXHAUSTED")
