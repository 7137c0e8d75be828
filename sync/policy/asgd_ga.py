"""The WAN policy ``asgd-ga``: asynchronous SGD with gradient accumulation (Cloudless-Training, arXiv 2303.05330)."""

from __future__ import annotations

from sync.policy._contract import WanPolicy
from sync.policy.asgd import GradientSum

__all__ = ["METHODS"]

_ACCUMULATED_STEPS = 4
"""The smaller of the two accumulation frequencies that Cloudless-Training evaluates."""

METHODS = (WanPolicy("asgd-ga", GradientSum, interval_steps=_ACCUMULATED_STEPS, on_arrival=True),)
