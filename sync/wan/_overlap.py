"""Overlap of training and exchange: the steps of the next round that workers make before they need the answer to the
last round's end, with background exchange."""

from __future__ import annotations

__all__ = ["overlapped_steps"]

_FRACTION_DIVISOR = 4
"""A round's steps are divided by this."""


def overlapped_steps(steps_per_round: int) -> int:
    """Return a quarter of a round's steps: submitting the model and fetching the answer are hidden behind them."""
    return max(1, steps_per_round // _FRACTION_DIVISOR)
