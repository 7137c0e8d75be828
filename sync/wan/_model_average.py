"""Synchronous inter-PS model averaging, weighted by samples (Cloudless-Training, arXiv 2303.05330, "MA";
the same merge as FedAvg, McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sync.collective import weighted_mean
from sync.layout import Vector
from sync.wan._contract import Contribution, Outer

__all__ = ["ModelAverage", "mean_delta"]


def mean_delta(contributions: Sequence[Contribution]) -> Vector:
    """Sample-weighted mean of the deltas, summed in the order of the regions' names."""
    ordered = sorted(contributions, key=lambda contribution: contribution.region)
    return weighted_mean([c.delta for c in ordered], [c.weight for c in ordered])


class ModelAverage:
    """base + mean of the deltas. Since all regions start a round from the same base, this is the mean of the models."""

    def merge(self, base: Vector, contributions: Sequence[Contribution], memory: Mapping[str, Vector]) -> Outer:
        return Outer(base + mean_delta(contributions))
