"""What puts geofed on machines names commands, options, folders and modules that there are."""

from __future__ import annotations

import configparser
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from support.failures import command

import deploy

DEPLOY = Path(deploy.__file__).parent
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_what_there_is(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text()
    parsed = configparser.ConfigParser(interpolation=None, strict=False)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]  # keys of systemd keep their case
    parsed.read_string(text.replace("\\\n", " "))
    start = parsed["Service"]["ExecStart"].split()
    program, verb, *words = start
    options = command(Path(program).name, verb, "--help").stdout
    assert all(word in options for word in words if word.startswith("--")), words
    assert parsed["Service"]["StateDirectory"] in parsed["Service"]["ExecStart"]
    if shutil.which("systemd-analyze") is None:
        return  # parsed above; systemd's own opinion needs systemd
    stand_in = tmp_path / unit.name
    stand_in.write_text(text.replace(program, "/bin/true"))
    said = subprocess.run(["systemd-analyze", "verify", "--man=no", stand_in], capture_output=True, text=True)
    mine = [line for line in said.stderr.splitlines() if unit.name in line]
    assert not mine, mine


def test_the_container_is_built_from_what_there_is() -> None:
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    modules = re.findall(r'^ENTRYPOINT \["python", "-m", "([\w.]+)"\]$', text, re.MULTILINE)
    assert modules == ["region_agent.gateway.container"]
    assert importlib.util.find_spec(modules[0]) is not None
    images = text.split("\nFROM ")[-3:]
    for image in images:
        assert re.search(r"^USER 10001:10001$", image, re.MULTILINE), "job code must not run as root"
        assert image.index("USER") < image.index("ENTRYPOINT")
        assert "HEALTHCHECK" in image
    stack = YAML(typ="safe").load((DEPLOY / "container" / "stack.yaml").read_text())
    assert stack["functions"]["geofed-worker"]["image"].startswith("registry.example.org/geofed-worker:")
