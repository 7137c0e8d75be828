"""A task folder as people have them: modules with names that others have, files, processes, values in globals."""

from __future__ import annotations

import pytest
from support.running import TEMPLATES, Running, eventually

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
