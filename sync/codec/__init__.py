"""Codecs: how an update becomes bytes. Each codec is a module of this package."""

from collections.abc import Mapping
from functools import cache

from geofed_pb.errors import GeofedError
from sync.codec._contract import Automatic, Codec, Tensors
from sync.codec._feedback import ErrorFeedback
from sync.codec._list_values import VALUE_FORMATS
from sync.codec._mixed import MIXED, Mixed
from sync.codec._slabs import Decoding, decoded
from sync.codec.bf16 import BFloat16
from sync.codec.exact import Exact
from sync.codec.fp32 import Float32
from sync.codec.int8 import Int8Blocks
from sync.codec.masked import MaskedIntegers
from sync.codec.sparse import Sparse
from sync.codec.ternary import Ternary
from sync.codec.topk import ChunkedTopK
from sync.registry import Registry

__all__ = [
    "Automatic",
    "BFloat16",
    "ChunkedTopK",
    "Codec",
    "Decoding",
    "ErrorFeedback",
    "Exact",
    "Float32",
    "Int8Blocks",
    "MaskedIntegers",
    "Mixed",
    "Sparse",
    "Tensors",
    "Ternary",
    "codec_by_mark",
    "codec_named",
    "codecs",
    "decoded",
    "is_list_format",
    "list_formats",
    "merge_codecs",
    "merged_size_factor",
    "with_state",
]

_LONG_VECTOR = 1 << 20
"""Elements of a vector that is long enough for its encoded size to be proportional to its length."""
_PLUGIN_MARKS = range(12, MIXED)
"""Marks that codecs of other packages may have."""


def _check(codec: Codec, known: Mapping[str, Codec]) -> str:
    if codec.mark not in _PLUGIN_MARKS:
        return f"its mark must be {_PLUGIN_MARKS.start} to {_PLUGIN_MARKS.stop - 1}, not {codec.mark}"
    if same := [other.name for other in known.values() if other.mark == codec.mark]:
        return f"its mark {codec.mark} is that of codec {same[0]!r}"
    if not 0 < codec.size_factor <= 4 or not codec.bytes_per_second > 0:
        return f"size_factor {codec.size_factor} or bytes_per_second {codec.bytes_per_second} is invalid"
    return ""


_REGISTRY: Registry[Codec] = Registry("codec", "sync.codec", "geofed.codecs", _check)


@cache
def codecs(least: Automatic = Automatic.NEVER) -> tuple[str, ...]:
    """Return the names of the codecs that a job file may give, the least lossy first.

    ``least`` restricts them to those that ``auto`` may choose in this situation.
    """
    offered = [codec for codec in _REGISTRY.all.values() if codec.offered and codec.automatic >= least]
    return tuple(codec.name for codec in sorted(offered, key=lambda codec: (-codec.size_factor, codec.name)))


def codec_named(name: str) -> Codec:
    """Return the codec of that name. Raises ``GeofedError("CONFIG_INVALID")`` if it is unknown."""
    return _REGISTRY.named(name)


def list_formats() -> tuple[str, ...]:
    """Return the names of the formats in which the values of a list of entries are encoded."""
    return tuple(VALUE_FORMATS)


def is_list_format(codec: str) -> bool:
    """Return whether the name is of no codec of whole vectors, but of a format of the values of lists."""
    return codec in VALUE_FORMATS and codec not in _REGISTRY.all


@cache
def merge_codecs() -> tuple[str, ...]:
    """Return what a job file may give as the codec of a merge by owners (`merge.codec`), the least lossy first: codecs
    of whole vectors, then formats that omit zeros where that is smaller."""
    dense = [name for name in codecs() if codec_named(name).merges]
    return (*dense, *(name for name in VALUE_FORMATS if is_list_format(name)))


def merged_size_factor(codec: str) -> float:
    """Return the bytes of a vector without zeros that workers merge (`merge.codec`), as a multiple of those in float32.

    Codecs with a format of values encode lists of the coordinates that are not zero, or all of them where that is
    smaller. Raises ``GeofedError("CONFIG_INVALID")`` for an unknown codec.
    """
    if codec in VALUE_FORMATS:
        return VALUE_FORMATS[codec].nbytes(_LONG_VECTOR) / (4 * _LONG_VECTOR)
    return codec_named(codec).size_factor


def with_state(codec: Codec, trained: int, size: int) -> Codec:
    """Return the codec for ``size`` coordinates of a model, of which the first ``trained`` are trained by gradients."""
    return Mixed(codec, max(0, trained)) if codec.in_blocks and trained < size else codec


def codec_by_mark(mark: int, trained: int | None = None) -> Codec:
    """Return the codec with this mark, as a frame states it. Raises ``GeofedError("FRAME_INVALID")`` if it is unknown.

    ``trained``: the number of leading coordinates that are trained by gradients.
    """
    by_mark = _by_mark()
    if mark - MIXED in by_mark and trained is not None:
        return Mixed(by_mark[mark - MIXED], max(0, trained))
    if mark not in by_mark:
        raise GeofedError("FRAME_INVALID", f"an update has unknown codec number {mark}")
    return by_mark[mark]


@cache
def _by_mark() -> dict[int, Codec]:
    return {codec.mark: codec for codec in _REGISTRY.all.values()}
