"""Seeding of all random number generators that job code may use."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

__all__ = ["reseed", "seed_all"]


def seed_all(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators from non-negative numbers."""
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def reseed(*numbers: int) -> None:
    """Seed the same generators with other values than `seed_all`, in a few microseconds: for seeding many times in a
    step."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    # torch.manual_seed would record the caller's stack in case CUDA is initialised later, which takes longer than a
    # small layer.
    torch.default_generator.manual_seed(mixed >> 1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed >> 1)
