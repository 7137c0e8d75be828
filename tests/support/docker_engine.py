"""A Docker engine of the tests' own, and a base image that is made without a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

__all__ = ["Engine", "debian_with_our_packages", "docker_engine", "worker_image"]

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 30.0
_EXTRAS = ("worker", "redis", "s3", "postgres", "kubernetes", "otlp", "mlflow")
"""What the images have, so that their builds download next to nothing."""
_LEFT_OUT = {"include", "test", "tests"}
"""Folders of packages that nothing imports: half of all files, and each build step walks over all there are."""


class Engine:
    """Commands of ``docker`` for one engine."""

    def __init__(self, socket: Path) -> None:
        self.host = f"unix://{socket}"
        # The engine of Debian 12 has no other builder.
        self._environment = {**os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "0"}

    def start(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        """Run ``docker ARGUMENTS``."""
        settings: dict[str, object] = {"capture_output": True, "text": True, "timeout": 600, **options}
        return subprocess.run(["docker", *arguments], env=self._environment, **settings)  # type: ignore[call-overload]

    def __call__(self, *arguments: str, **options: object) -> str:
        """Run ``docker ARGUMENTS``, which must succeed; return what it printed."""
        done = self.start(*arguments, **options)
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return str(done.stdout)


@contextmanager
def docker_engine(folder: Path) -> Iterator[Engine]:
    """Start an engine with all its files in a folder; skip the test where there can be none.

    One that GEOFED_TEST_DOCKER names, as ``unix:///path``, is used instead and keeps its images.
    """
    if host := os.environ.get("GEOFED_TEST_DOCKER"):
        yield Engine(Path(host.removeprefix("unix://")))
        return
    if os.geteuid() != 0:
        pytest.skip("a Docker engine of the tests' own needs root")
    for program in ("docker", "dockerd", "debootstrap", "iptables"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install docker.io debootstrap iptables")
    socket = folder / "docker.sock"
    options = {"data-root": "data", "exec-root": "exec", "pidfile": "pid", "host": f"unix://{socket}"}
    argv = [f"--{key}={value if '://' in value else folder / value}" for key, value in options.items()]
    with (folder / "log").open("wb") as log:
        # Without the bridge that all engines of a machine would share.
        daemon = subprocess.Popen(["dockerd", "--bridge=none", *argv], stdout=log, stderr=log)
    engine = Engine(socket)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while engine.start("info").returncode:
            if daemon.poll() is not None or time.monotonic() > deadline:
                print((folder / "log").read_text()[-2000:])
                pytest.skip("no Docker engine can start on this machine")
            time.sleep(0.2)
        yield engine
    finally:
        daemon.terminate()
        daemon.wait(30)
        for mount in reversed([line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]):
            if Path(mount).is_relative_to(folder):
                subprocess.run(["umount", "--lazy", mount], check=True)
        # Gigabytes, of which pytest would keep those of three runs.
        shutil.rmtree(folder)


def worker_image(engine: Engine, folders: pytest.TempPathFactory) -> str:
    """Build the worker's image from this tree, on a base of this environment's packages; returns its name."""
    if not engine("images", "--quiet", "geofed-base"):
        debian_with_our_packages(engine, "geofed-base", folders.mktemp("base"))
    arguments = ["--file", "deploy/container/Dockerfile", "--target", "worker", "--tag", "geofed-worker"]
    engine("build", "--network=host", "--build-arg", "BASE=geofed-base", *arguments, ".", cwd=_ROOT)
    return "geofed-worker"


def debian_with_our_packages(engine: Engine, name: str, folder: Path) -> None:
    """Make an image with Debian, its Python, and the packages of this environment that geofed needs."""
    root = folder / "root"
    packages = "python3,python3-venv,ca-certificates"
    argv = ["debootstrap", "--variant=minbase", f"--include={packages}", "stable", str(root)]
    codename = next(
        (line.partition("=")[2] for line in Path("/etc/os-release").read_text().splitlines() if "CODENAME" in line), ""
    )
    argv[3] = codename or "stable"
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    has = subprocess.run(["chroot", str(root), "python3", "-V"], capture_output=True, text=True).stdout
    if has.split()[1].rpartition(".")[0] == f"{sys.version_info.major}.{sys.version_info.minor}":
        _link_packages(root / "usr/lib/python3/dist-packages")
    # The authorities that this machine trusts, which a mirror of packages may need.
    trusted = Path("/etc/ssl/certs/ca-certificates.crt")
    if trusted.exists():
        shutil.copy(trusted, root / trusted.relative_to("/"))
    # The package that builds the wheel is there, too; the variable's value is pip's way to say so.
    change = f"ENV PIP_CERT={trusted} PIP_NO_BUILD_ISOLATION=0"
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packing:
        engine("import", "--change", change, "-", name, stdin=packing.stdout)
    shutil.rmtree(root)


def _link_packages(target: Path) -> None:
    """Install the packages by hard links, where the folder is on the same disk."""
    for (name, *_), found in (_needed("geofed", _EXTRAS, {}) | _needed("hatchling", (), {})).items():
        for file in found.files or () if name != "geofed" else ():
            source = Path(str(found.locate_file(file)))
            if not _LEFT_OUT.union({".."}).isdisjoint(file.parts) or not source.is_file():
                continue
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            (target / file).unlink(missing_ok=True)
            try:
                os.link(source, target / file)
            except OSError:
                shutil.copy2(source, target / file)


def _needed(
    name: str, extras: tuple[str, ...], found: dict[tuple[str, ...], Distribution]
) -> dict[tuple[str, ...], Distribution]:
    key = (name.lower().replace("_", "-"), *sorted(extras))
    if key in found:
        return found
    try:
        found[key] = distribution(name)
    except PackageNotFoundError:
        return found
    for text in found[key].requires or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            _needed(wanted.name, tuple(wanted.extras), found)
    return found
