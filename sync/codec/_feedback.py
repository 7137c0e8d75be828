"""Error feedback: what a lossy codec does not send is added to the next update (Seide et al. 2014; Karimireddy et al.
2019, arXiv 1901.09847)."""

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
    """The residual of one region's updates.

    The updates sent plus the residual equal the sum of all changes, without rounding, as long as the changes of a
    coordinate lie within a factor of 2^29 of each other: the residual is kept in float64. The codec may change from
    update to update.
    """

    def __init__(self, codec: Codec, residual: npt.NDArray[np.float64] | None = None) -> None:
        self.codec = codec
        self.residual = residual
        """What has not been sent yet, shape (n,); None: nothing."""

    def encode(
        self,
        end: Vector,
        part: slice = _ALL,
        keep: Callable[[Vector], npt.NDArray[np.bool_]] | None = None,
        since: Vector | None = None,
        buffer: Vector | None = None,
    ) -> tuple[Tensors, Vector]:
        """Encode a change plus the residual; return the arrays, and the values that they decode to.

        The change is ``end``, or ``end - since`` if ``since`` is given. Only the coordinates of ``part`` are sent, and
        of these only the ones that ``keep`` selects from the values that would be sent, shape (part,). The decoded
        values have the shape (part,); they are in ``buffer`` if that has this size and is of use.
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
            # A slab is processed completely while it is in the CPU's cache.
            whole = self._add(end, since, slice(begin + slab.start, begin + slab.stop), fresh=fresh)
            chosen = whole.astype(np.float32)
            if keep is not None:
                chosen[~keep(chosen)] = 0.0
            parts.append(codec.encode_into(chosen, sent[slab]))
            whole -= sent[slab]
        return join_slabs(self.codec, parts) if keep is None else parts[0], sent

    def _add(self, end: Vector, since: Vector | None, part: slice, *, fresh: bool) -> npt.NDArray[np.float64]:
        """Add part of a change to the residual, or store it there if ``fresh``; return a view of that part of the
        residual."""
        assert self.residual is not None
        whole = self.residual[part]
        delta = end[part] if since is None else end[part] - since[part]
        if fresh:
            whole[...] = delta
        else:
            whole += delta
        return whole

    def settle(self, delta: Vector, sent: Vector, part: slice = _ALL) -> None:
        """Account for an update that was encoded before, by an earlier process."""
        whole = delta.astype(np.float64) if self.residual is None else self.residual + delta
        whole[part] -= sent
        self.residual = whole if self.codec.lossy or part != _ALL or whole.any() else None
