"""The effect of codecs on an update's size, and the choice of a plan's codec."""

from __future__ import annotations

from sync.codec import codec_named

__all__ = ["HANDLED_BYTES_PER_SECOND", "ROUND_END_BYTES_PER_SECOND", "update_bytes"]

HANDLED_BYTES_PER_SECOND = 300e6
"""Bytes of updates that a parameter server encrypts and sends, or receives, checks and makes durable, in a second,
where links are as fast as memory. Measured, as the next one, with three regions on two cores: on the low side."""
ROUND_END_BYTES_PER_SECOND = 80e6
"""float32 bytes of a model per second that are collected from the workers, merged, made durable and returned, while the
workers wait."""
FRAME_BYTES = 200
"""Prefix, table and alignment of an update's frame; 145 to 260 were metered of a small model."""


def update_bytes(model_bytes: int, codec: str) -> int:
    """Return the size of one region's update in bytes."""
    return int(model_bytes * codec_named(codec).size_factor) + FRAME_BYTES
