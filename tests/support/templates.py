"""Task modules of templates, loaded and trained in plain PyTorch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

TEMPLATES = Path(str(files("deploy") / "templates"))


def load_template(name: str) -> ModuleType:
    """Its task module, with its folder at the end of ``sys.path``, as a worker has it."""
    folder = TEMPLATES / name
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location(f"template_{name.replace('-', '_')}", folder / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_data(name: str, *arguments: str) -> tuple[Any, str]:
    """What its script tells of the shards that it makes, and what it says besides."""
    argv = [sys.executable, str(TEMPLATES / name / "make_data.py"), *arguments]
    done = subprocess.run(argv, capture_output=True, check=True, text=True, timeout=60)
    return json.loads(done.stdout), done.stderr


def train(task: Any, data: Any, config: dict[str, Any], *, steps: int, batch: int) -> Any:
    """The model after so many steps, made as a worker makes them."""
    torch.manual_seed(0)
    model = task.model(config)
    optimizer = task.optimizer(model.parameters(), config)
    order = np.random.default_rng(0)
    for _ in range(steps):
        chosen = order.integers(0, len(data), batch).tolist()
        optimizer.zero_grad()
        task.loss(model, default_collate(data.__getitems__(chosen))).backward()
        optimizer.step()
    return model.eval()


def measure(task: Any, model: Any, data: Any) -> dict[str, float]:
    """Its metrics over a whole dataset, in batches."""
    starts = range(0, len(data), 256)
    batches = (default_collate(data.__getitems__(list(range(s, min(s + 256, len(data)))))) for s in starts)
    with torch.no_grad():
        metrics: dict[str, float] = task.metrics(model, batches)
    return metrics
