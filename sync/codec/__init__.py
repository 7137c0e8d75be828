"""How an update becomes bytes."""

from sync.codec._contract import Codec, Tensors
from sync.codec._dense import BFloat16, Float32, Int8Blocks
from sync.codec._exact import Exact
from sync.codec._feedback import ErrorFeedback
from sync.codec._mixed import MIXED, Mixed
from sync.codec._slabs import decoded
from sync.codec._sparse import Sparse
from sync.codec._ternary import Ternary
from sync.codec._topk import ChunkedTopK

__all__ = [
    "BFloat16",
    "ChunkedTopK",
    "Codec",
    "ErrorFeedback",
    "Exact",
    "Float32",
    "Int8Blocks",
    "Mixed",
    "Sparse",
    "Tensors",
    "Ternary",
    "codec_named",
    "codec_of",
    "decoded",
    "with_state",
]

_CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Float32(), BFloat16(), Int8Blocks(), ChunkedTopK(), Sparse(), Ternary(), Exact())
}
_BY_MARK: dict[int, Codec] = {codec.mark: codec for codec in _CODECS.values()}


def codec_named(name: str) -> Codec:
    """The codec that a plan names; raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    if name not in _CODECS:
        from geofed_pb.errors import GeofedError

        raise GeofedError("CONFIG_INVALID", f"unknown codec {name!r}", hint=f"known: {', '.join(_CODECS)}")
    return _CODECS[name]


def with_state(codec: Codec, trained: int, size: int) -> Codec:
    """What codes ``size`` coordinates of a model of which the first ``trained`` are parameters that gradients train."""
    blocks = codec.name in ("int8", "topk", "ternary")
    return Mixed(codec, max(0, trained)) if blocks and trained < size else codec


def codec_of(mark: int, trained: int | None = None) -> Codec:
    """The codec that a frame says it was made with; raises ``GeofedError("FRAME_INVALID")``.

    ``trained``: how many of its coordinates, from the first, are parameters that gradients train.
    """
    if mark - MIXED in _BY_MARK and trained is not None:
        return Mixed(_BY_MARK[mark - MIXED], max(0, trained))
    if mark not in _BY_MARK:
        from geofed_pb.errors import GeofedError

        raise GeofedError("FRAME_INVALID", f"an update made with a codec of number {mark}, which is not known here")
    return _BY_MARK[mark]
