"""Messages that are almost right."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

__all__ = ["damaged", "damaged_by"]


def damaged(whole: bytes, count: int) -> Iterator[bytes]:
    """Yield so many variants of a message, each with a few bytes replaced, inserted or cut off; in each round of
    `make soak` others."""
    return damaged_by(random.Random(int(os.environ.get("GEOFED_TEST_SEED", "0"))), whole, count)


def damaged_by(draw: random.Random, whole: bytes, count: int) -> Iterator[bytes]:
    """The same, as a generator of random numbers says."""
    for _ in range(count):
        data = bytearray(whole)
        for _ in range(1 + int(draw.random() * 4)):
            at, kind = int(draw.random() * (len(data) + 1)), draw.random()
            if kind < 0.7 and at < len(data):
                data[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF)) if kind < 0.3 else int(draw.random() * 256)
            elif kind < 0.85:
                data[at:at] = draw.randbytes(1 + int(draw.random() * 8))
            elif kind < 0.95:
                del data[at : at + 1 + int(draw.random() * 8)]
            else:
                del data[at:]
        yield bytes(data)
