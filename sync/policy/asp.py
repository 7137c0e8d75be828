"""The WAN policy ``asp``: `asgd` of the changes that Gaia's filter passes (Hsieh et al., NSDI 2017, section 4.1)."""

from __future__ import annotations

from sync.policy._contract import WanPolicy
from sync.policy.asgd import GradientSum

__all__ = ["METHODS"]

_FIRST_THRESHOLD = 0.01
"""Gaia's initial threshold, as in the paper: a change is sent if it exceeds this fraction of the coordinate."""

METHODS = (
    WanPolicy("asp", GradientSum, interval_steps=1, every_step=True, on_arrival=True, significance=_FIRST_THRESHOLD),
)
