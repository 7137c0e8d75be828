"""A new user who follows the README gets what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.shell import blocks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_region_states_the_samples_that_the_command_deals_it(tmp_path: Path) -> None:
    """A job where they differ fails (`SAMPLES_MISMATCH`)."""
    command = next(line for block in blocks(README, "sh") for line in block.splitlines() if "deploy.shards" in line)
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
