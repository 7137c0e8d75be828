"""What `control-plane init` writes: a job and regions that run as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML
from support.commands import run_here
from support.running import Federation, Running, check_succeeded

from deploy.local import RegionSite

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def _site(file: Path) -> RegionSite:
    """The region of a file, whose relative paths would be those of another folder."""
    whole = YAML(typ="safe").load(file.read_text())
    for held in whole["datasets"].values():
        for split in held["splits"].values():
            split["uri"] = str(file.parent / split["uri"])
    return RegionSite(whole.pop("metadata")["name"], whole)


def test_what_init_writes_runs(tmp_path: Path) -> None:
    made = run_here("init", str(tmp_path / "first"), "--no-input", "--workers", "1")
    assert made.returncode == 0, made.stderr
    job, *regions = made.stdout.split()
    with Federation(tmp_path / "federation", [_site(Path(file)) for file in regions]) as federation:
        running = Running(federation, tmp_path)
        submitted = federation.control_plane("submit", job, "--set", "train.end.epochs=5", "-o", "name").stdout.strip()
        described = running.wait_end(submitted)
    assert [part["region"] for part in described["partitions"]] == ["home", "office"]
    described["result"]["usd"] = 1.0  # the region files state no prices
    check_succeeded(described, accuracy=0.5)
