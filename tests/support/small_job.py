"""A small job file and its task module, which is never run."""

from __future__ import annotations

__all__ = ["JOB", "TASK"]

JOB = """\
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: digits}
task: {module: task.py, config: {width: 8}}
data: {dataset: digits}
train: {batch: 10, end: {steps: 4}}
advanced: {wan: {interval: 2}}
limits: {lostRegion: 2s}
"""
TASK = """\
def model(config): ...
def dataset(uri, split, config): ...
def loss(model, batch): ...
"""
