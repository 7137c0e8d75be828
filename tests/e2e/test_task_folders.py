"""A task folder as people have them: modules with names that others have, files, processes, values in globals."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.running import TEMPLATES, Running, eventually, named, paths_under

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

TASK = """
import torch
from torch.utils.data import DataLoader

from . import scheduler
from .base import *
from .base import dataset as plain, metrics as measured
import sync.part

SCALE = float(open("settings/scale.txt").read())
seen = None


def dataset(uri, split, config):
    global seen
    found = plain(uri, split, config)
    seen = len(found)
    return found


def loss(model, batch):
    import region_agent
    assert seen > 1
    return SCALE * scheduler.weight() * sync.part.ONE * region_agent.ONE * plain_loss(model, batch)


def metrics(model, batches):
    batches = list(batches)
    loaded = sum(len(part) for part in DataLoader(range(40), batch_size=4, num_workers=2))
    return {**measured(model, batches), "loaded": float(loaded)}
"""


def test_a_task_folder_works_as_it_does_by_itself(running: Running) -> None:
    folder = running.job_folder()
    base = (TEMPLATES / "image-classification" / "task.py").read_text()
    for name, text in {
        "src/task.py": TASK,
        "src/base.py": base + "\nplain_loss = loss\n",
        "src/scheduler.py": "def weight():\n    return 1.0\n",
        "src/sync/__init__.py": "",
        "src/sync/part.py": "ONE = 1.0\n",
        "region_agent.py": "ONE = 1.0\n",
        "settings/scale.txt": "1.0",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # Slices that are over at once: each invocation makes a step.
    job = running.submit("task.module=src/task.py", "function.slice=50ms", "train.end.epochs=2", "wan.interval=10")
    ended = running.wait_end(job)
    assert ended["state"] == "succeeded", ended.get("error")
    assert ended["result"]["metrics"]["loaded"] == 40.0
    # What loads data has ended with the workers.
    eventually(
        lambda: not any(running.workers(region) for region in running.federation.processes), "no process is left"
    )


READS = """
from pathlib import Path
big = Path("weights/big.bin").read_bytes()
assert (len(big), big[:1], big[-1:]) == (9 << 20, b"b", b"b")
print("second begins with", Path("weights/second.bin").read_bytes()[:3].decode(), flush=True)
"""


def bundles(folder: Path) -> set[Path]:
    """Return the files of task folders that regions hold."""
    return {path for path in paths_under(folder) if path.parent.name == "bundles" and path.is_file()}


def test_a_large_folder_arrives_and_only_what_changed_is_sent(running: Running) -> None:
    folder = running.job_folder(task=named("reads large files") + READS)
    (folder / "weights").mkdir()
    (folder / "weights" / "big.bin").write_bytes(b"b" * (9 << 20))
    (folder / "weights" / "second.bin").write_bytes(b"one" + bytes(2 << 20))
    arguments = [part for setting in ("train.end={steps: 4}", "train.evaluateEvery=0") for part in ("--set", setting)]

    def submitted() -> tuple[str, str]:
        made = running.federation.control_plane("submit", str(folder / "job.yaml"), *arguments, "-o", "name")
        job = made.stdout.strip()
        assert running.wait_end(job)["state"] == "succeeded", running.describe(job)["error"]
        return job, made.stderr

    job, said = submitted()
    assert "uploading 11.5 MB of the task folder: 2 of 2 larger files" in said
    assert "second begins with one" in running.federation.control_plane("logs", job).stdout
    before = bundles(running.federation.folder)
    (folder / "weights" / "second.bin").write_bytes(b"two" + bytes(2 << 20))
    job, said = submitted()
    assert "uploading 2.1 MB of the task folder: 1 of 2 larger files" in said
    assert "second begins with two" in running.federation.control_plane("logs", job).stdout
    code = [path.stat().st_size for path in bundles(running.federation.folder) - before]
    regions = len(running.federation.processes) - 1
    assert sum(size > 1 << 20 for size in code) == regions, "each region has got the changed file, and no other one"
    assert sum(code) < regions * ((2 << 20) + (64 << 10))
