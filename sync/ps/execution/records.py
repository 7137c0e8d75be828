"""Manifests, metrics and lines of the log, as they are read from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sync.file_transfer.manifest import Manifest
from sync.histograms import Histogram
from sync.ps.core.actions import LogRoundEnd, MergeUpdates, Restart, StoreMetrics

__all__ = ["Entry", "entry_of", "manifest_of", "metrics_of", "stored_manifests"]

Entry = LogRoundEnd | MergeUpdates | Restart
"""One line of the log."""


def stored_manifests(paths: list[Path]) -> Iterator[Manifest]:
    """Yield the manifests in files, without those whose update is missing."""
    for path in paths:
        if path.with_suffix(".frame").exists():
            yield manifest_of(json.loads(path.read_text()))


def manifest_of(values: dict[str, Any]) -> Manifest:
    """Return the manifest that was stored as JSON."""
    seen = tuple((str(region), int(sequence)) for region, sequence in values.get("seen", ()))
    return Manifest(**{**values, "seen": seen})


def metrics_of(values: dict[str, Any]) -> StoreMetrics:
    """Return the metrics that were stored as JSON."""
    histograms = {
        name: Histogram(tuple(one["edges"]), tuple(one["categories"]), tuple(one["counts"]), one["withheld"])
        for name, one in values["histograms"].items()
    }
    return StoreMetrics(**{**values, "histograms": histograms})


def entry_of(values: dict[str, Any]) -> Entry:
    """Return a line of the log."""
    if "end" in values:
        return LogRoundEnd(**values["end"])
    if "restart" in values:
        return Restart(**values["restart"])
    merge = values["merge"]
    pairs = tuple((region, mark) for region, mark in merge["watermarks"])
    manifests = tuple(manifest_of(manifest) for manifest in merge["manifests"])
    known = {"watermarks": pairs, "manifests": manifests}
    return MergeUpdates(**{**merge, **known, "lasts": tuple(merge["lasts"]), "staleness": tuple(merge["staleness"])})
