"""The WAN policy ``diloco``: an outer optimiser with Nesterov momentum over the regions' mean change
(Douillard et al. 2023, arXiv 2311.08105, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from geofed_pb.errors import GeofedError
from sync.layout import Vector
from sync.policy._contract import Contribution, Outer, WanPolicy
from sync.policy.ma import mean_delta

__all__ = ["METHODS", "DiLoCo"]


class DiLoCo:
    """With d the mean of the deltas: v = momentum * v + d; model = base + lr * (d + momentum * v).

    With lr 1 and momentum 0 it is model averaging. It pays off with many rounds of many local steps; in the first
    rounds the momentum still builds up. With background exchange, d is the region's own fresh term and the remote terms
    that have arrived (eager updates, arXiv 2502.12996). What a term finally adds to the model does not depend on when
    it arrived, since the filter is linear.
    """

    averages = True
    keeps_own = False

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, *, nesterov: bool = True) -> None:
        """``nesterov``: False: model = base + lr * v, the plain momentum of FedAvgM."""
        if not 0 < lr <= 10 or not 0 <= momentum < 1:
            raise GeofedError(
                "CONFIG_INVALID", f"outer lr {lr} must be in (0, 10], outer momentum {momentum} in [0, 1)"
            )
        self._lr, self._momentum, self._nesterov = np.float32(lr), np.float32(momentum), nesterov

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Make one step of the outer optimiser; the memory holds "velocity", shape (n,)."""
        delta = mean_delta(contributions, total)
        velocity = delta if "velocity" not in memory else self._momentum * memory["velocity"] + delta
        step = self._lr * (delta + self._momentum * velocity if self._nesterov else velocity)
        return Outer(base + step.astype(np.float32, copy=False), {"velocity": velocity})


METHODS = (WanPolicy("diloco", DiLoCo, {"lr": 0.7, "momentum": 0.9}, adapts_interval=True, sums=True),)
