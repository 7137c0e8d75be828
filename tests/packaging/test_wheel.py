"""The wheel holds what it must and nothing else, and runs a job from an empty environment beside proto-plus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {"control_plane", "deploy", "geofed", "geofed_pb", "region_agent", "scheduler", "sync"}
"""What an installation adds to the names that Python can import. `proto` must never be among them."""
COMMANDS = {"geofed", "control-plane", "region-agent", "wan-emulator"}
JOB = """
import json, sys
from pathlib import Path

import control_plane, deploy, geofed_pb, proto, region_agent, scheduler, sync
from deploy.local import LocalFederation, RegionSite
from deploy.shards import read_digits, write_shards
from google.protobuf import timestamp_pb2


def main():
    here = Path.cwd()
    shards = write_shards(read_digits(1), ["home"], here / "shards", alpha=0.5, seed=1)["home"]
    splits = {name: {"uri": part["path"], "samples": part["samples"]} for name, part in shards.items()}
    free = ("functionUsdPerGbSecond", "functionUsdPerRequest", "serverUsdPerHour", "egressUsdPerGb")
    prices = {"source": "none", "asOf": "2026-01", **dict.fromkeys(free, 0)}
    config = {"cloud": "x", "capacity": {"workers": 1}, "prices": prices, "datasets": {"digits": {"splits": splits}}}
    with LocalFederation(here / "federation", [RegionSite("home", config)]) as federation:
        federation.control_plane("new", "image-classification", str(here / "job"))
        settings = ("--set", "train.end.epochs=1", "--set", "train.evaluateEvery=0")
        job = str(here / "job" / "job.yaml")
        submitted = federation.control_plane("submit", job, *settings, "--wait", "-o", "json")
        federation.control_plane("export", "image-classification", "--output-file", str(here / "model.safetensors"))
    stamped = proto.marshal.Marshal(name="x").to_python(timestamp_pb2.Timestamp, timestamp_pb2.Timestamp(seconds=1))
    modules = (control_plane, deploy, geofed_pb, region_agent, scheduler, sync, proto)
    files = {module.__name__: module.__file__ for module in modules}
    state = json.loads(submitted.stdout)["data"]["state"]
    print(json.dumps({"files": files, "state": state, "seconds": stamped.second, "path": sys.path}))


main()
"""


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; its dependencies are those of this one, without this checkout.

    Python reads no `.pth` file of the folder that is added here, so the editable installation stays out.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet"]
    argv = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(wheel)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = Path(grpc.__file__).parents[1]
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder


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
    wanted |= files("deploy/openfaas/*") | files("deploy/systemd/*")
    wanted |= {f"{package}/py.typed" for package in TOP_LEVEL}
    assert {name for name in wanted if "__pycache__" not in name} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


@pytest.mark.e2e
def test_a_job_runs_from_an_installation(environment: Path, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept["PATH"] = f"{environment / 'bin'}{os.pathsep}{kept['PATH']}"
    assert {path.name for path in (environment / "bin").iterdir()} >= COMMANDS
    for command in sorted(COMMANDS):
        done = subprocess.run([command, "--help"], env=kept, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    script = tmp_path / "job_from_wheel.py"
    script.write_text(JOB)
    argv = [str(environment / "bin" / "python"), str(script)]
    done = subprocess.run(argv, env=kept, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["state"] == "succeeded"
    assert told["seconds"] == 1, "proto is not proto-plus"
    assert str(ROOT) not in told["path"]
    own = {name: path for name, path in told["files"].items() if name in TOP_LEVEL}
    assert all(path.startswith(str(environment)) for path in own.values()), own
    assert not told["files"]["proto"].startswith((str(environment), str(ROOT / "proto")))
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000
