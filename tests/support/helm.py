"""Helm's own linter and renderer, of `helm-python-sdk`, in a process of its own: it brings the runtime of Go with it.

`python tests/support/helm.py` reads a list of values as JSON from stdin and writes what became of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

__all__ = ["CHART", "Rendered", "rendered"]

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "geofed"


@dataclass(frozen=True)
class Rendered:
    """What Helm makes of the chart with some values."""

    lint: list[str]
    """Findings of `helm lint --strict` beyond recommendations."""
    objects: list[dict[str, Any]]
    """All objects of the manifests."""
    notes: str
    """What `helm install` prints."""
    error: str
    """Why nothing was rendered; empty if it was."""

    def one(self, kind: str, name: str, namespace: str = "geofed") -> dict[str, Any]:
        """Return the object of this kind and name."""
        (found,) = [
            each for each in self.objects
            if (each["kind"], each["metadata"]["name"], each["metadata"].get("namespace", "geofed"))
            == (kind, name, namespace)
        ]  # fmt: skip
        return found


def rendered(*values: dict[str, Any]) -> list[Rendered]:
    """Render the chart as release `geofed` in namespace `geofed`, once with each of the values."""
    pytest.importorskip("helm_python", reason="could not import helm_python: it has wheels for x86-64 only")
    done = subprocess.run([sys.executable, __file__], input=json.dumps(values), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [_parsed(**each) for each in json.loads(done.stdout)]


def _parsed(lint: list[str], files: dict[str, str], error: str) -> Rendered:
    yaml, objects, notes = YAML(typ="safe"), [], ""
    for name, text in files.items():
        if name.endswith(".txt"):
            notes = text
        else:
            objects += [one for one in yaml.load_all(text) if one is not None]
    return Rendered(lint, objects, notes, error)


def _main() -> None:
    import helm_python

    chart = helm_python.Chart.load(CHART)
    answers = []
    for values in json.load(sys.stdin):
        files: dict[str, str] = {}
        error = ""
        try:
            files = chart.render(values, name="geofed", namespace="geofed")
        except helm_python.HelmError as failure:
            error = str(failure)
        told = helm_python.lint(CHART, values, strict=True, namespace="geofed")["messages"]
        lint = [f"{one['path']}: {one['error']}" for one in told if one["severity"] > 1]
        answers.append({"lint": lint, "files": files, "error": error})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main()
