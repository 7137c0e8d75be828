"""The WAN policy ``fedavgm``: FedAvg with momentum over the regions' mean change (Hsu et al. 2019, arXiv 1909.06335,
section 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from geofed_pb.errors import GeofedError
from sync.layout import Vector
from sync.policy._contract import Contribution, Outer, WanPolicy
from sync.policy.ma import mean_delta

__all__ = ["METHODS", "FedAvgM"]


class FedAvgM:
    """With d the mean of the deltas: v = momentum * v + d; model = base + lr * v."""

    averages = True
    keeps_own = False

    def __init__(self, lr: float, momentum: float) -> None:
        if not 0 < lr <= 10 or not 0 <= momentum < 1:
            text = f"outer lr {lr} must be in (0, 10], outer momentum {momentum} in [0, 1)"
            raise GeofedError("CONFIG_INVALID", text)
        self._lr, self._momentum = np.float32(lr), np.float32(momentum)

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Make one step of the optimiser; the memory holds "velocity", shape (n,)."""
        delta = mean_delta(contributions, total)
        velocity = delta if "velocity" not in memory else self._momentum * memory["velocity"] + delta
        return Outer(base + self._lr * velocity, {"velocity": velocity})


METHODS = (WanPolicy("fedavgm", FedAvgM, {"lr": 1.0, "momentum": 0.9}, synchronous=True),)
