"""Error feedback: what a codec holds back is added to what is sent next (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sync.codec._contract import Codec, Tensors
from sync.codec._slabs import join_slabs, slabs_of
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
        end: Vector,
        part: slice = _ALL,
        keep: Callable[[Vector], npt.NDArray[np.bool_]] | None = None,
        since: Vector | None = None,
        buffer: Vector | None = None,
    ) -> tuple[Tensors, Vector]:
        """Encode a change together with what was held back; returns the arrays, and what they decode to.

        The change is ``end``, less ``since`` where that is given. Only the coordinates of ``part`` are sent, and of
        those only the ones that ``keep`` names when it is shown what would be sent, shape (part,). What the arrays
        decode to has the length of the part, and lies in ``buffer`` where that has it too and there is a use for it.
        """
        if self.residual is None and not self.codec.lossy and part == _ALL and keep is None:
            delta = end if since is None else end - since
            return self.codec.encode(delta), delta
        if fresh := self.residual is None:
            self.residual = np.empty(end.size)
        begin, stop, _ = part.indices(end.size)
        for around in (slice(0, begin), slice(stop, end.size)):
            self._add(end, since, around, fresh=fresh)
        sent = buffer if buffer is not None and buffer.size == stop - begin else np.empty(stop - begin, np.float32)
        parts = []
        slabs = slabs_of(self.codec, sent.size) if keep is None else [(slice(0, sent.size), self.codec)]
        for slab, codec in slabs:
            # All that is done with a slab is done while it is in the cache.
            whole = self._add(end, since, slice(begin + slab.start, begin + slab.stop), fresh=fresh)
            chosen = whole.astype(np.float32)
            if keep is not None:
                chosen[~keep(chosen)] = 0.0
            parts.append(codec.encode_into(chosen, sent[slab]))
            whole -= sent[slab]
        return join_slabs(self.codec, parts) if keep is None else parts[0], sent

    def _add(self, end: Vector, since: Vector | None, part: slice, *, fresh: bool) -> npt.NDArray[np.float64]:
        """Add a part of a change to what is held back of it, or put it there; returns a view of that."""
        assert self.residual is not None
        whole = self.residual[part]
        delta = end[part] if since is None else end[part] - since[part]
        if fresh:
            whole[...] = delta
        else:
            whole += delta
        return whole

    def settle(self, delta: Vector, sent: Vector, part: slice = _ALL) -> None:
        """Account for an update that was encoded before, in another life of this stream."""
        whole = delta.astype(np.float64) if self.residual is None else self.residual + delta
        whole[part] -= sent
        self.residual = whole if self.codec.lossy or part != _ALL or whole.any() else None
