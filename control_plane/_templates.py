"""Example jobs that users start from: data files, whose code is not imported."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from control_plane._view import Data
from geofed_pb.errors import GeofedError

__all__ = ["find_template", "template_folders", "template_view", "write_template"]


def write_template(template: str, folder: Path, name: str | None) -> list[str]:
    """Write a template's files into a folder, and return them; ``name``: of the job, None: the template's.

    Raises ``GeofedError("TEMPLATE_NOT_FOUND")`` and OSError.
    """
    source = find_template(template)
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(file, folder / file.name, template, name) for file in _files(source)]


def template_folders() -> list[Traversable]:
    """Return the templates' folders. Raises ``GeofedError("TEMPLATE_NOT_FOUND")``: none are installed."""
    try:
        root = files("deploy") / "templates"
        return sorted((entry for entry in root.iterdir() if (entry / "job.yaml").is_file()), key=lambda e: e.name)
    except (ModuleNotFoundError, FileNotFoundError):
        raise GeofedError("TEMPLATE_NOT_FOUND", "no templates are installed") from None


def find_template(template: str) -> Traversable:
    """Return a template's folder. Raises ``GeofedError("TEMPLATE_NOT_FOUND")``."""
    for folder in template_folders():
        if folder.name == template:
            return folder
    names = ", ".join(folder.name for folder in template_folders())
    raise GeofedError("TEMPLATE_NOT_FOUND", f"template {template} not found; the templates are {names}")


def _files(folder: Traversable) -> list[Traversable]:
    return sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: file.name)


def template_view(folder: Traversable) -> Data:
    """Return the name, summary and files of a template."""
    readme = (folder / "README.md").read_text(encoding="utf-8")
    return {
        "name": folder.name,
        "summary": readme.splitlines()[0].removeprefix("# "),
        "files": [file.name for file in _files(folder)],
    }


def _write(source: Traversable, target: Path, template: str, name: str | None) -> str:
    text = source.read_text(encoding="utf-8")
    if source.name == "job.yaml" and name is not None:
        text = text.replace(f"\n  name: {template}\n", f"\n  name: {name}\n", 1)
    target.write_text(text, encoding="utf-8")
    return str(target)
