"""`geofed profile` through the real daemons, and the plan that follows it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.offered import counted, offered
from support.running import Running, check_succeeded, eventually, named
from support.stores import RedisServer

from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


def test_a_profile_measures_the_task_and_the_first_run_is_planned_by_it(
    running_redis: Running, redis: RedisServer, tmp_path: Path
) -> None:
    running, federation = running_redis, running_redis.federation
    picture = tmp_path / "front.svg"
    job = str(running.job_folder(named("profile")) / "job.yaml")
    ran = federation.control_plane("profile", job, "--plot", str(picture), "-o", "json", timeout=120)
    told = json.loads(ran.stdout)["data"]["regions"]
    assert set(told) == set(PAIR)
    for one in told.values():
        assert one["channel"]["name"] == "redis"
        assert one["channel"]["put_usd"] == 5e-6
        assert one["steps"][-1]["seconds"] > 0
        assert one["steps"][0]["peak_mb"] > 20
        assert one["noise_samples"] is None or one["noise_samples"] > 0
        assert one["usd"] > 0
        assert one["chosen"]["workers"] in (1, 2, 3)
        assert len(one["front"]) >= 1
    assert picture.read_text().startswith("<svg")
    plan = json.loads(federation.control_plane("explain", job, "-o", "json").stdout)["data"]
    assert plan["estimate"]["basis"] == "profiled"
    known = federation.control_plane("submit", job, "--profile", "--dry-run", "-o", "json")
    assert json.loads(known.stdout)["data"]["partitions"] == plan["partitions"]
    assert "measur" not in known.stderr, "it is known already"
    # Nothing of it is left in the channel.
    assert not redis.command("KEYS", "*profile*").strip()
    # Less memory than the usual is enough for it, and the run that is planned so has its model.
    assert all(part["memory_mb"] < 1024 for part in plan["partitions"])
    described = running.wait_end(running.submit("train.workers=2", "train.end.epochs=6"))
    check_succeeded(described)
    assert described["plan"]["collective"] != "auto"
    for region in described["result"]["regions"]:
        assert region["predicted_step_seconds"] > 0
        assert region["step_seconds"] > 0
        assert region["merge_seconds"] > 0
    # The merges of the run mend the model of the next plan.
    again = json.loads(federation.control_plane("explain", job, "-o", "json", "--set", "train.workers=2").stdout)
    was = {part["region"]: part["merge_seconds"] for part in described["plan"]["partitions"]}
    assert all(part["merge_seconds"] != was[part["region"]] for part in again["data"]["partitions"])
    # By the profile a published rule can choose, too, and the job runs as it says.
    ruled = running.wait_end(running.submit("objective.method=fasdl", "train.end.epochs=4"))
    assert ruled["state"] == "succeeded", ruled["error"]
    assert ruled["plan"]["collective"] == "k-reduce"
    assert ruled["plan"]["codec"] == "fp32"
    assert "method fasdl" in {one["decision"] for one in ruled["plan"]["alternatives"]}


def _offer(folder: Path, region: str, classes: int, first: int, **rules: Any) -> dict[str, Any]:
    """Pictures of noise, 20 of each class from the first on."""
    file = folder / f"{region}-{first}-{classes}.npz"
    y = first + np.repeat(np.arange(classes), 20)
    x = np.random.default_rng(PAIR.index(region)).integers(0, 256, (len(y), 8, 8)).astype(np.uint8)
    np.savez(file, x=x, y=y)
    return {"splits": {split: {"uri": str(file), "samples": len(y)} for split in ("train", "test")}, **rules}


def test_plans_warn_of_labels_that_differ_between_regions(running_pair: Running, tmp_path: Path) -> None:
    first, second = PAIR
    federation = running_pair.federation
    datasets = {
        "skewed": (_offer(tmp_path, first, 5, 0), _offer(tmp_path, second, 5, 5)),
        "kept": (_offer(tmp_path, first, 5, 0, minimumCount=101), _offer(tmp_path, second, 5, 5)),
    }
    job = str(running_pair.job_folder(named("labels")) / "job.yaml")
    labels: dict[str, dict[str, Any]] = {}

    def warned(name: str, *settings: str) -> list[str]:
        chosen = [part for setting in (f"data.dataset={name}", *settings) for part in ("--set", setting)]
        plan = json.loads(federation.control_plane("explain", job, *chosen, "-o", "json").stdout)["data"]
        return [text for text in plan["warnings"] if "labels differ between regions" in text]

    for name, held in datasets.items():
        with offered(running_pair, dict(zip(PAIR, held, strict=True)), name):
            for region in PAIR:
                eventually(partial(counted, running_pair, region, name), "the data are offered", 20)
            assert bool(warned(name)) == (name == "skewed"), "the first plan knows it from the probe"
            arguments = ("--set", f"data.dataset={name}", "-o", "json")
            told = json.loads(federation.control_plane("profile", job, *arguments, timeout=180).stdout)
            labels[name] = {region: dict(one["labels"]) for region, one in told["data"]["regions"].items()}
            if name != "skewed":
                assert not warned(name)
                continue
            (text,) = warned(name)
            assert f"50 % of those of {first} would have to be others" in text
            for remedy in ("train.local=['*.bias']", "advanced.wan.policy=fedprox", "advanced.wan.interval=1"):
                assert not warned(name, remedy), remedy
    half = dict.fromkeys(map(int, range(5)), 20)
    assert labels["skewed"] == {first: half, second: {label + 5: 20 for label in half}}
    assert labels["kept"][first] == {}
    assert labels["kept"][second] == {label + 5: 20 for label in half}
