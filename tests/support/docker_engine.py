"""A Docker engine of the tests' own, and a base image that is made without a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.debian import TRUSTED, debian_root

__all__ = ["Engine", "debian_image", "docker_engine", "product_image", "worker_image"]

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 30.0
_DATA_BYTES, _LEAST_MEMORY_BYTES = 6 << 30, 12 << 30
"""Space for all images, and the memory of which so much may be taken. Each step of a build waits until a disk has all
that anyone has written, and gigabytes have to be deleted in the end."""


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
    if psutil.virtual_memory().available > _LEAST_MEMORY_BYTES:
        (folder / "data").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DATA_BYTES}", "tmpfs", str(folder / "data")], check=True)
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
        debian_image(engine, "geofed-base", folders)
    product_image(engine, "worker", "geofed-base")
    return "geofed-worker"


def product_image(engine: Engine, target: str, base: str) -> None:
    """Build one of the product's images from this tree, as ``geofed-TARGET``."""
    # The base has PyTorch. Where PyTorch's own index cannot be reached, pip would ask it for ten seconds.
    given = ["--build-arg", f"BASE={base}", "--build-arg", "TORCH_INDEX="]
    options = ["--file", "deploy/container/Dockerfile", "--target", target, "--tag", f"geofed-{target}"]
    engine("build", "--network=host", *given, *options, ".", cwd=_ROOT)


def debian_image(engine: Engine, name: str, folders: pytest.TempPathFactory) -> None:
    """Make an image with Debian, its Python, and the packages of this environment that geofed needs."""
    root = folders.mktemp("image") / "root"
    debian_root(root)
    # The package that builds the wheel is there, too; the variable's value is pip's way to say so.
    change = f"ENV PIP_CERT={TRUSTED} PIP_NO_BUILD_ISOLATION=0"
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packing:
        engine("import", "--change", change, "-", name, stdin=packing.stdout)
    shutil.rmtree(root)
