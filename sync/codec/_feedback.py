"""Error feedback: what a codec holds back is added to what is sent next (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sync.codec._contract import Codec, Tensors
from sync.layout import Vector

__all__ = ["ErrorFeedback"]

_ALL = slice(None)


class ErrorFeedback:
    """One stream of updates.

    Sent plus residual is all that was ever given in, without rounding, as long as the changes of a coordinate lie
    within a factor of 2^29 of each other: the residual is kept in float64. The codec may be another for each update.
    """

    def __init__(self, codec: Codec, residual: npt.NDArray[np.float64] | None = None) -> None:
        self.codec = codec
        self.residual = residual
        """What has been held back so far, shape (n,); None: nothing."""

    def encode(
        self,
        delta: Vector,
        part: slice = _ALL,
        keep: Callable[[Vector], npt.NDArray[np.bool_]] | None = None,
    ) -> tuple[Tensors, Vector]:
        """Encode a change together with what was held back; returns the arrays, and what they decode to.

        Only the coordinates of ``part`` are sent, and of those only the ones that ``keep`` names when it is shown what
        would be sent, shape (part,). What the arrays decode to has the length of the part.
        """
        if self.residual is None and not self.codec.lossy and part == _ALL and keep is None:
            return self.codec.encode(delta), delta
        whole = delta.astype(np.float64) if self.residual is None else np.add(self.residual, delta, out=self.residual)
        chosen = whole[part].astype(np.float32)
        if keep is not None:
            chosen[~keep(chosen)] = 0.0
        tensors = self.codec.encode(chosen)
        sent = self.codec.decode(tensors, chosen.size)
        whole[part] -= sent
        self.residual = whole
        return tensors, sent

    def settle(self, delta: Vector, sent: Vector, part: slice = _ALL) -> None:
        """Account for an update that was encoded before, in another life of this stream."""
        whole = delta.astype(np.float64) if self.residual is None else self.residual + delta
        whole[part] -= sent
        self.residual = whole if self.codec.lossy or part != _ALL or whole.any() else None
