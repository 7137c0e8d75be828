"""How an update becomes bytes: a codec is a module of this package, which says all that there is to say of it."""

from functools import cache

from geofed_pb.errors import GeofedError
from sync.codec._contract import Automatic, Codec, Tensors
from sync.codec._feedback import ErrorFeedback
from sync.codec._mixed import MIXED, Mixed
from sync.codec._slabs import decoded
from sync.codec.bf16 import BFloat16
from sync.codec.exact import Exact
from sync.codec.fp32 import Float32
from sync.codec.int8 import Int8Blocks
from sync.codec.sparse import Sparse
from sync.codec.ternary import Ternary
from sync.codec.topk import ChunkedTopK
from sync.registry import Registry

__all__ = [
    "Automatic",
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
    "codec_by_mark",
    "codec_named",
    "codecs",
    "decoded",
    "with_state",
]

_MARKS_OF_OTHERS = range(12, MIXED)


def _check(codec: Codec) -> str:
    if codec.mark not in _MARKS_OF_OTHERS:
        return f"its mark must be {_MARKS_OF_OTHERS.start} to {_MARKS_OF_OTHERS.stop - 1}, not {codec.mark}"
    if not 0 < codec.size_factor <= 4 or not codec.bytes_per_second > 0:
        return f"size_factor {codec.size_factor} or bytes_per_second {codec.bytes_per_second} cannot be"
    return ""


_REGISTRY: Registry[Codec] = Registry("codec", "sync.codec", "geofed.codecs", _check)


@cache
def codecs(least: Automatic = Automatic.NEVER) -> tuple[str, ...]:
    """Names of the codecs that a job file may give, or of those among them that ``auto`` may choose; the least lossy
    first."""
    offered = [codec for codec in _REGISTRY.all.values() if codec.offered and codec.automatic >= least]
    return tuple(codec.name for codec in sorted(offered, key=lambda codec: (-codec.size_factor, codec.name)))


def codec_named(name: str) -> Codec:
    """The codec that a plan names; raises ``GeofedError("CONFIG_INVALID")`` for one that is not known."""
    return _REGISTRY.named(name)


def with_state(codec: Codec, trained: int, size: int) -> Codec:
    """What codes ``size`` coordinates of a model of which the first ``trained`` are parameters that gradients train."""
    return Mixed(codec, max(0, trained)) if codec.in_blocks and trained < size else codec


def codec_by_mark(mark: int, trained: int | None = None) -> Codec:
    """The codec that a frame says it was made with; raises ``GeofedError("FRAME_INVALID")``.

    ``trained``: how many of its coordinates, from the first, are parameters that gradients train.
    """
    by_mark = _by_mark()
    if mark - MIXED in by_mark and trained is not None:
        return Mixed(by_mark[mark - MIXED], max(0, trained))
    if mark not in by_mark:
        raise GeofedError("FRAME_INVALID", f"an update made with a codec of number {mark}, which is not known here")
    return by_mark[mark]


@cache
def _by_mark() -> dict[int, Codec]:
    """Where two of other packages have one mark, the first by name keeps it."""
    return {codec.mark: codec for codec in reversed(_REGISTRY.all.values())}
