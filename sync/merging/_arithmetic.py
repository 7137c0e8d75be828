"""Arithmetic of a reduction: how owners merge the parts of a chunk, and how parts and merged chunks are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.codec import Codec, ErrorFeedback, Tensors, codec_named, is_list_format, with_state
from sync.framing import Arrays
from sync.layout import Vector
from sync.merging._merge_order import Numbers, OrderedSum
from sync.merging._parted import PartedVector
from sync.merging.lists import Lists, ListsAndState

__all__ = ["Arithmetic", "MeanOf", "Values"]

Values = Vector | PartedVector
"""Values of a chunk."""


class Arithmetic(Protocol):
    """Encodes and merges chunks. Chunks are identified by number; shapes are (length of the chunk,)."""

    def part(self, chunk: int, values: Any) -> Arrays:
        """Return the arrays that are sent to the chunk's owner."""

    def own(self, chunk: int, values: Any) -> Numbers:
        """Return the values that the owner itself adds; they must not change until the chunk is merged."""

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        """Decode a part. Raises ``GeofedError("FRAME_INVALID")``."""

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> OrderedSum: ...

    def merged(self, chunk: int, fold: OrderedSum) -> tuple[Arrays, Values, float]:
        """Return the arrays that the owner publishes, the values that all workers read from them, and the sum of
        weights."""

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector: ...


class MeanOf:
    """The sample-weighted mean; parts and merged chunks are encoded with a codec, with error feedback in both
    directions.

    An owner's own part is never encoded. The residual of a part stays with the worker that sends it, that of a merged
    chunk with the owner, as exactly as `ErrorFeedback` keeps it.
    """

    def __init__(self, codec: str, bounds: Sequence[slice], trained: int | None) -> None:
        size = bounds[-1].stop
        self._known = known = size if trained is None else trained
        self._as_lists = is_list_format(codec)
        self._codecs = [_codec(codec, known - chunk.start, chunk.stop - chunk.start) for chunk in bounds]
        self.verbatim = all(one.verbatim for one in self._codecs)
        """Whether parts are float32 as they are."""
        self.given = {number: ErrorFeedback(codec) for number, codec in enumerate(self._codecs)}
        """Residuals of this worker's parts, by chunk."""
        self.published = {number: ErrorFeedback(codec) for number, codec in enumerate(self._codecs)}
        """Residuals of the merged chunks of this owner, by chunk."""
        self.joined = {number: ErrorFeedback(codec) for number, codec in enumerate(self._codecs)}
        """Residuals of this worker's merges for its group, by chunk."""
        self._bounds = bounds
        self.before: Vector | None = None
        """Residual of this worker's parts before the current exchange, shape (n,)."""

    def begin(self) -> None:
        """Save the residuals, in case the exchange fails."""
        if any(feedback.residual is not None for feedback in self.given.values()):
            self.before = np.zeros(self._bounds[-1].stop, np.float32)
            for chunk, part in enumerate(self._bounds):
                residual = self.given[chunk].residual
                if residual is not None:
                    self.before[part] = residual

    def hold(self, residual: Vector) -> None:
        """Continue from the residual of parts with other bounds, shape (n,)."""
        for chunk, part in enumerate(self._bounds):
            self.given[chunk].residual = residual[part].copy()

    def part(self, chunk: int, values: Values) -> Arrays:
        return self._encode(self.given[chunk], chunk, values)[0]

    def own(self, chunk: int, values: Values) -> Numbers:
        return values

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        return self._codecs[chunk].decode(tensors, size)

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> OrderedSum:
        return OrderedSum(size, contributors)

    def merged(self, chunk: int, fold: OrderedSum) -> tuple[Arrays, Values, float]:
        mean, weight = fold.mean()
        tensors, values = self._encode(self.published[chunk], chunk, mean)
        return tensors, values, weight

    def joint(self, chunk: int, fold: OrderedSum) -> tuple[Arrays, float]:
        """Return the arrays of a group's result for the owner; the mean is rounded to float32 and encoded."""
        mean, weight = fold.mean()
        return self._encode(self.joined[chunk], chunk, mean)[0], weight

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector:
        return self._codecs[chunk].decode(tensors, size)

    def _encode(self, feedback: ErrorFeedback, chunk: int, values: Values) -> tuple[Arrays, Values]:
        """Encode values with error feedback; with lists, only the entries that are not zero now.

        The residual of a sparse vector is never exactly zero: otherwise all of it would be sent in each step.
        """
        if isinstance(values, PartedVector):
            if feedback.codec.verbatim and feedback.residual is None:
                return {"delta": values.parts}, values
            values = values[:]
        if not self._as_lists:
            return feedback.encode(values)
        if not np.isfinite(values).all():
            # Encoded, it would become a large number like any other, and the loss would remain finite.
            hint = "training diverged: lower the learning rate"
            raise GeofedError("TASK_FAILED", "a gradient is not finite", hint=hint)
        trained = max(0, self._known - self._bounds[chunk].start)

        def new(_: Vector) -> npt.NDArray[np.bool_]:
            selected: npt.NDArray[np.bool_] = np.not_equal(values, 0)
            selected[trained:] = True
            return selected

        return feedback.encode(values, keep=new)

    def residuals(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the residuals, by names for `restore`."""
        return {
            f"{name}.{chunk}": feedback.residual
            for name, streams in self._streams()
            for chunk, feedback in streams.items()
            if feedback.residual is not None
        }

    def _streams(self) -> tuple[tuple[str, dict[int, ErrorFeedback]], ...]:
        return ("given", self.given), ("joined", self.joined), ("published", self.published)

    def restore(self, name: str, residual: npt.NDArray[np.generic]) -> None:
        """Restore one of the `residuals`."""
        kind, _, chunk = name.partition(".")
        dict(self._streams())[kind][int(chunk)].residual = np.array(residual, np.float32)


def _codec(name: str, trained: int, size: int) -> Codec:
    """Return the codec of a chunk of ``size`` coordinates, of which the first ``trained`` are trained by gradients."""
    if not is_list_format(name):
        return with_state(codec_named(name), trained, size)
    return Lists(name) if trained >= size else ListsAndState(name, max(0, trained))
