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
    text = (DEPLOY / "openfaas" / "Dockerfile").read_text()
    folders = re.findall(r"^COPY (\w+) \w+$", text, re.MULTILINE)
    assert set(folders) == {"proto", "sync", "scheduler", "control_plane", "region_agent", "deploy", "geofed"}
    assert all((DEPLOY.parent / folder).is_dir() for folder in folders)
    (module,) = re.findall(r'^ENTRYPOINT \["python", "-m", "([\w.]+)"\]$', text, re.MULTILINE)
    assert importlib.util.find_spec(module) is not None
    user = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert user, "job code must not run as root"
    assert text.index("USER") < text.index("ENTRYPOINT")
    assert "HEALTHCHECK" in text
    stack = YAML(typ="safe").load((DEPLOY / "openfaas" / "stack.yaml").read_text())
    assert stack["functions"]["geofed-worker"]["image"].startswith("registry.example.org/geofed-worker:")
