"""Pictures that a page is compared with, small and with a tolerance for other versions of the browser and its fonts."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

_STORED = 2
"""Pictures are stored at this fraction of their size."""
_COMPARED = 16
"""Pixels of a page on each side of a square that is compared."""
_MEAN = 5.0
"""Mean difference of the colours, of 255, that is tolerated."""
_FAR, _FEW = 40.0, 0.02
"""Difference of a square's colour that counts, and the fraction of the squares that may differ so much."""
_INK, _FILLED = 8.0, 16.0
"""Standard deviation of the colours in a square, of 255, from which on it shows something; and their difference from
the page's ground."""
_LOST = 8
"""Squares that may show something in one picture where the other shows nothing, not even in a square beside it."""


def difference(shot: Image.Image, golden: Image.Image) -> tuple[float, float, int]:
    """Mean difference of the colours of two pictures of a page, the fraction of the squares whose colour differs by
    far, and the number of squares that show something in one of them only."""
    size = shot.width // _COMPARED, shot.height // _COMPARED
    (one, ink), (other, other_ink) = _squares(shot, size), _squares(golden, size)
    gaps = np.abs(one - other).max(axis=2)
    lost = int((ink & ~_grown(other_ink)).sum() + (other_ink & ~_grown(ink)).sum())
    return float(gaps.mean()), float((gaps > _FAR).mean()), lost


def like(shot: Image.Image, golden: Image.Image) -> bool:
    """Whether two pictures show the same page."""
    mean, far, lost = difference(shot, golden)
    same_shape = abs(shot.width * golden.height - shot.height * golden.width) <= _STORED * (shot.width + shot.height)
    return same_shape and mean <= _MEAN and far <= _FEW and lost <= _LOST


def require_like(shot: bytes, golden: Path, kept: Path) -> Image.Image:
    """Compare a PNG with a stored one, and return it; ``kept``: folder for a picture that differs.

    With ``GEOFED_GOLDEN=write`` in the environment it becomes the stored one.
    """
    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    if os.environ.get("GEOFED_GOLDEN") == "write":
        small = picture.resize((picture.width // _STORED, picture.height // _STORED), Image.Resampling.LANCZOS)
        small.quantize(128).save(golden, optimize=True)
    with Image.open(golden) as stored:
        if not like(picture, stored):
            file = kept / golden.name
            picture.save(file)
            mean, far, lost = difference(picture, stored)
            text = f"{golden.name} differs by {mean:.1f} on average, by far in {100 * far:.1f} % of its squares, and"
            text += f" {lost} squares show something in one of the pictures only"
            raise AssertionError(f"{text}: look at {file}; if it is right, run again with GEOFED_GOLDEN=write")
    return picture


def _squares(picture: Image.Image, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Colours of a picture's squares, shape (rows, columns, 3), and whether each shows something."""
    side = _COMPARED // _STORED
    small = picture.convert("RGB").resize((size[0] * side, size[1] * side), Image.Resampling.BOX)
    pixels = np.asarray(small, float).reshape(size[1], side, size[0], side, 3)
    colours = pixels.mean(axis=(1, 3))
    # Most of a page is empty. Edges of areas may lie between two squares.
    filled = np.abs(colours - np.median(colours, axis=(0, 1))).max(axis=2) > _FILLED
    return colours, filled | (pixels.std(axis=(1, 3)).max(axis=2) > _INK)


def _grown(ink: np.ndarray) -> np.ndarray:
    """Squares that show something, and those beside them, shape (rows, columns)."""
    padded = np.pad(ink, 1)
    rows, columns = ink.shape
    return np.logical_or.reduce([padded[y : y + rows, x : x + columns] for y in range(3) for x in range(3)])
