"""What a received update must pass before anything else is done with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sync.layout import Vector

__all__ = ["Guard"]

_REMEMBERED = 15
_JUDGED_FROM = 3
"""Norms known before one is called unusual."""


class Guard:
    """Refuses updates that are not finite, or far larger than their region's ever usually were.

    What is usual is a median of 15 norms, so that no single update changes it, and the highest that it has been: where
    a region has learnt its own shard by heart, alone behind a cut, its updates all but vanish, and the first ones with
    the others would all be unusual.

    Pure and deterministic: what it remembers is a function of the updates that it has seen, so all regions that have
    seen the same ones judge alike. Its memory travels with the model's, in "guard/REGION": the highest median, then
    the last norms; shape (at most 16,).
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def judge(self, region: str, delta: Vector, memory: Mapping[str, Vector], rounds: int = 1) -> tuple[str, Vector]:
        """Why an update of so many rounds is refused ("": it is not), and what to remember of its region."""
        known = memory.get(f"guard/{region}", np.zeros(1, np.float32))
        with np.errstate(over="ignore", invalid="ignore"):
            norm = float(np.sqrt(np.dot(delta, delta))) if delta.size else 0.0
        # An overflow in float32 is judged again in float64: large is not the same as not finite.
        if not np.isfinite(norm):
            norm = float(np.linalg.norm(delta.astype(np.float64)))
        if not np.isfinite(norm):
            return "it is not finite", known
        norm /= rounds
        usual = float(known[0])
        if self._factor and usual > 0 and norm > self._factor * usual:
            return f"its norm of {norm:.3g} is {norm / usual:.0f} times the highest that is usual of its region", known
        last = np.append(known[1:], np.float32(min(norm, 3e38)))[-_REMEMBERED:]
        if last.size >= _JUDGED_FROM:
            usual = max(usual, float(np.median(last)))
        return "", np.append(np.float32(usual), last).astype(np.float32)
