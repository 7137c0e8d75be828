"""The WAN policy ``asp``: `asgd` of what Gaia's filter lets through (Hsieh et al., NSDI 2017, section 4.1)."""

from __future__ import annotations

from sync.policy._contract import WanPolicy
from sync.policy.asgd import GradientSum

__all__ = ["METHODS"]

_FIRST_THRESHOLD = 0.01
"""Gaia's initial threshold, a share of the coordinate: as in the paper."""

METHODS = (
    WanPolicy("asp", GradientSum, interval_steps=1, every_step=True, on_arrival=True, significance=_FIRST_THRESHOLD),
)
