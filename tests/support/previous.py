"""An environment with an earlier version of geofed, out of this repository's history."""

from __future__ import annotations

import os
import subprocess
import tarfile
import venv
from io import BytesIO
from pathlib import Path

import grpc
import pytest

__all__ = ["ROOT", "previous_version", "python_of"]

ROOT = Path(__file__).resolve().parents[2]


def previous_version() -> str:
    """Return the commit that GEOFED_TEST_PREVIOUS names, or else the tag of the last release, or else the commit in
    `deploy/previous-release`; skips in a shallow clone, which may lack that one."""
    if named := os.environ.get("GEOFED_TEST_PREVIOUS"):
        return named
    if tag := _git("describe", "--tags", "--abbrev=0", "--match=v[0-9]*", "HEAD^").decode().strip():
        return tag
    commit = (ROOT / "deploy" / "previous-release").read_text().split()[0]
    if not _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        if _git("rev-parse", "--is-shallow-repository").decode().strip() == "true":
            pytest.skip("this clone is shallow, and the earlier release is not in it: git fetch --unshallow")
        pytest.fail(f"deploy/previous-release names {commit}, which is not in this clone", pytrace=False)
    return commit


def python_of(version: str, folder: Path) -> Path:
    """Return the interpreter of a new virtual environment that has this version, and the packages of this one.

    Python reads no `.pth` file of the folder with the packages, so the editable installation of this checkout stays
    out.
    """
    with tarfile.open(fileobj=BytesIO(_git("archive", version))) as archive:
        archive.extractall(folder / "source", filter="data")
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    own = [folder / "source", folder / "source" / "proto"]
    (packages / "paths.pth").write_text("".join(f"{path}\n" for path in (*own, Path(grpc.__file__).parents[1])))
    return folder / "environment" / "bin" / "python"


def _git(*arguments: str) -> bytes:
    """Return what git prints; nothing where it fails."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True).stdout
