"""The wheel holds what it must and nothing else, and runs a job from an empty environment beside proto-plus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"control_plane", "deploy", "geofed", "geofed_pb", "region_agent", "scheduler", "sync"}
"""What an installation adds to the names that Python can import. `proto` must never be among them."""
COMMANDS = {"geofed", "control-plane", "region-agent", "wan-emulator"}
DEMO_SECONDS = 90
"""Within which a new user has a model, on a machine with two cores."""
OWN_JOB = "then a job of your own, with example data for two regions:\n  geofed init first\n"
IMPORTS = """
import json, sys

import control_plane, deploy, geofed, geofed_pb, proto, region_agent, scheduler, sync
from google.protobuf import timestamp_pb2

stamped = proto.marshal.Marshal(name="x").to_python(timestamp_pb2.Timestamp, timestamp_pb2.Timestamp(seconds=1))
modules = (control_plane, deploy, geofed, geofed_pb, region_agent, scheduler, sync, proto)
files = {module.__name__: module.__file__ for module in modules}
print(json.dumps({"files": files, "seconds": stamped.second, "path": sys.path}))
"""


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with what it declares to need for the demo, from this one; nothing else
    of what is installed here can be imported there. proto-plus is the other package that has a module `proto`."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet"]
    argv = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    (own,) = metadata.distributions(name="geofed", path=[str(packages)])
    _link([*_needed(own, {"demo"}), metadata.distribution("proto-plus")], packages)
    return folder


def _needed(distribution: metadata.Distribution, extras: set[str]) -> list[metadata.Distribution]:
    """All that a distribution with some extras needs, by the metadata of each, as pip would install it."""
    found: dict[tuple[str, frozenset[str]], metadata.Distribution] = {}
    waiting = [(distribution, frozenset(extras))]
    while waiting:
        of, with_extras = waiting.pop()
        for required in map(Requirement, of.requires or ()):
            holds = required.marker is None or any(
                required.marker.evaluate({"extra": one}) for one in {"", *with_extras}
            )
            key = canonicalize_name(required.name), frozenset(required.extras)
            if holds and key not in found:
                found[key] = metadata.distribution(required.name)
                waiting.append((found[key], key[1]))
    return list({one.name: one for one in found.values() if one.name != distribution.name}.values())


def _link(distributions: list[metadata.Distribution], packages: Path) -> None:
    """Link the files of distributions: those of a folder in which nobody else has files with what
    Python has compiled of them. Links are hard ones, since sandboxes show what is below an environment alone."""
    owners = defaultdict(set)
    for one in metadata.distributions():
        # It is parsed at each access.
        name = one.name
        for file in one.files or ():
            owners[file.parts[0]].add(name)
    for one in distributions:
        held = [file for file in one.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
        assert held, one.name
        own = {file.parts[0] for file in held if len(owners[file.parts[0]]) == 1}
        folder = Path(str(one.locate_file("")))
        for name in (name for name in own if (folder / name).is_dir()):
            shutil.copytree(folder / name, packages / name, copy_function=_linked)
        for file in (file for file in held if file.parts[0] not in own or len(file.parts) == 1):
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            _linked(str(folder / file), str(packages / file))


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # On another file system.
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def names(wheel: Path) -> Iterator[set[str]]:
    with zipfile.ZipFile(wheel) as archive:
        yield set(archive.namelist())


def test_the_top_level_names_are_these(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == TOP_LEVEL


def test_everything_that_is_no_python_is_there_too(names: set[str]) -> None:
    def files(pattern: str, root: Path = ROOT) -> set[str]:
        found = {str(path.relative_to(root)) for path in root.glob(pattern)}
        assert found, pattern
        return found

    wanted = files("deploy/templates/*/*.*") | files("deploy/emulator/profiles/*.yaml")
    wanted |= files("geofed_pb/v1/*.proto", ROOT / "proto") | files("control_plane/store/migrations/**/*.py")
    wanted |= files("deploy/co*/*") | files("deploy/monitoring/*") | files("deploy/systemd/*")
    wanted |= files("deploy/helm/geofed/*.*") | files("deploy/helm/geofed/templates/*")
    wanted |= {f"{package}/py.typed" for package in TOP_LEVEL}
    assert {name for name in wanted if "__pycache__" not in name} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


@pytest.fixture
def installed(environment: Path) -> dict[str, str]:
    """Environment variables with which commands are those of the installation."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept["PATH"] = f"{environment / 'bin'}{os.pathsep}{kept['PATH']}"
    return kept


def test_an_installation_has_its_modules_and_commands(
    environment: Path, installed: dict[str, str], tmp_path: Path
) -> None:
    assert {path.name for path in (environment / "bin").iterdir()} >= COMMANDS
    for command in sorted(COMMANDS):
        done = subprocess.run(
            [command, "--help"], env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, done.stderr
    argv = [str(environment / "bin" / "python"), "-c", IMPORTS]
    done = subprocess.run(argv, env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["seconds"] == 1, "proto is not proto-plus"
    assert str(ROOT) not in told["path"]
    own = {name: path for name, path in told["files"].items() if name in TOP_LEVEL}
    assert all(path.startswith(str(environment)) for path in own.values()), own
    assert not told["files"]["proto"].startswith(str(ROOT / "proto"))


def test_what_is_not_declared_is_not_there(environment: Path, installed: dict[str, str], tmp_path: Path) -> None:
    """Though it is installed here."""
    undeclared = ("pytest", "boto3", "redis", "pandas", "plotly", "tests")
    code = f"import importlib.util as u; print([one for one in {undeclared} if u.find_spec(one)])"
    argv = [str(environment / "bin" / "python"), "-c", code]
    done = subprocess.run(argv, env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.alone
@pytest.mark.e2e
def test_the_demo_trains_in_three_regions_from_an_installation_alone(installed: dict[str, str], tmp_path: Path) -> None:
    started = time.monotonic()
    argv = ["geofed", "demo", "--folder", "demo"]
    done = subprocess.run(argv, env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["state"] == "succeeded"
    assert result["accuracy"] > 0.8
    assert min(result["applied_updates"].values()) > 5, "every region has the updates of the others"
    assert len(result["applied_updates"]) == 3
    assert (tmp_path / "demo" / "model.safetensors").stat().st_size > 10_000
    assert done.stdout.endswith("  geofed serve --state-dir demo/control-plane\n" + OWN_JOB)
    _, end = done.stdout.split("\n  took ")
    assert not [line for line in end.splitlines() if len(line) > 80]
    assert seconds < DEMO_SECONDS


@pytest.mark.e2e
def test_without_torch_the_demo_says_what_to_install(
    environment: Path, installed: dict[str, str], tmp_path: Path
) -> None:
    code = "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['demo']; from geofed.cli import main; main()"
    argv = [str(environment / "bin" / "python"), "-c", code]
    done = subprocess.run(argv, env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install '.[demo]'" in done.stderr
    assert not list(tmp_path.iterdir())
