"""What an agent can do that agents of earlier versions could not; it says so when it connects."""

from __future__ import annotations

__all__ = [
    "ACCUMULATE",
    "BASE",
    "CLIENTS",
    "DIFFERENTIAL",
    "EVALUATION",
    "FEATURES",
    "INITIAL_FILE",
    "LOCAL",
    "PARTS",
    "PRECISION",
    "REQUIREMENTS",
    "SECRETS",
    "SECURE",
]

BASE = "base"
"""Tensors that never change are not exchanged."""
PRECISION = "train.precision"
ACCUMULATE = "train.accumulate"
LOCAL = "train.local"
INITIAL_FILE = "train.initialModel.file"
SECRETS = "task.secrets"
SECURE = "privacy.secureAggregation"
DIFFERENTIAL = "privacy.differential"
REQUIREMENTS = "task.requirements"
CLIENTS = "clients"
EVALUATION = "train.end.steps: 0"
PARTS = "task folder above 1 MiB"
"""Files of a task folder are sent each by itself."""
FEATURES = (
    BASE, PRECISION, ACCUMULATE, LOCAL, INITIAL_FILE, SECRETS, SECURE, DIFFERENTIAL, REQUIREMENTS, CLIENTS, EVALUATION,
    PARTS,
)  # fmt: skip
"""All features of this version."""
