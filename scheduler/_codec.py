"""What codecs do to an update's size, and which one a plan takes."""

from __future__ import annotations

__all__ = [
    "CODEC_BYTES_PER_SECOND",
    "HANDLED_BYTES_PER_SECOND",
    "ROUND_END_BYTES_PER_SECOND",
    "SIZE_FACTOR",
    "update_bytes",
]

SIZE_FACTOR = {"fp32": 1.0, "bf16": 0.5, "int8": 0.251, "ternary": 0.052, "topk": 0.0072}
"""Bytes of an encoded update over those in float32."""
CODEC_BYTES_PER_SECOND = {"fp32": float("inf"), "bf16": 200e6, "int8": 300e6, "ternary": 100e6, "topk": 200e6}
"""float32 bytes encoded and decoded in a second by one core, error feedback included; on the low side."""
HANDLED_BYTES_PER_SECOND = 300e6
"""Bytes of updates that a parameter server encrypts and sends, or receives, checks and makes durable, in a second,
where links are as fast as memory. Measured, as the next one, with three regions on two cores: on the low side."""
ROUND_END_BYTES_PER_SECOND = 80e6
"""float32 bytes of a model that are taken from the workers, merged, made durable and given back in a second, while the
workers wait."""
FRAME_BYTES = 200
"""Prefix, table and alignment of an update's frame; 145 to 260 were metered of a small model."""


def update_bytes(model_bytes: int, codec: str) -> int:
    """Size of one region's update."""
    return int(model_bytes * SIZE_FACTOR[codec]) + FRAME_BYTES
