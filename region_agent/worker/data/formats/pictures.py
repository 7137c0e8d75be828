"""Decodes images."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.contract import missing_package
from region_agent.worker.data.sources import file_faults

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["ENDINGS", "decoded", "held_bytes", "require_pillow", "stacked_images"]

ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
"""Endings of files that are images."""
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
_MOST_PIXELS = 64_000_000
"""Most pixels of an image: a small file may claim any number."""


def require_pillow(kind: str) -> None:
    """Raise ``GeofedError("CONFIG_INVALID")`` if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        raise missing_package("pillow", kind) from None


def decoded(content: bytes, name: str, size: int | None) -> torch.Tensor:
    """Return an image in RGB, uint8 of shape (3, height, width), scaled to ``size`` x ``size`` if stated.

    Raises ``GeofedError``: SHARD_UNREADABLE, LIMIT_EXCEEDED.
    """
    import torch
    from PIL import Image

    too_large = GeofedError("LIMIT_EXCEEDED", f"{name}: the image has more than {_MOST_PIXELS:,} pixels")
    try:
        with file_faults(name, SyntaxError), _opened(content) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise too_large
            plain = _of_8_bits(image).convert("RGB")
            if size is not None:
                plain = plain.resize((size, size), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(plain)).permute(2, 0, 1).contiguous()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None


def _opened(content: bytes) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError:
        # Pillow's text names an object in memory.
        raise ValueError(f"not an image of {', '.join(_FORMATS)}") from None


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return an image as it is, or one of 16 bits of grey, as X-rays have, with the high 8 of them.

    Pillow's own conversion leaves the numbers as they are, and makes white of all above 255.
    """
    if not image.mode.startswith("I"):
        return image
    from PIL import Image

    grey = np.asarray(image).clip(0, 0xFFFF).astype(np.uint16)
    return Image.fromarray((grey >> 8).astype(np.uint8))


def stacked_images(images: list[torch.Tensor]) -> torch.Tensor:
    """Stack images of the same size. Raises ``GeofedError("TASK_INVALID")`` for others."""
    import torch

    if len({one.shape for one in images}) > 1:
        hint = "state `format.size` in the region's file, or define collate(samples), which scales or pads them"
        raise GeofedError("TASK_INVALID", "the images of a batch have different sizes", hint=hint)
    return torch.stack(images)


def held_bytes(length: int, size: int | None) -> int:
    """Return about what an image takes in memory: as stated, or what compressed photographs usually take."""
    return 3 * size * size if size is not None else 12 * length
