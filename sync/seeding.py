"""Seeding of all random number generators that job code may use."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["kept_random", "reseed", "reseed_cpu", "seed_all"]


def seed_all(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators from non-negative numbers."""
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


@contextmanager
def kept_random() -> Iterator[None]:
    """Restore the generators of the CPU at the end, which takes a tenth of a millisecond."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def reseed(*numbers: int) -> None:
    """Seed the same generators with other values than `seed_all`, in a few microseconds: for seeding many times in a
    step."""
    mixed = reseed_cpu(*numbers)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(mixed >> 1)


def reseed_cpu(*numbers: int) -> int:
    """Seed the generators of the CPU as `reseed` does; return what torch's is seeded with, doubled."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    mixed = int.from_bytes(digest, "little")
    random.seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    # torch.manual_seed would record the caller's stack in case CUDA is initialised later, which takes longer than a
    # small layer.
    torch.default_generator.manual_seed(mixed >> 1)
    return mixed
