"""The WAN policy ``asgd``: asynchronous SGD between parameter servers (Cloudless-Training, arXiv 2303.05330)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sync.layout import Vector
from sync.means import weighted_sum
from sync.policy._contract import Contribution, Outer, WanPolicy

__all__ = ["METHODS", "GradientSum"]


class GradientSum:
    """base + sum of the deltas: every region's steps are applied in every region, as they arrive.

    An update is the change of f local steps (for plain SGD: -lr times their accumulated gradient), so any local
    optimiser is applied once, where the gradient was computed. f = 1 is `asgd`, f > 1 `asgd-ga`. With n regions the
    model makes n times as many steps as one region; the learning rate must suit that.
    """

    averages = False
    keeps_own = True

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Add all deltas to `base`, in the order of the regions' names; keeps no memory."""
        ordered = sorted(contributions, key=lambda contribution: contribution.region)
        return Outer(base + weighted_sum([c.delta for c in ordered], [1.0] * len(ordered)))


METHODS = (WanPolicy("asgd", GradientSum, interval_steps=1, every_step=True, on_arrival=True),)
