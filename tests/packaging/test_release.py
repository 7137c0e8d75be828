"""The files that name the version agree, before and after a release (CONTRIBUTING.md)."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from support.previous import previous_version

from geofed_pb.features import ANNOUNCED

ROOT = Path(__file__).resolve().parents[2]
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SECTIONS = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_chart_and_images_have_the_version() -> None:
    chart = YAML(typ="safe").load((ROOT / "deploy" / "helm" / "geofed" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    files = [
        path for folder in ("deploy", "docs") for path in (ROOT / folder).rglob("*") if path.suffix in (".yaml", ".md")
    ]
    named = {
        (str(path.relative_to(ROOT)), tag)
        for path in files
        for tag in re.findall(r"registry\.example\.org/geofed-[a-z-]+:([\w.]+)", path.read_text())
    }
    assert len(named) > 3
    assert {tag for _, tag in named} == {VERSION.rpartition(".")[0]}, named


def test_the_changelog_begins_with_what_is_not_released_and_the_last_release() -> None:
    first, *released = SECTIONS
    assert first == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", one) for one in released), released
    if released:
        assert released[0].split()[0] == VERSION
    for page in ("CHANGELOG.md", "docs/production.md"):
        says = "Nothing has been released yet" in " ".join((ROOT / page).read_text().split())
        assert says == (not released), page
    assert (ROOT / "deploy" / "previous-release").exists() == (not released)


def test_the_commit_before_the_first_release_is_of_this_history() -> None:
    file = ROOT / "deploy" / "previous-release"
    if not file.exists():
        assert SECTIONS[1:], "upgrades are tested from no version"
        return
    commit = file.read_text().strip()
    assert re.fullmatch(r"[0-9a-f]{40}", commit)
    git = ["git", "-C", str(ROOT)]
    if (
        subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True).stdout
        == "true\n"
    ):
        pytest.skip("this clone is shallow")
    done = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_agent_says_all_that_a_control_plane_of_the_previous_release_asks_for() -> None:
    """An agent may be upgraded first."""
    file = f"{previous_version()}:proto/geofed_pb/features.py"
    source = subprocess.run(["git", "-C", str(ROOT), "show", file], capture_output=True, text=True, check=True).stdout
    known: dict[str, Any] = {}
    exec(compile(source, file, "exec"), known)
    assert len(known["FEATURES"]) > 10
    assert set(known["FEATURES"]) <= set(ANNOUNCED)
