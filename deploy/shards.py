"""Federated shards of real data: labelled images, partitioned over regions unevenly in size and in classes.

A shard is one `.npz` file for each region and split, with `x` (N×H×W, uint8) and `y` (N, int64).
The training data are partitioned by label with Dirichlet proportions, the usual model of non-IID data (Hsu et al. 2019,
"Measuring the Effects of Non-Identical Data Distribution", section 3). The test data are partitioned evenly, so that
all regions together are tested on exactly the whole test set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import Exit, GeofedError, install_hint
from geofed_pb.files.output import written_out

__all__ = [
    "Labelled",
    "SourceDataset",
    "partition_by_label",
    "partition_evenly",
    "read_digits",
    "read_idx",
    "write_shards",
]

Indices = npt.NDArray[np.int64]
MIN_SAMPLES = 32
"""Fewest training samples of a region: one batch."""
_DIGITS_TEST_PART = 0.2
"""Fraction of the digits that is used for the test."""
_IDX_TYPES = {0x08: np.uint8}
"""Supported element types of IDX files."""


@dataclass(frozen=True)
class Labelled:
    """Images with their classes."""

    x: npt.NDArray[np.uint8]
    """N×H×W, 0 to 255."""
    y: Indices
    """Class of each image."""

    def take(self, chosen: Indices) -> Labelled:
        """Return the images with these indices."""
        return Labelled(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class SourceDataset:
    """A dataset before it is partitioned."""

    train: Labelled
    test: Labelled


def partition_by_label(
    labels: Indices, regions: Sequence[str], *, alpha: float, seed: int, min_samples: int = MIN_SAMPLES
) -> dict[str, Indices]:
    """Partition samples, each class in proportions drawn from Dirichlet(`alpha`); a small `alpha` is very uneven.

    Returns sorted indices by region; every index is in exactly one region. A region that would get less than
    `min_samples` gets samples of the largest region. Raises ``GeofedError``: LIMIT_EXCEEDED if there are not enough
    samples; CONFIG_INVALID if region names are not unique.
    """
    if not regions or len(set(regions)) != len(regions):
        raise GeofedError("CONFIG_INVALID", f"regions must be different names, not {', '.join(regions) or 'none'}")
    if len(labels) < min_samples * len(regions):
        text = f"{len(labels)} samples cannot give {len(regions)} regions {min_samples} each"
        raise GeofedError("LIMIT_EXCEEDED", text, hint="name fewer regions")
    random = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in regions]
    for label in np.unique(labels):
        places = random.permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum(random.dirichlet([alpha] * len(regions)))[:-1] * len(places)
        for part, dealt in zip(parts, np.split(places, cuts.astype(np.int64)), strict=True):
            part.extend(dealt.tolist())
    for part in parts:
        while len(part) < min_samples:
            part.append(max(parts, key=len).pop())
    return {region: np.sort(np.array(part, np.int64)) for region, part in zip(regions, parts, strict=True)}


def partition_evenly(count: int, regions: Sequence[str], *, seed: int) -> dict[str, Indices]:
    """Partition `count` samples at random; the numbers of samples differ by at most one."""
    order = np.random.default_rng(seed).permutation(count)
    return {region: np.sort(part) for region, part in zip(regions, np.array_split(order, len(regions)), strict=True)}


def read_digits(seed: int) -> SourceDataset:
    """Load scikit-learn's handwritten digits: 1797 images of 8×8; a fifth of each class is the test set."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise GeofedError("UNAVAILABLE", "scikit-learn is not installed", hint=install_hint("demo")) from None
    x, y = load_digits(return_X_y=True)
    images = np.round(x.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    whole = Labelled(images, y.astype(np.int64))
    random, kept = np.random.default_rng(seed), []
    for label in np.unique(whole.y):
        places = random.permutation(np.flatnonzero(whole.y == label))
        kept.append(places[: round(len(places) * _DIGITS_TEST_PART)])
    test = np.sort(np.concatenate(kept))
    return SourceDataset(whole.take(np.setdiff1d(np.arange(len(whole.y)), test)), whole.take(test))


def read_idx(folder: Path) -> SourceDataset:
    """Load a folder in MNIST's format. Raises ``GeofedError("SHARD_UNREADABLE")`` with the file and the problem."""
    return SourceDataset(_idx_pair(folder, "train"), _idx_pair(folder, "t10k"))


def _idx_pair(folder: Path, prefix: str) -> Labelled:
    images = _idx_file(folder, f"{prefix}-images-idx3-ubyte", dimensions=3)
    labels = _idx_file(folder, f"{prefix}-labels-idx1-ubyte", dimensions=1)
    if len(images) != len(labels):
        raise GeofedError("SHARD_UNREADABLE", f"{folder}: {prefix} has {len(images)} images, but {len(labels)} labels")
    return Labelled(images, labels.astype(np.int64))


def _idx_file(folder: Path, name: str, *, dimensions: int) -> npt.NDArray[np.uint8]:
    path = next((found for found in (folder / f"{name}.gz", folder / name) if found.is_file()), None)
    if path is None:
        raise GeofedError("SHARD_UNREADABLE", f"{folder} holds no {name}.gz", hint="give the folder of the IDX files")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise GeofedError("SHARD_UNREADABLE", f"{path}: {error}") from None
    if len(content) < 4 + 4 * dimensions:
        raise GeofedError("SHARD_UNREADABLE", f"{path} ends within its header")
    zero, kind, found = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind not in _IDX_TYPES or found != dimensions:
        raise GeofedError("SHARD_UNREADABLE", f"{path} is not an IDX file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    body = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if body.size != int(np.prod(shape)):
        raise GeofedError("SHARD_UNREADABLE", f"{path} holds {body.size} bytes, its header says {shape}")
    return body.reshape(shape)


def write_shards(
    source: SourceDataset, regions: Sequence[str], out: Path, *, alpha: float, seed: int
) -> dict[str, Any]:
    """Write `out/REGION/train.npz` and `out/REGION/test.npz`; returns paths, samples and samples of each class."""
    places = {
        "train": partition_by_label(source.train.y, regions, alpha=alpha, seed=seed),
        "test": partition_evenly(len(source.test.y), regions, seed=seed),
    }
    classes = int(max(source.train.y.max(), source.test.y.max())) + 1
    written: dict[str, Any] = {region: {} for region in regions}
    for split, whole in (("train", source.train), ("test", source.test)):
        for region in regions:
            path, part = out / region / f"{split}.npz", whole.take(places[split][region])
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, x=part.x, y=part.y)
            counts = np.bincount(part.y, minlength=classes).tolist()
            written[region][split] = {"path": str(path), "samples": len(part.y), "classes": counts}
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    """Write shards and print their paths and sizes as JSON."""
    parser = argparse.ArgumentParser(prog="python -m deploy.shards", description="Make federated shards of images.")
    parser.add_argument("--source", required=True, help="`digits`, or a folder with MNIST's IDX files")
    parser.add_argument("--regions", required=True, help="names, with commas between them")
    parser.add_argument("--alpha", type=float, default=0.5, help="of the Dirichlet distribution; small: very uneven")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder; each region gets one in it")
    given = parser.parse_args(arguments)
    if given.alpha <= 0:
        parser.error("--alpha must be above 0")
    regions = [name.strip() for name in given.regions.split(",") if name.strip()]
    try:
        source = read_digits(given.seed) if given.source == "digits" else read_idx(Path(given.source))
        written = write_shards(source, regions, given.out, alpha=given.alpha, seed=given.seed)
        with written_out():
            print(json.dumps(written, indent=2))
    except GeofedError as error:
        print(f"error[{error.code}]: {error.message}\nhint: {error.hint}", file=sys.stderr)
        raise SystemExit(int(error.exit)) from None
    except OSError as error:
        print(f"error[DISK_FULL]: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(int(Exit.UNAVAILABLE)) from None


if __name__ == "__main__":
    main()
