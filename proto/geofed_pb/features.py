"""What an agent can do that agents of the previous release cannot; it says so when it connects.

A feature that the previous release has is deleted here: no agent that may connect lacks it.
"""

from __future__ import annotations

__all__ = [
    "COMPILE",
    "FEATURES",
    "GPUS",
    "IMAGE",
    "INITIAL_ADAPTER",
    "LEAVE_OUT",
    "PRIVATE_COUNTS",
    "PROBED_LABELS",
    "QUARANTINE",
    "RATE_OF_BATCH",
    "ROBUST_BACKGROUND",
    "SHARDING",
]

COMPILE = "train.compile"
LEAVE_OUT = "regions.lost: continue"
"""A job ends at once, with the last merged round, when a region stays away."""
INITIAL_ADAPTER = "train.initialModel.adapter"
IMAGE = "task.image"
GPUS = "function.gpus"
SHARDING = "function.sharding"
ROBUST_BACKGROUND = "advanced.wan.robust with advanced.wan.exchange: background"
PRIVATE_COUNTS = "privacy.differential with train.end.steps: 0"
QUARANTINE = "advanced.wan.quarantine"
RATE_OF_BATCH = "train.learningRate.batch"
PROBED_LABELS = "labels in probes"
"""A probe counts labels, and may count nothing else."""
FEATURES = (
    COMPILE, GPUS, IMAGE, INITIAL_ADAPTER, LEAVE_OUT, PRIVATE_COUNTS, PROBED_LABELS, QUARANTINE, RATE_OF_BATCH,
    ROBUST_BACKGROUND, SHARDING,
)  # fmt: skip
"""All features of this version that agents of the previous release lack."""
