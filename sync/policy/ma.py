"""The WAN policy ``ma``: model averaging between parameter servers, weighted by samples (Cloudless-Training,
arXiv 2303.05330, "MA"; synchronously the same merge as FedAvg, McMahan et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sync.layout import Vector
from sync.means import weighted_mean, weighted_sum
from sync.policy._contract import Contribution, Outer, WanPolicy

__all__ = ["METHODS", "ModelAverage", "mean_delta"]


def mean_delta(contributions: Sequence[Contribution], total: float | None) -> Vector:
    """Return the sample-weighted mean of the deltas, summed in the order of the regions' names.

    If some updates are missing (``total`` is known), each counts as much as if all were present, so that in the end it
    makes no difference which of them were merged together.
    """
    ordered = sorted(contributions, key=lambda contribution: contribution.region)
    deltas = [c.delta for c in ordered]
    if total is None:
        return weighted_mean(deltas, [c.weight for c in ordered])
    return weighted_sum(deltas, [c.weight / total for c in ordered])


class ModelAverage:
    """base + mean of the deltas. Since all regions start a round from the same base, this is the mean of the models."""

    averages = True
    keeps_own = True

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Add the weighted mean of the deltas to `base`; keeps no memory."""
        return Outer(base + mean_delta(contributions, total))


METHODS = (WanPolicy("ma", ModelAverage, adapts_interval=True, sums=True),)
