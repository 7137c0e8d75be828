"""How unlike the labels of regions are, by what profiles and probes have counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.tuning._profile import TaskProfile

__all__ = ["SKEW_THRESHOLD", "LabelCounts", "LabelSkew", "label_skew"]

SKEW_THRESHOLD = 0.2
"""Total variation above which labels count as skewed. With ten classes, and 20 draws each, equal splits over two to
five regions reach 0.03, and those drawn by Dirichlet(0.3), which cost accuracy, 0.22 to 0.62."""
_LABELS, _LABELS_OF_CLASS = 100, 10
"""Fewest labels counted in a region, in all and for each class. With fewer, equal regions seem to differ: two classes
and 20 labels by up to 0.23. So many reach 0.14."""
_SAMPLES, _COUNTED = 2000, 0.9
"""Samples whose labels are counted at most, and the least part of them that a region must have reported. Where
rules withhold more, equal regions differ by up to 0.3."""


@dataclass(frozen=True)
class LabelCounts:
    """How often labels occur among some samples of a region, as far as it has reported them."""

    region: str
    samples: int
    """Of the whole training split."""
    labels: tuple[tuple[int, int], ...]
    """Label and number."""


@dataclass(frozen=True)
class LabelSkew:
    """The region whose labels differ the most from those of all regions."""

    region: str
    distance: float
    """Total variation: half the sum of the differences of the shares, 0 (alike) to 1 (no class in common). It is the
    part of the region's labels that would have to be others."""


def label_skew(regions: Sequence[LabelCounts | TaskProfile]) -> LabelSkew | None:
    """Return the largest total variation between a region's label shares and the pooled ones, which are the mean of
    all regions' shares weighted by samples. None: fewer than two regions have counted enough labels."""
    shares: dict[str, tuple[int, dict[int, float]]] = {}
    classes = {label for one in regions for label, _ in one.labels}
    for one in regions:
        total = sum(count for _, count in one.labels)
        counted = min(_SAMPLES, one.samples)
        if total >= max(_LABELS, _LABELS_OF_CLASS * len(classes), _COUNTED * counted):
            shares[one.region] = one.samples, {label: count / total for label, count in one.labels}
    if len(shares) < 2:
        return None
    everything = sum(samples for samples, _ in shares.values())
    pooled = {
        label: sum(samples * own.get(label, 0.0) for samples, own in shares.values()) / everything for label in classes
    }
    distances = {
        region: 0.5 * sum(abs(own.get(label, 0.0) - share) for label, share in pooled.items())
        for region, (_, own) in shares.items()
    }
    region = max(distances, key=lambda name: distances[name])
    return LabelSkew(region, distances[region])
