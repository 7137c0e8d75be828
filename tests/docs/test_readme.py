"""A new user who follows the README gets what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

PROLOGUE = """
set -eu
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
ip link set lo up 2>/dev/null || true
within() {
    for _ in $(seq 300); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
    echo "not in time: $*" >&2
    exit 1
}
"""
PAUSES = (
    "within geofed list",
    "",
    "within sh -c '[ $(geofed region list -o json | grep -c live) -ge 2 ]'",
    "",
)
"""What has come to be, one after the other, by the time that a reader has read on to the next block."""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _own_network() -> list[str]:
    """A network of the script's own, so that the default ports are free."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return []


@pytest.mark.e2e
def test_every_command_of_the_readme_works_in_its_order(tmp_path: Path) -> None:
    (region,) = _blocks("yaml")
    (tmp_path / "home.yaml").write_text(region)
    blocks = _blocks("sh")
    assert len(blocks) == len(PAUSES), "a block was added: say what a reader has before the next one"
    script = PROLOGUE + "".join(block + pause + "\n" for block, pause in zip(blocks, PAUSES, strict=True))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("GEOFED_CONTEXT", None)
    argv = [*_own_network(), "bash", "-c", script]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000
    assert "succeeded" in done.stdout
    assert "home > office" in done.stdout, "updates crossed between the two regions"


def test_the_region_states_the_samples_that_the_command_deals_it(tmp_path: Path) -> None:
    """A job where they differ fails (`SAMPLES_MISMATCH`)."""
    command = next(line for block in _blocks("sh") for line in block.splitlines() if "deploy.shards" in line)
    argv = [sys.executable, *command.split(">")[0].split()[1:]]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=True)
    dealt = json.loads(done.stdout)
    stated = re.findall(r"(\w+): \{uri: (shards/(\w+)/\S+), samples: (\d+)\}", README)
    assert stated
    for split, path, region, samples in stated:
        assert (dealt[region][split]["path"], dealt[region][split]["samples"]) == (path, int(samples))


def test_the_commands_of_make_are_there() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]
    named = {name for text in documents for name in re.findall(r"(?:^    |`)make ([a-z]+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= named <= targets
