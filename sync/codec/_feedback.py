"""Error feedback: what a codec holds back is added to what is sent next (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._contract import Codec, Tensors
from sync.layout import Vector

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """One stream of updates through one codec.

    Sent plus residual is all that was ever given in, without rounding, as long as the changes of a coordinate lie
    within a factor of 2^29 of each other: the residual is kept in float64.
    """

    def __init__(self, codec: Codec, residual: npt.NDArray[np.float64] | None = None) -> None:
        self.codec = codec
        self.residual = residual
        """What has been held back so far, shape (n,); None: nothing."""

    def encode(self, delta: Vector) -> tuple[Tensors, Vector]:
        """Encode a change together with what was held back; returns the arrays, and what they decode to."""
        if not self.codec.lossy:
            return self.codec.encode(delta), delta
        whole = delta.astype(np.float64)
        if self.residual is not None:
            whole += self.residual
        tensors = self.codec.encode(whole.astype(np.float32))
        sent = self.codec.decode(tensors, delta.size)
        whole -= sent
        self.residual = whole
        return tensors, sent
