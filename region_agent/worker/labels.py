"""Count labels of a split: how often each class occurs among some of its samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from geofed_pb.bounds import MOST_LABELS
from region_agent.worker.data.shard import Collate, collated
from region_agent.worker.data.streamed import Streamed

__all__ = ["MOST_SAMPLES", "label_counts", "labels_of"]

MOST_SAMPLES = 2000
"""Most samples whose labels are counted. Shares of 100 classes among so many are known to 0.1 in total variation."""
_KEYS = ("label", "labels", "target", "targets", "y")
"""Usual names of the labels in a batch that is a mapping."""


def label_counts(data: Any, seed: int, batch: int, collate: Collate | None, until: float) -> dict[int, int]:
    """Count the labels of up to `MOST_SAMPLES` samples, drawn without replacement, until a time (monotonic seconds).

    Empty: the batches have no labels of a usual layout, or labels of `MOST_LABELS` and more; or the split is read in
    blocks and too large to be shuffled as a whole, so that a few of its blocks may have unlike labels.
    """
    if isinstance(data, Streamed) and not data.order([seed], batch).small:
        return {}
    counts: Counter[int] = Counter()
    order = np.random.default_rng([seed, len(data)]).permutation(len(data))[:MOST_SAMPLES].tolist()
    for start in range(0, len(order), batch):
        made, drawn = collated(data, order[start : start + batch], collate)
        if not made:
            continue
        labels = labels_of(drawn)
        if labels is None:
            return {}
        counts.update(labels)
        if time.monotonic() > until:
            break
    return dict(counts)


def labels_of(batch: Any) -> list[int] | None:
    """Return the labels of a batch: one integer below `MOST_LABELS` for each sample, in `(inputs, labels)` or under a
    usual key of a mapping. None: it has no such labels."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in _KEYS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        found = batch[1]
    if not isinstance(found, torch.Tensor) or found.ndim != 1 or not found.numel():
        return None
    if found.is_floating_point() or found.is_complex():
        return None
    # As numbers of Python: torch has no minimum of unsigned ones.
    labels = [int(one) for one in found.tolist()]
    return labels if all(0 <= one < MOST_LABELS for one in labels) else None
