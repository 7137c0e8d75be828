"""Every source of randomness that job code may draw from, set from numbers."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

__all__ = ["reseed", "seed_all"]


def seed_all(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators from numbers of at least 0."""
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def reseed(*numbers: int) -> None:
    """The same generators, other values, in some microseconds: for what is seeded many times in a step."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    # Not torch.manual_seed: it notes the caller's stack for a CUDA that may come, and takes longer than a small layer.
    torch.default_generator.manual_seed(mixed >> 1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed >> 1)
