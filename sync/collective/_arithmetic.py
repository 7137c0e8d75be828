"""What owners make of the parts they are given, and in what form parts and merged chunks travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.codec import Codec, ErrorFeedback, Tensors, codec_named, with_state
from sync.collective._fold import Fold, Numbers
from sync.collective._lists import Lists, ListsAndState
from sync.layout import Vector

__all__ = ["Arithmetic", "MeanOf"]

_AS_LISTS = ("fp8", "int4")
"""Forms of values; where few gradients are not zero, only those travel."""


class Arithmetic(Protocol):
    """How chunks are coded and merged. Chunks are named by number; shapes are (length of the chunk,)."""

    def part(self, chunk: int, values: Vector) -> Tensors:
        """What is sent to the chunk's owner."""

    def own(self, chunk: int, values: Vector) -> Numbers:
        """What the owner itself adds; must stay as it is until the chunk is merged."""

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        """What a part says; raises ``GeofedError("FRAME_INVALID")``."""

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> Fold: ...

    def merged(self, chunk: int, fold: Fold) -> tuple[Tensors, Vector, float]:
        """What the owner publishes, what everybody reads out of that, and the sum of weights."""

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector: ...


class MeanOf:
    """The sample-weighted mean; parts and merged chunks in a codec, with error feedback on both ways.

    An owner's own part is never coded. What the codec holds back of a part stays with the worker, of a merged chunk
    with the owner, as exactly as `ErrorFeedback` keeps it.
    """

    def __init__(self, codec: str, bounds: Sequence[slice], trained: int | None) -> None:
        size = bounds[-1].stop
        self._known = known = size if trained is None else trained
        self._as_lists = codec in _AS_LISTS
        self._codecs = [_codec(codec, known - chunk.start, chunk.stop - chunk.start) for chunk in bounds]
        self.given = {number: ErrorFeedback(codec) for number, codec in enumerate(self._codecs)}
        """By chunk: what this worker's parts hold back."""
        self.published = {number: ErrorFeedback(codec) for number, codec in enumerate(self._codecs)}
        """By chunk: what the merged chunks of this owner hold back."""
        self.joined = {number: ErrorFeedback(codec) for number, codec in enumerate(self._codecs)}
        """By chunk: what this worker's merges of its group's parts hold back."""
        self._bounds = bounds
        self.before: npt.NDArray[np.float64] | None = None
        """What this worker's parts held back before the exchange of now, shape (n,)."""

    def begin(self) -> None:
        """Remember what is held back, in case the exchange does not come about."""
        if any(feedback.residual is not None for feedback in self.given.values()):
            self.before = np.zeros(self._bounds[-1].stop)
            for chunk, part in enumerate(self._bounds):
                residual = self.given[chunk].residual
                if residual is not None:
                    self.before[part] = residual

    def hold(self, residual: npt.NDArray[np.float64]) -> None:
        """Continue from what parts with other bounds held back, shape (n,)."""
        for chunk, part in enumerate(self._bounds):
            self.given[chunk].residual = residual[part].copy()

    def part(self, chunk: int, values: Vector) -> Tensors:
        return self._encode(self.given[chunk], chunk, values)[0]

    def own(self, chunk: int, values: Vector) -> Numbers:
        return values

    def read_part(self, chunk: int, tensors: Tensors, size: int) -> Numbers:
        return self._codecs[chunk].decode(tensors, size)

    def fold(self, chunk: int, size: int, contributors: Sequence[int]) -> Fold:
        return Fold(size, contributors)

    def merged(self, chunk: int, fold: Fold) -> tuple[Tensors, Vector, float]:
        mean, weight = fold.mean()
        tensors, values = self._encode(self.published[chunk], chunk, mean)
        return tensors, values, weight

    def joint(self, chunk: int, fold: Fold) -> tuple[Tensors, float]:
        """What is sent to the owner of what a group has; the mean is rounded to float32, and coded."""
        mean, weight = fold.mean()
        return self._encode(self.joined[chunk], chunk, mean)[0], weight

    def read_merged(self, chunk: int, tensors: Tensors, size: int) -> Vector:
        return self._codecs[chunk].decode(tensors, size)

    def _encode(self, feedback: ErrorFeedback, chunk: int, values: Vector) -> tuple[Tensors, Vector]:
        """Of what goes as a list, only where there is something new.

        What the coding of a sparse vector rounds away is never zero: it would all be told of in each step.
        """
        if not self._as_lists:
            return feedback.encode(values)
        if not np.isfinite(values).all():
            # Coded, it would be a large number like any other, and the loss continue being one.
            hint = "training diverged: lower the learning rate"
            raise GeofedError("TASK_FAILED", "a gradient is not finite", hint=hint)
        trained = max(0, self._known - self._bounds[chunk].start)

        def new(_: Vector) -> npt.NDArray[np.bool_]:
            there: npt.NDArray[np.bool_] = np.not_equal(values, 0)
            there[trained:] = True
            return there

        return feedback.encode(values, keep=new)

    def residuals(self) -> dict[str, npt.NDArray[np.generic]]:
        """What is held back, by names that `restore` knows."""
        return {
            f"{name}.{chunk}": feedback.residual
            for name, streams in self._streams()
            for chunk, feedback in streams.items()
            if feedback.residual is not None
        }

    def _streams(self) -> tuple[tuple[str, dict[int, ErrorFeedback]], ...]:
        return ("given", self.given), ("joined", self.joined), ("published", self.published)

    def restore(self, name: str, residual: npt.NDArray[np.generic]) -> None:
        """Take up one of the `residuals`."""
        kind, _, chunk = name.partition(".")
        dict(self._streams())[kind][int(chunk)].residual = np.array(residual, np.float64)


def _codec(name: str, trained: int, size: int) -> Codec:
    """What codes a chunk of ``size`` coordinates of which the first ``trained`` are parameters; lists, where named."""
    if name not in _AS_LISTS:
        return with_state(codec_named(name), trained, size)
    return Lists(name) if trained >= size else ListsAndState(name, max(0, trained))
