"""The WAN policy ``fednova``: normalised averaging of regions that make different numbers of local steps (Wang et al.
2020, arXiv 2007.07481, section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from geofed_pb.errors import GeofedError
from sync.layout import Vector
from sync.means import weighted_sum
from sync.policy._contract import Contribution, Outer, WanPolicy

__all__ = ["METHODS", "NormalizedAverage"]


class NormalizedAverage:
    """base + t * sum of p_i * d_i / a_i, with p_i region i's share of the data, d_i its change in a round, a_i its
    local steps in the round, and t = sum of p_i * a_i.

    a_i is the paper's for SGD. Its other one for momentum is of optimisers that begin again in each round. Those of
    workers do not: with momentum m each gradient enters later steps 1 / (1 - m) times in all, in whichever round, so
    changes are in proportion to the number of steps there, too.
    """

    averages = True
    keeps_own = True

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Add the normalised mean of the deltas to ``base``; keeps no memory. If some regions' updates were refused,
        the shares of the others count in proportion.

        Raises ``GeofedError("CONFIG_INVALID")`` if the plan has not told a region's local steps and its share.
        """
        ordered = sorted(contributions, key=lambda contribution: contribution.region)
        for one in ordered:
            if not (one.steps > 0 and one.data_share > 0):
                text = f"the plan does not tell how many local steps {one.region or 'a region'} makes on which share"
                raise GeofedError("CONFIG_INVALID", text)
        whole = sum(one.data_share for one in ordered)
        mean = sum(one.data_share * one.steps for one in ordered) / whole
        factors = [mean * one.data_share / whole / one.steps for one in ordered]
        return Outer(base + weighted_sum([one.delta for one in ordered], factors))


METHODS = (WanPolicy("fednova", NormalizedAverage, synchronous=True, normalises=True),)
