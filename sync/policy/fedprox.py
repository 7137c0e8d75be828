"""The WAN policy ``fedprox``: model averaging, and workers that stay close to the round's model (Li et al. 2020,
arXiv 1812.06127, algorithm 2)."""

from __future__ import annotations

from geofed_pb.errors import GeofedError
from sync.policy._contract import WanPolicy
from sync.policy.ma import ModelAverage

__all__ = ["METHODS", "FedProx"]


class FedProx(ModelAverage):
    """`ModelAverage`; the workers add the gradient of mu / 2 * |w - w_round|^2 to that of the task's loss."""

    def __init__(self, mu: float) -> None:
        if not 0 < mu <= 100:
            raise GeofedError("CONFIG_INVALID", f"outer mu {mu} must be in (0, 100]")


METHODS = (WanPolicy("fedprox", FedProx, {"mu": 0.01}, synchronous=True, sums=True, proximal="mu"),)
