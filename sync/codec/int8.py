"""The codec ``int8``: eight bits per coordinate, with one scale per block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import in_rows, powers, require
from sync.codec._contract import Automatic, Tensors
from sync.codec._slabs import SLAB, SlabCodec
from sync.layout import Vector

__all__ = ["METHODS", "Int8Blocks"]


class Int8Blocks(SlabCodec):
    """Encodes blocks of 256 coordinates with one scale, a power of two: 8.03 bits per coordinate.

    Compared with an exact scale, a power of two costs at most one bit of precision, and makes the residual exact.
    """

    name, mark, lossy = "int8", 2, True
    size_factor, bytes_per_second, automatic, in_blocks = 0.251, 300e6, Automatic.ALWAYS, True
    in_ranges, masked = True, "int8-masked"
    slab = 3 * SLAB
    """Longer slabs than usual, because of numpy's overhead per call: a third faster than with the usual ones."""
    _BLOCK = 256
    _MIN_EXPONENT = -126
    """Smallest exponent of a scale: normal float32."""
    _MAX_EXPONENT = 120
    """Largest exponent of a scale: 127 times the scale is still finite."""

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,) as int8 values and one exponent per block."""
        return self._encoded(vector)[0]

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        """Encode `vector`, and write what the receiver will decode to `out`; both have shape (n,)."""
        tensors, scaled, scale = self._encoded(vector)
        # The integers are in memory as float32 as well, and so need not be converted again. Adding 0 turns -0 into 0,
        # as an integer does.
        scaled *= scale[:, None]
        np.add(scaled.reshape(-1)[: out.size], 0.0, out=out)
        return tensors

    def _encoded(self, vector: Vector) -> tuple[Tensors, npt.NDArray[np.float32], Vector]:
        """Return the arrays, the integers in rows as float32, and the scale of each row."""
        blocks = in_rows(vector, self._BLOCK)
        largest = np.maximum(blocks.max(axis=1, initial=0.0), -blocks.min(axis=1, initial=0.0))
        # frexp: largest / 127 = m * 2^e with m < 1, so 127 * 2^e holds it.
        exponents = np.clip(np.frexp(largest / np.float32(127))[1], self._MIN_EXPONENT, self._MAX_EXPONENT).astype(
            np.int8
        )
        scale = powers(exponents, self._MIN_EXPONENT, self._MAX_EXPONENT)
        # Multiplying by the inverse of a power of two is exact, and the inverse of the smallest scale is still finite.
        scaled = np.multiply(blocks, 1 / scale[:, None], dtype=np.float32)
        np.rint(scaled, out=scaled)
        if exponents.max(initial=self._MIN_EXPONENT) == self._MAX_EXPONENT:
            # Only blocks with the largest exponent can have values beyond 127 times their scale.
            np.clip(scaled, -127, 127, out=scaled)
        values = scaled.astype(np.int8).reshape(-1)[: vector.size]
        return {"int8": values, "exponents": exponents}, scaled, scale

    def _put(self, values: npt.NDArray[np.generic], scale: Vector, out: Vector) -> None:
        """Write the integers times the scales of their blocks into ``out``."""
        whole = out.size // self._BLOCK * self._BLOCK
        out[...] = values
        blocks = out[:whole].reshape(-1, self._BLOCK)
        blocks *= scale[: len(blocks), None]
        out[whole:] *= scale[len(blocks) :]

    def check(self, tensors: Tensors, size: int) -> None:
        """Check types, shapes and scales."""
        self._scales(tensors, size)

    def _scales(self, tensors: Tensors, size: int) -> Vector:
        values, exponents = tensors.get("int8"), tensors.get("exponents")
        require(values is not None and values.dtype == np.int8 and values.shape == (size,), "not a vector of int8")
        rows = -(-size // self._BLOCK)
        require(
            exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,),
            "the scales are missing or invalid",
        )
        return powers(np.asarray(exponents), self._MIN_EXPONENT, self._MAX_EXPONENT)

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Write the decoded coordinates to `out`, shape (n,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        scale = self._scales(tensors, out.size)
        whole = np.asarray(tensors["int8"])
        for part, _ in self.slabs_of(out.size):
            self._put(whole[part], scale[part.start // self._BLOCK : -(-part.stop // self._BLOCK)], out[part])

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates to a new vector."""
        begin, stop, _ = part.indices(size)
        rows = np.asarray(tensors["exponents"])[begin // self._BLOCK : -(-stop // self._BLOCK)]
        out = np.empty(stop - begin, np.float32)
        self._put(np.asarray(tensors["int8"])[begin:stop], powers(rows, self._MIN_EXPONENT, self._MAX_EXPONENT), out)
        return out


METHODS = (Int8Blocks(),)
