"""Treatments of stale updates: those made from an older model than the receiver's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sync.layout import Vector
from sync.policy._contract import Contribution, Outer, Policy

__all__ = ["Damped", "DelayCompensated"]

_DECAY = np.float32(0.95)
"""Decay of the running mean square of updates, as in DC-ASGD's adaptive form."""
_EPSILON = np.float32(1e-7)
"""Added to the mean square before the division."""


class Damped:
    """Divides an update by its staleness, if that is above 1 (staleness-aware ASGD, Zhang et al., arXiv 1511.05950).

    One round of staleness is not counted, because every update has it: over a WAN the sender has always missed at least
    one round. What an update loses by the division is lost: the sum of all changes is not preserved.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.averages, self.keeps_own = policy.averages, policy.keeps_own

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Divide the deltas of stale updates, and merge all by the policy."""
        damped = [replace(c, delta=c.delta / np.float32(c.staleness)) if c.staleness > 1 else c for c in contributions]
        return self._policy.merge(base, damped, memory, total)


class DelayCompensated:
    """Delay compensation on model changes: the adaptive form of DC-ASGD (Zheng et al. 2017, arXiv 1609.08326, algorithm
    2).

    With d = -lr g the compensated gradient g + lambda g g drift becomes d - strength * d * d * drift / rms(d): the
    learning rate cancels against the adaptive lambda = strength / rms(g).
    """

    _SQUARE = "square"

    def __init__(self, policy: Policy, strength: float = 0.04) -> None:
        self._policy, self._strength = policy, np.float32(strength)
        self.averages, self.keeps_own = policy.averages, policy.keeps_own

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Compensate the deltas for the drift since their base, and merge all by the policy.

        The memory also holds the running mean square of the deltas.
        """
        square = memory.get(self._SQUARE)
        compensated = []
        for c in contributions:
            here = c.delta * c.delta
            square = here if square is None else _DECAY * square + (1 - _DECAY) * here
            if c.staleness and c.drift is not None:
                term = self._strength * here * c.drift / np.sqrt(square + _EPSILON)
                c = replace(c, delta=(c.delta - term).astype(np.float32, copy=False))
            compensated.append(c)
        rest = {name: vector for name, vector in memory.items() if name != self._SQUARE}
        outer = self._policy.merge(base, compensated, rest, total)
        kept = {} if square is None else {self._SQUARE: square.astype(np.float32, copy=False)}
        return Outer(outer.model, {**outer.memory, **kept})
