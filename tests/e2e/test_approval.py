"""A region that decides whose code runs on its data, over the real daemons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.failures import command
from support.running import Federation, Running, digits_sites, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def agents(federation: Federation, *arguments: str) -> str:
    state = federation.region_state("oslo") / "state"
    done = command("region-agent", *arguments, "--state-dir", state)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_waits_until_the_region_lets_its_users_code_run(tmp_path: Path) -> None:
    with Federation(tmp_path / "federation", digits_sites(tmp_path, ["oslo"])) as federation:
        federation.kill("oslo")
        key = federation.control_plane("user", "key").stdout.strip()
        file = federation.region_state("oslo") / "region.yaml"
        config = json.loads(file.read_text())
        config["policy"] = {"allowUsers": {"operator": key}, "approve": "first-run", "roles": {"ward": []}}
        config["datasets"]["scans"] = config["datasets"]["digits"] | {"allow": {"roles": ["ward"]}}
        file.write_text(json.dumps(config))
        federation.start_agent("oslo")
        federation.wait_connected(["oslo"])
        running = Running(federation, tmp_path)
        refused = running.wait_end(running.submit("train.end.epochs=1", "data.dataset=scans"))
        assert (refused["state"], refused["error"]["code"]) == ("failed", "FORBIDDEN")
        assert "region oslo runs no code of user operator on scans" in refused["error"]["message"]
        job = running.submit("train.end.epochs=2")
        eventually(lambda: job in agents(federation, "pending"), "the job waits for approval", 30)
        assert f"geofed agent approve {job}" in running.describe(job)["condition"]
        eventually(lambda: "waiting" in agents(federation, "status"), "the status says so")
        agents(federation, "approve", job)
        assert running.wait_end(job)["state"] == "succeeded"
        assert running.wait_end(running.submit("train.end.epochs=1"))["state"] == "succeeded", "the same code"
        other = running.submit("train.end.epochs=1", task=(running.job_folder() / "task.py").read_text() + "\n# more\n")
        eventually(lambda: other in agents(federation, "pending"), "other code waits again", 30)
        federation.control_plane("cancel", other, "--yes")
        eventually(lambda: other not in agents(federation, "pending"), "it waits no more", 30)
        assert running.wait_end(other)["state"] == "cancelled"
