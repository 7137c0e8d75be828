"""Methods of another package: the page's own example, in a job."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.running import TEMPLATES, check_succeeded, digits_sites

from deploy.local import LocalFederation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def installed(folder: Path) -> Path:
    """The page's package, as an installer would leave it."""
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    metadata = folder / "toy_methods-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "toy_methods.py").write_text(blocks["python"])
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-methods\nVersion: 1.0\n")
    points = re.sub(r'\[project\.entry-points\."(.*)"\]', r"[\1]", blocks["toml"]).replace('"', "")
    (metadata / "entry_points.txt").write_text(points)
    return folder


def test_a_job_runs_with_methods_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed(tmp_path / "site")))
    job = tmp_path / "job"
    shutil.copytree(TEMPLATES / "image-classification", job)
    settings = (
        "wan.policy=toy-half-mean", "wan.codec=toy-halves", "collective=toy-half-reduce", "merge.codec=toy-halves",
        "train.workers=3", "train.end.epochs=3",
    )  # fmt: skip
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    with LocalFederation(tmp_path / "federation", digits_sites(tmp_path, ("oslo", "lima"), workers=3)) as federation:
        arguments = ["submit", str(job / "job.yaml"), *chosen, "--wait", "-o", "name"]
        name = federation.control_plane(*arguments).stdout.strip()
        described = json.loads(federation.control_plane("describe", name, "-o", "json").stdout)["data"]
        check_succeeded(described, accuracy=0.3)
        plan = described["plan"]
        assert (plan["wan_policy"], plan["codec"], plan["collective"]) == tuple(
            setting.partition("=")[2] for setting in settings[:3]
        )
        assert "toy-half-reduce" in federation.control_plane("events", name).stdout, "workers have merged by it"
        schema = federation.control_plane("schema").stdout
        assert "toy-halves" in schema
        assert "toy-half-reduce" in schema
        wrong = federation.control_plane("validate", str(job / "job.yaml"), "--set", "wan.codec=toy-halfs", check=False)
        assert wrong.returncode != 0
        assert "did you mean toy-halves?" in wrong.stderr
