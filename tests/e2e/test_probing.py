"""The first plan of a task that nobody has run, through the real daemons, and the run that tests it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.running import Federation, Running, check_succeeded, digits_sites, named

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REGIONS = ("frankfurt", "virginia")


def explained(running: Running, *settings: str) -> Any:
    chosen = [part for setting in settings for part in ("--set", setting)]
    job = str(running.job_folder() / "job.yaml")
    ran = running.federation.control_plane("explain", job, *chosen, "-o", "json", timeout=60)
    return json.loads(ran.stdout)["data"]


def times_probed(running: Running) -> int:
    """As the control plane's own log has it."""
    return (running.federation.folder / "control-plane.log").read_text().count("was probed in")


def test_a_task_is_probed_before_its_first_plan_and_the_run_sends_what_was_predicted(tmp_path: Path) -> None:
    sites = digits_sites(tmp_path, REGIONS, workers=2)
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        first = explained(running)["estimate"]
        assert first["model_basis"] == "counted"
        assert first["basis"] == "likened", "one region has made a few steps; nobody has stated anything of the other"
        assert first["start_basis"] == "probed"
        assert first["wan_bytes"]["high"] < 1.7 * first["wan_bytes"]["low"]
        assert explained(running)["estimate"]["model_bytes"] == first["model_bytes"]
        assert times_probed(running) == 1
        described = running.wait_end(running.submit())
        check_succeeded(described)
        assert described["plan"]["estimate"]["model_bytes"] == first["model_bytes"]
        result = described["result"]
        sent = result["measured"]["wan_bytes"]
        assert result["predicted"]["wan_bytes"]["low"] <= sent <= result["predicted"]["wan_bytes"]["high"]
        assert times_probed(running) == 1
        later = explained(running)["estimate"]
        assert (later["basis"], later["model_basis"]) == ("measured", "measured")
        assert later["model_bytes"] == first["model_bytes"], "what was counted is what has travelled"


def test_a_plan_warns_of_batch_statistics_that_regions_share(running: Running) -> None:
    task = f"""{named("batch statistics")}

_model = model


def model(config):
    layers = list(_model(config))
    return torch.nn.Sequential(layers[0], torch.nn.BatchNorm2d(layers[0].out_channels), *layers[1:])
"""
    job = str(running.job_folder(task) / "job.yaml")

    def warned(*settings: str) -> bool:
        ran = running.federation.control_plane("explain", job, *settings, "-o", "json", timeout=60)
        return "the model normalises by batches (1), whose" in str(json.loads(ran.stdout)["data"]["warnings"])

    assert warned()
    assert not warned("--set", "train.local=['1.*']")
