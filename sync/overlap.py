"""What workers make of the next round before the answer to a round's end counts, with background exchange."""

from __future__ import annotations

__all__ = ["overlapped_steps"]

_SHARE = 4


def overlapped_steps(steps_per_round: int) -> int:
    """A quarter of a round's steps: what hands the model over and fetches the answer is hidden behind them."""
    return max(1, steps_per_round // _SHARE)
