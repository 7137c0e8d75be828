"""Nothing that was trained is lost: models of evaluated rounds, of jobs that run, were cancelled or lost a region."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from support.running import Running, check_succeeded, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def exported(running: Running, job: str, folder: Path, *options: str) -> dict[str, Any]:
    file = folder / "model.safetensors"
    running.federation.control_plane("export", job, "--output-file", str(file), "--yes", *options)
    return dict(safetensors.numpy.load_file(file))


@pytest.mark.parametrize("exchange", ["synchronous", "background"])
def test_a_cancelled_job_is_resumed_from_its_last_evaluated_round(
    running: Running, tmp_path: Path, exchange: str
) -> None:
    job = running.submit(
        "train.end.epochs=200", "wan.interval=10", f"wan.exchange={exchange}", "train.evaluateEvery=2",
        "train.keep=4", "train.best={metric: accuracy, mode: max}",
    )  # fmt: skip
    eventually(lambda: len(running.describe(job)["models"]) == 4, "four models are kept")
    assert "0.weight" in exported(running, job, tmp_path, "--round", "best"), "while it runs"
    running.federation.control_plane("cancel", job, "--yes")
    ended = running.wait_end(job)
    assert ended["state"] == "cancelled"
    *_, last = ended["models"]
    assert last["round"] % 2 == 0
    assert sum(model["best"] for model in ended["models"]) == 1
    kept = exported(running, job, tmp_path)
    assert f"the model of round {last['round']}" in str(running.events(job)) or len(ended["models"]) > 1
    after = running.federation.control_plane("resume", job, "-o", "name").stdout.strip()
    begun = running.describe(after)
    assert (begun["initial_model"]["digest"], begun["initial_model"]["round"]) == (last["digest"], last["round"])
    left = 200 * (1 - last["round"] / ended["rounds"])
    assert begun["spec"]["train"]["end"]["epochs"] == pytest.approx(left)
    running.wait_round(after, 2)
    running.federation.control_plane("finish", after)
    # How far it came depends on how soon it was told to finish.
    check_succeeded(running.wait_end(after), accuracy=0.5)
    final = exported(running, after, tmp_path)
    assert set(final) == set(kept)
    assert any((final[name] != kept[name]).any() for name in kept), "it was trained on"


def test_a_job_that_improves_no_more_ends_with_its_best_model(running: Running) -> None:
    job = running.submit(
        "train.end={epochs: 400, patience: 3}", "task.config.lr=0.0", "wan.interval=10", "train.evaluateEvery=1",
        "train.keep=best", "train.best={metric: accuracy, mode: max}",
    )  # fmt: skip
    ended = running.wait_end(job)
    assert ended["state"] == "succeeded"
    first, last = ended["models"]
    # The first round of which all regions' evaluations are known: where regions report late, that is the second one.
    best = first["round"]
    assert best in (1, 2, 3)
    assert f"accuracy has not improved in 3 evaluations since round {best}," in ended["result"]["ended_early"]
    assert (first["best"], last["best"]) == (True, False)
    assert last["digest"] == ended["result"]["model"]["digest"]
