"""Environments with the packages that tasks require, by pip itself and from a folder of wheels."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
from support.wheels import wheel

from geofed_pb.errors import GeofedError
from region_agent.config import RegionConfig, load_config
from region_agent.tasks.environments import Environments
from region_agent.tasks.folder import TaskFolder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def _config(tmp_path: Path, **settings: object) -> RegionConfig:
    file = tmp_path / "region.yaml"
    body = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "oslo"}, "cloud": "test",
        "capacity": {"workers": 1}, "taskPackages": {"wheels": "wheels", **settings},
    }  # fmt: skip
    file.write_text(json.dumps(body))
    return load_config(file)


def _bundle(text: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        entry = tarfile.TarInfo("requirements.txt")
        entry.size = len(text.encode())
        archive.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def _prepare(environments: Environments, text: str, job: str = "job") -> Path:
    folder = asyncio.run(environments.prepare(job, TaskFolder(_bundle(text)), "requirements.txt"))
    assert folder is not None
    return folder


def test_what_no_job_uses_makes_room_for_what_one_does(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "little", "1.0", "X = 1\n")
    for name in ("first", "second", "third"):
        wheel(tmp_path / "wheels", name, "1.0", f"X = {'1' * (700 << 10)!r}\n")
    environments = Environments(tmp_path, _config(tmp_path, keepMb=2))
    first, second = (_prepare(environments, name, name) for name in ("first", "second"))
    environments.release("first")
    assert first.exists(), "there is room for both"
    third = _prepare(environments, "third", "third")
    assert (first.exists(), second.exists(), third.exists()) == (False, True, True)
    assert _prepare(environments, "third", "again") == third
    assert not [path for path in (tmp_path / "environments").iterdir() if path.name.startswith(".")]


def test_what_cannot_be_installed_leaves_nothing_and_is_told(tmp_path: Path) -> None:
    wheel(tmp_path / "wheels", "needs_old", "1.0", "", "numpy<1.0")
    wheel(tmp_path / "wheels", "large", "1.0", f"X = {'1' * (3 << 20)!r}\n")
    for settings, text, told in (
        ({}, "needs-old", "Cannot install"),
        ({"allow": ["other"]}, "large", "tasks may not install large"),
        ({"maxMb": 1}, "large", "take more than 1 MB"),
        ({"seconds": 0.2}, "large", "were not installed within 0.2 s"),
        ({"index": "http://127.0.0.1:9/simple"}, "missing", "index http://127.0.0.1:9/simple cannot be reached"),
    ):
        environments = Environments(tmp_path, _config(tmp_path, **settings))
        with pytest.raises(GeofedError) as raised:
            _prepare(environments, text)
        assert raised.value.code == "PACKAGES_UNAVAILABLE"
        assert told in raised.value.message
        assert not list((tmp_path / "environments").iterdir())


def test_nothing_is_built_whoever_asks_for_it(tmp_path: Path) -> None:
    """Not even sources that a wheel requires by a URL, which pip builds in spite of --only-binary."""
    built = tmp_path / "built"
    source = tmp_path / "evil-1.0"
    source.mkdir()
    (source / "setup.py").write_text(
        f"open({str(built)!r}, 'w').close()\nimport setuptools\nsetuptools.setup(name='evil')\n"
    )
    with tarfile.open(tmp_path / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "evil-1.0")
    for place in (source, tmp_path / "evil-1.0.tar.gz"):
        wheel(tmp_path / "wheels", "needs_evil", "1.0", "", f"evil @ {place.as_uri()}")
        with pytest.raises(GeofedError) as raised:
            _prepare(Environments(tmp_path, _config(tmp_path)), "needs-evil")
        assert "is required as sources; only wheels are installed" in raised.value.message
    assert not built.exists()


def test_pip_gets_no_secret_of_the_agents_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "kept-to-itself")
    seen = tmp_path / "seen"
    monkeypatch.setattr(sys, "executable", str(_script(tmp_path / "python", f"env > {seen}\nexit 1\n")))
    wheel(tmp_path / "wheels", "little", "1.0", "X = 1\n")
    with pytest.raises(GeofedError, match="pip has failed"):
        _prepare(Environments(tmp_path, _config(tmp_path)), "little")
    assert "kept-to-itself" not in seen.read_text()
    assert "PATH=" in seen.read_text()


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def test_packages_come_from_somewhere(tmp_path: Path) -> None:
    with pytest.raises(GeofedError, match="state `index`, `wheels` or both"):
        _config(tmp_path, wheels=None)
