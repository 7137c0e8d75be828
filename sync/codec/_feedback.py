"""Error feedback: what a lossy codec does not send is added to the next update (Seide et al. 2014; Karimireddy et al.
2019, arXiv 1901.09847)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from sync.codec._contract import Codec, Tensors
from sync.codec._slabs import Decoding, join_slabs, slabs_of
from sync.layout import Vector
from sync.mapped_files import release, windows

__all__ = ["ErrorFeedback"]

_ALL = slice(None)
_RELEASED = 1 << 20
"""Coordinates after which the pages of a mapped model are given back: 4 MB. A choice."""
_BLOCK = 1 << 16
"""Coordinates that are processed together where no codec says how many, so that they stay in the CPU's cache."""


def _fitting(buffer: Vector | None, size: int) -> Vector:
    return buffer if buffer is not None and buffer.size == size else np.empty(size, np.float32)


def _difference(end: Vector, since: Vector, buffer: Vector | None) -> Vector:
    out = _fitting(buffer, end.size)
    for part in windows(end.size, end):
        np.subtract(end[part], since[part], out=out[part])
    return out


class ErrorFeedback:
    """The residual of one region's updates.

    The updates sent plus the residual equal the sum of all changes, up to one rounding a round: where a change is added
    to the residual, in float32. Adding the update to the model, which is float32 as well and larger, rounds more. What
    the codec holds back is exact. The codec may change from update to update.
    """

    def __init__(self, codec: Codec, residual: Vector | None = None) -> None:
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
        *,
        decoded: bool = True,
    ) -> tuple[Tensors, Vector]:
        """Encode a change plus the residual; return the arrays, and the values that they decode to.

        Without ``decoded``, an empty vector is returned in their place where they would have to be kept for it.

        The change is ``end``, or ``end - since`` if ``since`` is given. Only the coordinates of ``part`` are sent, and
        of these only the ones that ``keep`` selects from the values that would be sent, shape (part,). The decoded
        values have the shape (part,); they are in ``buffer`` if that has this size and is of use.
        """
        if self.residual is None and not self.codec.lossy and part == _ALL and keep is None:
            delta = end if since is None else _difference(end, since, buffer)
            return self.codec.encode(delta), delta
        if fresh := self.residual is None:
            self.residual = np.empty(end.size, np.float32)
        begin, stop, _ = part.indices(end.size)
        for at, last in ((0, begin), (stop, end.size)):
            for low in range(at, last, _BLOCK):
                self._add(end, since, slice(low, min(low + _BLOCK, last)), fresh=fresh)
        size = stop - begin
        sent = _fitting(buffer, size) if decoded else np.empty(0, np.float32)
        slabs = slabs_of(self.codec, size) if keep is None else [(slice(0, size), self.codec)]

        def encoded() -> Iterator[Tensors]:
            read = 0
            for slab, codec in slabs:
                # A slab is processed completely while it is in the CPU's cache.
                whole = self._add(end, since, slice(begin + slab.start, begin + slab.stop), fresh=fresh)
                chosen = whole.copy()
                if keep is not None:
                    chosen[~keep(chosen)] = 0.0
                out = sent[slab] if decoded else np.empty_like(chosen)
                yield codec.encode_into(chosen, out)
                whole -= out
                if slab.stop - read >= _RELEASED:
                    release(end)
                    read = slab.stop

        if keep is None:
            return join_slabs(self.codec, encoded()), sent
        (only,) = encoded()
        return only, sent

    def _add(self, end: Vector, since: Vector | None, part: slice, *, fresh: bool) -> Vector:
        """Add part of a change to the residual, or store it there if ``fresh``; return a view of that part of the
        residual."""
        assert self.residual is not None
        whole = self.residual[part]
        if not fresh:
            whole += end[part] if since is None else end[part] - since[part]
        elif since is None:
            whole[...] = end[part]
        else:
            np.subtract(end[part], since[part], out=whole)
        return whole

    def settle(self, end: Vector, since: Vector, sent: Vector | Decoding, part: slice = _ALL) -> None:
        """Account for an update of ``end - since`` that was encoded before, by an earlier process. ``sent``: the values
        that it decodes to, shape (part,)."""
        if fresh := self.residual is None:
            self.residual = np.empty(end.size, np.float32)
        begin, stop, _ = part.indices(end.size)
        for window in windows(end.size, end, sent):
            for low in range(window.start, window.stop, _BLOCK):
                block = slice(low, min(low + _BLOCK, window.stop))
                whole = self._add(end, since, block, fresh=fresh)
                first, last = max(low, begin), min(block.stop, stop)
                if first < last:
                    whole[first - low : last - low] -= sent[first - begin : last - begin]
        self._forget_zeros(part)

    def add(self, end: Vector, since: Vector, first: int) -> None:
        """Add ``end - since`` to the residual, from the coordinate ``first`` on."""
        if self.residual is None:
            self.residual = np.zeros(end.size, np.float32)
        for low in range(first, end.size, _BLOCK):
            self._add(end, since, slice(low, min(low + _BLOCK, end.size)), fresh=False)
        self._forget_zeros(_ALL)

    def _forget_zeros(self, part: slice) -> None:
        """Keep no residual that is zero if the codec, for updates of this part, makes none."""
        if not self.codec.lossy and part == _ALL and self.residual is not None and not self.residual.any():
            self.residual = None
