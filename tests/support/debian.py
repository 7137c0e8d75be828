"""A Debian root with the packages of this environment, made without a registry of images."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["TRUSTED", "debian_root"]

_PACKAGES = "python3,python3-venv,ca-certificates,systemd"
_DOCKERFILE = Path(__file__).parents[2] / "deploy" / "container" / "Dockerfile"
_MIRROR = "http://deb.debian.org/debian"
_LEFT_OUT = {"include", "test", "tests"}
"""Folders of packages that nothing imports: half of all files, and each build step of an image walks over all."""
_UNSAFE = {"DPKG_FORCE": "unsafe-io"}
"""Each unpacked file is on the disk before the next one without it, which a system that lasts for a run has no need
of. Published images of Debian have the same setting."""
_KEPT_SECONDS = 7 * 86400.0
"""Age at which the system is made again, with what Debian has changed meanwhile."""
TRUSTED = Path("/etc/ssl/certs/ca-certificates.crt")
"""The authorities that this machine trusts, which a mirror of packages may need."""


def debian_root(target: Path) -> bool:
    """Make a folder with Debian, its Python, systemd, and the packages of this environment that geofed needs. False:
    without these packages, which are of another version of Python.

    The system itself is kept for some days in the user's cache, and copied.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = cache / "geofed" / f"debian-{_codename()}-{_PACKAGES.replace(',', '-')}"
    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shared / "done"
        if not done.exists() or time.time() - done.stat().st_mtime > _KEPT_SECONDS:
            done.unlink(missing_ok=True)
            shutil.rmtree(shared / "root", ignore_errors=True)
            _bootstrap(shared / "root")
            done.touch()
        subprocess.run(["cp", "-a", "--reflink=auto", str(shared / "root"), str(target)], check=True)
    has = subprocess.run(["chroot", str(target), "python3", "-V"], capture_output=True, text=True).stdout
    same = has.split()[1].rpartition(".")[0] == f"{sys.version_info.major}.{sys.version_info.minor}"
    if same:
        _link_packages(target / "usr/lib/python3/dist-packages")
    if TRUSTED.exists():
        shutil.copy(TRUSTED, target / TRUSTED.relative_to("/"))
    return same


def _codename() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    return next((line.partition("=")[2] for line in lines if "CODENAME" in line), "stable")


def _bootstrap(root: Path) -> None:
    """By mmdebstrap where that is installed: debootstrap takes twice as much processor time."""
    argv = ["--variant=minbase", f"--include={_PACKAGES}", _codename(), str(root), _MIRROR]
    if shutil.which("mmdebstrap") is not None:
        argv = ["mmdebstrap", "--dpkgopt=force-unsafe-io", *argv]
    else:
        argv = ["debootstrap", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env={**os.environ, **_UNSAFE})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (root / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")


def _extras() -> tuple[str, ...]:
    """What images have, so that their builds download next to nothing."""
    named = re.findall(r"\.whl\)\[([\w,]+)\]", _DOCKERFILE.read_text())
    assert named
    return ("worker", *sorted({extra for text in named for extra in text.split(",")}))


def _link_packages(target: Path) -> None:
    """Install the packages by hard links, where the folder is on the same disk."""
    for (name, *_), found in (_needed("geofed", _extras(), {}) | _needed("hatchling", (), {})).items():
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
