"""Every source of randomness that job code may draw from, set from numbers."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

__all__ = ["seed_all", "seed_torch"]


def seed_all(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators from numbers of at least 0."""
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def seed_torch(*numbers: int) -> None:
    """Seed torch's generators only, in some microseconds: what layers draw from while they run."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little") >> 1
    # Not torch.manual_seed: it notes the caller's stack for a CUDA that may come, and takes longer than a small layer.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed)
