"""A robust rule in the background, where the mean is led away: one region of three trains hard on wrong labels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import Federation, Running, check_succeeded, digits_sites

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REGIONS = ("frankfurt", "shanghai", "virginia")
EVEN = 1000.0
"""Of the Dirichlet distribution of labels: the regions' data are alike, as the rules' papers suppose."""
HOSTILE = """

_dataset, _loss, _wrong = dataset, loss, [0]


def dataset(uri, split, config):
    _wrong[0] |= "virginia" in str(uri)
    return _dataset(uri, split, config)


def loss(model, batch):
    x, y = batch
    return 20 * _loss(model, (x, (y + 1) % 10)) if _wrong[0] else _loss(model, batch)
"""
"""At the end of a task: a region learns labels that are wrong by one, with twenty times the gradient."""
SETTINGS = (
    "train.workers=1",
    "train.end.epochs=10",
    "train.evaluateEvery=0",
    "wan.interval=10",
    "wan.exchange=background",
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Federation(tmp_path / "federation", digits_sites(tmp_path, REGIONS, alpha=EVEN)) as federation:
        yield Running(federation, tmp_path)


def test_the_median_learns_beside_a_region_that_leads_the_mean_away(running: Running) -> None:
    """Without the attack the mean reaches 0.99 here."""
    accuracy = {}
    task = (running.job_folder() / "task.py").read_text() + HOSTILE
    for rule in ("none", "median"):
        ended = running.wait_end(running.submit(*SETTINGS, f"wan.robust={rule}", task=task))
        check_succeeded(ended, accuracy=0.0)
        assert ended["plan"]["wan_settings"]["background"]
        accuracy[rule] = ended["result"]["metrics"]["accuracy"]
    assert accuracy["none"] < 0.75, accuracy
    assert accuracy["median"] > 0.93, accuracy
