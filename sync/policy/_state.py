"""Averaging of model state that gradients do not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sync.layout import Vector
from sync.policy._contract import Contribution, Outer, Policy
from sync.policy.ma import ModelAverage

__all__ = ["StateAveraged"]


class StateAveraged:
    """Applies a policy to the trained coordinates, and averages the state behind them (BatchNorm statistics, counters).

    Changes of a running variance must not be added up over the regions, and the momentum of an outer optimiser would
    carry it below zero.
    """

    def __init__(self, policy: Policy, trainable: int) -> None:
        self._policy, self._trainable, self._mean = policy, trainable, ModelAverage()
        self.averages, self.keeps_own = policy.averages, policy.keeps_own

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Merge the trained coordinates by the policy and average the others; only the policy has memory."""
        cut = self._trainable
        head = self._policy.merge(base[:cut], _part(contributions, slice(cut)), memory, total)
        tail = self._mean.merge(base[cut:], _part(contributions, slice(cut, None)), {}, total)
        return Outer(np.concatenate([head.model, tail.model]), head.memory)


def _part(contributions: Sequence[Contribution], part: slice) -> list[Contribution]:
    return [replace(c, delta=c.delta[part], drift=None if c.drift is None else c.drift[part]) for c in contributions]
