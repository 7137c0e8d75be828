"""Codec speed on one core: MB of float32 input per second, and bits per coordinate.

    .venv/bin/python tests/bench/codecs.py [--quick] [--json PATH]

The vector has as many coordinates as ResNet-18 for CIFAR (11.17 M, 44.7 MB), normally distributed with a standard
deviation that differs from block to block, as gradients do. Encoding is timed with error feedback, as it is used.

With `--quick` it takes 5 seconds.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from report import Bar, Report, options, spread

from sync import framing
from sync.codec import BFloat16, ChunkedTopK, Codec, ErrorFeedback, Int8Blocks

SIZE, QUICK_SIZE = 11_170_000, 2_000_000
BARS = {"int8": 150.0, "topk": 60.0}
"""MB/s of float32 input, encoding."""


def main() -> int:
    given = options(__doc__)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    report = Report("codecs", given.quick)
    size, repeats = (QUICK_SIZE, 3) if given.quick else (SIZE, 7)
    random = np.random.default_rng(0)
    scales = np.repeat(np.exp(random.normal(-7, 2, size // 10_000 + 1)), 10_000)[:size]
    vector = (random.normal(size=size) * scales).astype(np.float32)
    print(f"{size / 1e6:.2f} M coordinates, {size * 4 / 1e6:.1f} MB, one core; MB/s, median (range) of {repeats}")
    print(f"{'codec':<6} {'encode':>24} {'decode':>24} {'with feedback':>24} {'bits':>6}")
    codecs: list[Codec] = [BFloat16(), Int8Blocks(), ChunkedTopK()]
    speeds: dict[str, list[tuple[float, float, float]]] = {codec.name: [] for codec in codecs}
    bits: dict[str, float] = {}
    for _ in range(repeats):
        for codec in codecs:
            tensors = codec.encode(vector)
            bits[codec.name] = sum(p.nbytes for p in framing.encode(tensors)) * 8 / size
            feedback = ErrorFeedback(codec, np.zeros(size))
            measured = (
                _rate(lambda codec=codec: codec.encode(vector), size),
                _rate(lambda codec=codec, tensors=tensors: codec.decode(tensors, size), size),
                _rate(lambda feedback=feedback: feedback.encode(vector), size),
            )
            speeds[codec.name].append(measured)
            names = ("encode_mb_s", "decode_mb_s", "feedback_mb_s")
            report.runs.append({"codec": codec.name, **dict(zip(names, measured, strict=True))})
    for codec in codecs:
        columns = list(zip(*speeds[codec.name], strict=True))
        print(
            f"{codec.name:<6} " + " ".join(f"{spread(column):>24}" for column in columns) + f" {bits[codec.name]:6.2f}"
        )
    for name, least in BARS.items():
        median = statistics.median(encode for encode, _, _ in speeds[name])
        report.bars.append(Bar.at_least(f"{name} encode", median, "MB/s", least))
    return report.close(given.json)


def _rate(work: Callable[[], object], size: int) -> float:
    begun = time.perf_counter()
    work()
    return size * 4 / 1e6 / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
