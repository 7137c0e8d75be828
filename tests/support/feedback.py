"""What must hold of every codec's error feedback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sync.codec import ErrorFeedback
from sync.layout import Vector

_ROUNDING = 2.0**-24
"""Of float32, of the value that is rounded."""


def assert_nothing_is_lost(feedback: ErrorFeedback, changes: Sequence[Vector]) -> None:
    """Updates and residual add up to all changes, but for one rounding a round: of the change plus what was held
    back."""
    sent, given_in = np.zeros(changes[0].size), np.zeros(changes[0].size)
    rounded = np.zeros(changes[0].size)
    for change in changes:
        before = np.zeros(change.size) if feedback.residual is None else feedback.residual.astype(np.float64)
        sent += feedback.encode(change)[1]
        given_in += change
        rounded += np.abs(before + change) * _ROUNDING
    assert feedback.residual is not None
    assert (np.abs(sent + feedback.residual - given_in) <= rounded).all()
