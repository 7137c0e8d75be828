"""What an agent can do that agents of earlier versions could not; it says so when it connects."""

from __future__ import annotations

__all__ = [
    "ACCUMULATE",
    "BASE",
    "CLIENTS",
    "COMPILE",
    "DIFFERENTIAL",
    "EVALUATION",
    "FEATURES",
    "GPUS",
    "IMAGE",
    "INITIAL_ADAPTER",
    "INITIAL_FILE",
    "INITIAL_URI",
    "LEAVE_OUT",
    "LOCAL",
    "MERGE_RATIO",
    "MERGE_STEP",
    "MERGE_TO_ALL",
    "PARTS",
    "PRECISION",
    "PRIVATE_COUNTS",
    "PROBED_LABELS",
    "QUARANTINE",
    "RATE_OF_BATCH",
    "REQUIREMENTS",
    "ROBUST_BACKGROUND",
    "SECRETS",
    "SECURE",
    "SHARDING",
]

BASE = "base"
"""Tensors that never change are not exchanged."""
PRECISION = "train.precision"
ACCUMULATE = "train.accumulate"
COMPILE = "train.compile"
LEAVE_OUT = "regions.lost: continue"
"""A job ends at once, with the last merged round, when a region stays away."""
LOCAL = "train.local"
INITIAL_FILE = "train.initialModel.file"
INITIAL_URI = "train.initialModel.uri"
INITIAL_ADAPTER = "train.initialModel.adapter"
SECRETS = "task.secrets"
SECURE = "privacy.secureAggregation"
DIFFERENTIAL = "privacy.differential"
REQUIREMENTS = "task.requirements"
IMAGE = "task.image"
CLIENTS = "clients"
GPUS = "function.gpus"
SHARDING = "function.sharding"
EVALUATION = "train.end.steps: 0"
MERGE_RATIO = "advanced.merge.ratio"
MERGE_STEP = "advanced.merge.step"
MERGE_TO_ALL = "advanced.k: 0"
ROBUST_BACKGROUND = "advanced.wan.robust with advanced.wan.exchange: background"
PRIVATE_COUNTS = "privacy.differential with train.end.steps: 0"
QUARANTINE = "advanced.wan.quarantine"
RATE_OF_BATCH = "train.learningRate.batch"
PARTS = "task folder above 1 MiB"
"""Files of a task folder are sent each by itself."""
PROBED_LABELS = "labels in probes"
"""A probe counts labels, and may count nothing else."""
FEATURES = (
    BASE, PRECISION, ACCUMULATE, LOCAL, INITIAL_FILE, INITIAL_URI, SECRETS, SECURE, DIFFERENTIAL, REQUIREMENTS, CLIENTS,
    EVALUATION, MERGE_STEP, MERGE_TO_ALL, MERGE_RATIO, PARTS,
    IMAGE, ROBUST_BACKGROUND, LEAVE_OUT, INITIAL_ADAPTER, COMPILE, GPUS, PROBED_LABELS, QUARANTINE, PRIVATE_COUNTS,
    RATE_OF_BATCH, SHARDING,
)  # fmt: skip
"""All features of this version."""
