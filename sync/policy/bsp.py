"""The WAN policy ``bsp``: averages all regions' models after every step (bulk-synchronous parallel)."""

from __future__ import annotations

from sync.policy._contract import WanPolicy
from sync.policy.ma import ModelAverage

__all__ = ["METHODS"]

METHODS = (WanPolicy("bsp", ModelAverage, interval_steps=1, every_step=True, synchronous=True, sums=True),)
