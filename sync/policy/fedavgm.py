"""The WAN policy ``fedavgm``: FedAvg with momentum over the regions' mean change (Hsu et al. 2019, arXiv 1909.06335,
section 4)."""

from __future__ import annotations

from functools import partial

from sync.policy._contract import WanPolicy
from sync.policy.diloco import DiLoCo

__all__ = ["METHODS"]

METHODS = (
    WanPolicy("fedavgm", partial(DiLoCo, nesterov=False), {"lr": 1.0, "momentum": 0.9}, synchronous=True, sums=True),
)
