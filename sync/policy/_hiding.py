"""When computing hides an exchange in the background: the rule by which settings are changed while a job runs, and by
which plans choose them."""

from __future__ import annotations

__all__ = ["HIDDEN_FRACTION", "HIDING_MARGIN", "LONGEST_ROUNDS", "MAX_CODEC_RATIO"]

HIDDEN_FRACTION = 0.8
"""Communication over computing time up to which communication counts as hidden. A choice: the rest is for what varies
from round to round."""
HIDING_MARGIN = 0.85
"""A change must reduce the communication at least to this fraction of what it was; and a setting is chosen only if its
communication is at most this fraction of what counts as hidden."""
LONGEST_ROUNDS = 16
"""Rounds that a job must still have with the longest interval. A choice."""
MAX_CODEC_RATIO = 0.9
"""A codec is chosen only if its communication takes at most this fraction of that of every less lossy codec."""
