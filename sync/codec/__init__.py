"""How an update becomes bytes."""

from sync.codec._contract import Codec
from sync.codec._dense import BFloat16, Float32, Int8Blocks
from sync.codec._feedback import ErrorFeedback
from sync.codec._topk import ChunkedTopK

__all__ = ["BFloat16", "ChunkedTopK", "Codec", "ErrorFeedback", "Float32", "Int8Blocks", "codec_named", "codec_of"]

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), BFloat16(), Int8Blocks(), ChunkedTopK())}
_BY_MARK: dict[int, Codec] = {codec.mark: codec for codec in _CODECS.values()}


def codec_named(name: str) -> Codec:
    """The codec that a plan names; raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    if name not in _CODECS:
        from geofed_pb.errors import GeofedError

        raise GeofedError("CONFIG_INVALID", f"unknown codec {name!r}", hint=f"known: {', '.join(_CODECS)}")
    return _CODECS[name]


def codec_of(mark: int) -> Codec:
    """The codec that a frame says it was made with; raises ``GeofedError("FRAME_INVALID")``."""
    if mark not in _BY_MARK:
        from geofed_pb.errors import GeofedError

        raise GeofedError("FRAME_INVALID", f"an update made with a codec of number {mark}, which is not known here")
    return _BY_MARK[mark]
