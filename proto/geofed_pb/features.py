"""What an agent can do that agents of the previous release cannot; it says so when it connects.

No control plane asks for a feature that the previous release has: no agent that may connect lacks it. Agents still
name it, since they may be upgraded before a control plane of the previous release, which asks.
"""

from __future__ import annotations

__all__ = [
    "ANNOUNCED",
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
_OF_PREVIOUS_RELEASE = (
    "base", "train.precision", "train.accumulate", "train.local", "train.initialModel.file", "train.initialModel.uri",
    "task.secrets", "privacy.secureAggregation", "privacy.differential", "task.requirements", "clients",
    "train.end.steps: 0", "advanced.merge.step", "advanced.k: 0", "advanced.merge.ratio", "task folder above 1 MiB",
)  # fmt: skip
ANNOUNCED = (*FEATURES, *_OF_PREVIOUS_RELEASE)
"""What an agent says when it connects."""
