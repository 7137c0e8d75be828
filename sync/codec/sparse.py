"""The codec ``sparse``: only the coordinates that are not zero, for filters that leave few of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import require
from sync.codec._contract import Codec, Tensors
from sync.layout import Vector

__all__ = ["METHODS", "Sparse"]


class Sparse(Codec):
    """The index (uint32 as two uint16) and the float32 value of each coordinate that is not zero: 64 bits each."""

    name, mark, lossy = "sparse", 4, False
    size_factor, bytes_per_second, offered = 2.0, 200e6, False

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,) as indices in ascending order and values."""
        (indices,) = np.nonzero(vector)
        return {"at": indices.astype(np.uint32).view(np.uint16), "values": vector[indices]}

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """Decode to float32 of shape (size,). Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors."""
        out, indices = np.zeros(size, np.float32), self._indices(tensors, size)
        out[indices] = np.asarray(tensors["values"])
        return out

    def check(self, tensors: Tensors, size: int) -> None:
        """Check types, shapes and indices."""
        self._indices(tensors, size)

    @staticmethod
    def _indices(tensors: Tensors, size: int) -> npt.NDArray[np.int64]:
        at, values = tensors.get("at"), tensors.get("values")
        require(
            at is not None and at.dtype == np.uint16 and at.ndim == 1 and at.size % 2 == 0,
            "the indices are missing or invalid",
        )
        indices = np.ascontiguousarray(at).view(np.uint32).astype(np.int64)
        known = values is not None and values.dtype == np.float32 and values.shape == indices.shape
        require(known, "the values are missing or invalid")
        require(indices.size == 0 or (indices[-1] < size and (np.diff(indices) > 0).all()), "indices are not in order")
        return indices


METHODS = (Sparse(),)
