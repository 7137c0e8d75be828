"""Differential privacy from a job file to its result: what is told, what is spent, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.failures import command
from support.running import UNHURRIED, Federation, Running, check_succeeded, digits_sites

from sync.privacy import Release, epsilon_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROUNDS = ("train.workers=1", "train.end.epochs=6", "wan.interval=10", "train.evaluateEvery=0", "train.seed=18")
"""A seed of its own: a job of other tests over fewer regions, from the same model, would tell updates."""
REGIONS = ("bergen", "oslo", "trondheim")
SECURE = "privacy.secureAggregation=true"


def private(level: str = "region", **more: Any) -> str:
    wanted = {"level": level, "delta": 1e-4, "clipNorm": 1.0, **more}
    return f"privacy.differential={json.dumps(wanted)}"


LITTLE_NOISE = private(noiseMultiplier=0.01)
"""So little that the job learns as much as without; it hides nothing, which its epsilon tells."""


@pytest.mark.parametrize("secure", [False, True])
def test_a_job_with_noise_tells_its_cost_before_and_after(secure: bool, running: Running) -> None:
    file = str(running.job_folder() / "job.yaml")
    # Many rounds, since the change of each is clipped.
    settings = (*ROUNDS, "wan.interval=5", LITTLE_NOISE, f"privacy.secureAggregation={str(secure).lower()}")
    shown = running.federation.control_plane("explain", file, *(p for s in settings for p in ("--set", s))).stdout
    assert "differential privacy of regions: noise 0.01 x norm 1, epsilon" in shown, shown
    job = running.submit(*settings)
    ended = running.wait_end(job)
    check_succeeded(ended)
    planned = ended["plan"]["wan_settings"]["epsilon"]
    for region in ended["result"]["regions"]:
        assert region["privacy"] == {"epsilon": planned, "delta": 1e-4, "releases": ended["result"]["rounds"]}
        assert region["loss"] is None
    assert f"epsilon {planned:.3g} at delta 0.0001 spent in virginia" in running.federation.control_plane(
        "describe", job
    ).stdout  # fmt: skip
    assert not [event["data"]["loss"] for event in running.events(job) if (event["data"] or {}).get("loss")]
    state = running.federation.region_state("virginia") / "state"
    rows = json.loads(command("region-agent", "privacy", "--state-dir", state, "-o", "json").stdout)["data"]["jobs"]
    assert [(row["spent"], row["epsilon"], row["open"]) for row in rows if row["job"] == job] == [
        (ended["result"]["rounds"], planned, False)
    ]


def test_noise_for_a_small_epsilon_leaves_nothing_to_learn(running: Running) -> None:
    """The same job, with the noise that protects a region among three: the price is shown, not hidden."""
    settings = (*ROUNDS, private(epsilon=20, clipNorm=0.05), "task.config.lr=0.01")
    ended = running.wait_end(running.submit(*settings))
    assert ended["state"] == "succeeded", ended["error"]
    assert ended["result"]["regions"][0]["privacy"]["epsilon"] == pytest.approx(20, rel=1e-3)
    assert math.isfinite(ended["result"]["metrics"]["accuracy"])


@pytest.fixture
def owned(tmp_path: Path) -> Federation:
    """Three regions, of which Oslo has a budget."""
    sites = digits_sites(tmp_path, REGIONS)
    (oslo,) = (site for site in sites if site.name == "oslo")
    oslo.config["datasets"]["digits"]["privacy"] = {"epsilon": 60, "delta": 1e-4}
    return Federation(tmp_path / "federation", sites)


def set_budget(federation: Federation, epsilon: float) -> None:
    """Oslo's operator writes another budget, and starts the agent again."""
    federation.kill("oslo")
    file = federation.region_state("oslo") / "region.yaml"
    config = json.loads(file.read_text())
    config["datasets"]["digits"]["privacy"]["epsilon"] = epsilon
    file.write_text(json.dumps(config))
    federation.start_agent("oslo")
    federation.wait_connected(["oslo"])


def failed(ended: dict[str, Any], code: str, text: str) -> None:
    assert ended["state"] == "failed", ended["state"]
    assert ended["error"]["code"] == code, ended["error"]
    assert "oslo" in ended["error"]["message"]
    assert text in ended["error"]["message"], ended["error"]["message"]


