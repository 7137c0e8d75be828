"""Synchronous inter-PS model averaging, weighted by samples (Cloudless-Training, arXiv 2303.05330, "MA";
the same merge as FedAvg, McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

from sync.collective import weighted_mean
from sync.layout import Vector
from sync.wan._contract import Contribution

__all__ = ["ModelAverage"]


class ModelAverage:
    """base + mean of the deltas. Since all regions start a round from the same base, this is the mean of the models."""

    def merge(self, base: Vector, contributions: Sequence[Contribution]) -> Vector:
        ordered = sorted(contributions, key=lambda contribution: contribution.region)
        mean = weighted_mean([c.delta for c in ordered], [c.weight for c in ordered])
        return base + mean
