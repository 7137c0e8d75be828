"""Files of a region's own models, of jobs with tensors that stay in their regions (`train.local`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from geofed_pb.files.durable import write_durably
from sync.ps.config import OWN_MODEL

__all__ = ["copy_own_model", "initial_own_model", "own_model_file", "remove_all_but_own_model"]


def own_model_file(folder: Path) -> Path:
    """Return the file of the region's own model in a job's folder; it is there after the job's first evaluation."""
    return folder / "ps" / OWN_MODEL


def initial_own_model(folder: Path) -> Path:
    """Return the file, in a job's folder, of the region's own model of the job that this one begins with."""
    return folder / f"initial-{OWN_MODEL}"


def copy_own_model(folder: Path, job: str) -> None:
    """Copy the region's own model of an earlier job, if there is one, for the job of this folder to begin with."""
    source, target = own_model_file(folder.parent / Path(job).name), initial_own_model(folder)
    if job and source.exists() and not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(target, [source.read_bytes()])


def remove_all_but_own_model(folder: Path) -> None:
    """Remove a job's folder, but for the region's own model if there is one."""
    kept = own_model_file(folder)
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in (*folder.iterdir(), *kept.parent.iterdir()):
        if path.is_dir() and path != kept.parent:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file() and path != kept:
            path.unlink(missing_ok=True)