def test_the_owner_of_the_data_decides_also_while_a_job_runs(owned: Federation, tmp_path: Path) -> None:
    calm = ("task.config.lr=0.001", private(epsilon=50, clipNorm=0.01))
    with owned as federation:
        running = Running(federation, tmp_path)
        ended = running.wait_end(running.submit(*ROUNDS))
        failed(ended, "FORBIDDEN", "with differential privacy only")
        first = running.wait_end(running.submit(*ROUNDS, *calm))
        assert first["state"] == "succeeded", first["error"]
        told = {region["name"]: region["metrics"] for region in first["result"]["regions"]}
        assert told.pop("oslo") == {}, "metrics have no noise"
        assert len(told) == 2
        assert all(told.values())
        ended = running.wait_end(running.submit(*ROUNDS, *calm))
        failed(ended, "PRIVACY_EXHAUSTED", "50 is spent or reserved, 60 allowed")

        set_budget(federation, 200)
        job = running.submit(*ROUNDS, *calm, "train.end.epochs=60", "wan.interval=5", task=UNHURRIED)
        running.wait_round(job, 2)
        set_budget(federation, 51)
        ended = running.wait_end(job)
        failed(ended, "PRIVACY_EXHAUSTED", "releases of digits")
        state = federation.region_state("oslo") / "state"
        shown = json.loads(
            command(
                "region-agent", "privacy", "--state-dir", state, "--config", state.parent / "region.yaml", "-o", "json"
            ).stdout
        )["data"]
        spent = {row["job"]: row["spent"] for row in shown["jobs"]}
        assert 2 <= spent[job] < ended["plan"]["rounds"]
        (account,) = shown["datasets"]
        assert account["budget"] == 51

        federation.kill("oslo")
        shutil.rmtree(state / "privacy")
        (state / "privacy.jobs").unlink()
        federation.start_agent("oslo")
        federation.wait_connected(["oslo"])
        failed(running.wait_end(running.submit(*ROUNDS, *calm)), "STATE_INVALID", "is lost")
        assert account["epsilon"] > 50

        set_budget(federation, 900)
        (state / "privacy" / "ledger.json").write_text("{}")
        ended = running.wait_end(running.submit(*ROUNDS, *calm))
        failed(ended, "STATE_INVALID", "cannot be read")


def test_a_job_learns_with_noise_in_every_step(running: Running) -> None:
    settings = (
        *ROUNDS, "train.workers=2", "train.end.epochs=12", "task.config.lr=0.5",
        "task.config.momentum=0.0", private("sample", epsilon=8),
    )  # fmt: skip
    file = str(running.job_folder() / "job.yaml")
    shown = running.federation.control_plane("explain", file, *(p for s in settings for p in ("--set", s))).stdout
    assert "differential privacy of samples: noise" in shown, shown
    job = running.submit(*settings)
    ended = running.wait_end(job)
    check_succeeded(ended, 0.5)
    parts = {part["region"]: part for part in ended["plan"]["partitions"]}
    worst = 0.0
    for region in ended["result"]["regions"]:
        part, spent = parts[region["name"]], region["privacy"]
        release = Release(
            ended["plan"]["wan_settings"]["noise"], min(1.0, part["workers"] * part["batch"] / part["samples"])
        )
        assert spent["releases"] == ended["plan"]["rounds"] * part["steps_per_round"] == region["steps"]
        assert spent["epsilon"] == pytest.approx(epsilon_of([(release, spent["releases"])], 1e-4))
        # How many samples were drawn is not told.
        assert region["samples"] == part["workers"] * part["batch"] * region["steps"]
        worst = max(worst, spent["epsilon"])
    assert worst == pytest.approx(8, rel=1e-3)


def test_batch_norm_has_no_gradient_of_a_sample(running: Running) -> None:
    task = (running.job_folder() / "task.py").read_text()
    with_norm = (
        task + "\n_plain = model\ndef model(config):\n    return nn.Sequential(_plain(config), nn.BatchNorm1d(10))\n"
    )
    for level, text in (("sample", "1 is a BatchNorm1d"), ("region", "1.running_mean is not trained by gradients")):
        ended = running.wait_end(running.submit(*ROUNDS, private(level, noiseMultiplier=1), task=with_norm))
        assert (ended["state"], ended["error"]["code"]) == ("failed", "TASK_INVALID")
        assert text in ended["error"]["message"]
