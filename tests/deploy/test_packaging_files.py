"""What puts geofed on machines names commands, options, folders and modules that there are."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from support.failures import command
from support.wheels import wheel

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
    extras = [set(found.split(",")) for found in re.findall(r"geofed-\*\.whl\)\[([a-z0-9,]+)\]", text)]
    assert len(extras) == len(images)
    # Of an extra that there is not, pip merely warns.
    assert set.union(*extras) <= set(
        tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    trackers = re.search(
        r"it has the extras `(\w+)` and `(\w+)`", (DEPLOY.parent / "docs" / "containers.md").read_text()
    )
    assert trackers is not None
    assert extras[0] >= set(trackers.groups())
    stack = YAML(typ="safe").load((DEPLOY / "container" / "stack.yaml").read_text())
    assert stack["functions"]["geofed-worker"]["image"].startswith("registry.example.org/geofed-worker:")


def test_the_documented_bill_of_materials_names_what_an_environment_has(tmp_path: Path) -> None:
    """In an image the command was run by hand: to install its packages takes longer than all other tests here."""
    page = (DEPLOY.parent / "docs" / "containers.md").read_text()
    (script,) = re.findall(r"--entrypoint sh geofed-\$image -c '([^']+)'", page)
    make, install, write = (part.split() for part in script.split("&&"))
    assert install[-1] == "cyclonedx-bom"
    constraints = install[install.index("--constraint") + 1]
    dockerfile = (DEPLOY / "container" / "Dockerfile").read_text()
    assert f"COPY deploy/constraints.txt {constraints}" in dockerfile
    assert "cyclonedx-bom==" in (DEPLOY / "constraints.txt").read_text()
    assert f"venv --system-site-packages {Path(write[-1]).parents[1]}" in dockerfile
    assert write[0] == f"{make[-1]}/bin/cyclonedx-py"
    wheel(tmp_path / "wheels", "small", "1.5", "", "other>=2")
    venv.create(tmp_path / "image", with_pip=False, symlinks=True)
    (packages,) = tmp_path.glob("image/lib/python*/site-packages")
    with zipfile.ZipFile(tmp_path / "wheels" / "small-1.5-py3-none-any.whl") as archive:
        archive.extractall(packages)
    pytest.importorskip("cyclonedx_py")
    program = str(Path(sys.executable).with_name("cyclonedx-py"))
    argv = [program, *write[1:-1], str(tmp_path / "image" / "bin" / "python")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert [(one["name"], one["version"]) for one in bill["components"]] == [("small", "1.5")]
