"""Data for runs of learning quality: real where it is there, otherwise generated, and how it is split over regions.

IID: shuffled and cut equally. Dirichlet: every region draws its own shares of the classes (Hsu et al. 2019,
arXiv 1909.06335) and gets as many samples as the others, so that the skew is one of labels alone. Text has no labels:
its classes are ten stretches of the text, one after the other (other plays, other people).
"""

from __future__ import annotations

import gzip
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["CONTEXT", "VOCABULARY", "Data", "cifar", "mnist", "shakespeare", "split"]

CONTEXT = 64
"""Characters that the language model sees."""
VOCABULARY = 65
_STRETCHES = 10


@dataclass(frozen=True)
class Data:
    """One data set in memory."""

    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    labels: npt.NDArray[np.int64]
    """Class of each training sample, for skewed splits."""
    real: bool


def split(data: Data, regions: int, alpha: float | None, seed: int) -> list[npt.NDArray[np.int64]]:
    """Indices of each region's samples, equally many for all; ``alpha`` None: IID."""
    random = np.random.default_rng([seed, 7])
    if alpha is None:
        return list(np.array_split(random.permutation(len(data.labels)), regions))
    classes = int(data.labels.max()) + 1
    left = [list(random.permutation(np.flatnonzero(data.labels == label))) for label in range(classes)]
    shares = random.dirichlet(np.full(classes, alpha), regions)
    taken: list[list[int]] = [[] for _ in range(regions)]
    each = len(data.labels) // regions
    block = max(1, each // 200)
    # In turn, so that none is left with only what the others did not want.
    while len(taken[-1]) < each:
        for region, mine in enumerate(taken):
            want = np.array([share if left[label] else 0.0 for label, share in enumerate(shares[region])])
            want = want if want.sum() > 0 else np.array([float(len(rest)) for rest in left])
            counts = random.multinomial(min(block, each - len(mine)), want / want.sum())
            for label, count in enumerate(counts):
                mine += left[label][:count]
                del left[label][:count]
    return [np.array(mine, np.int64) for mine in taken]


def mnist(folder: Path) -> Data:
    """MNIST out of its usual files, or generated images of ten kinds."""
    files = folder / "mnist"
    if not files.is_dir():
        return _generated((1, 28, 28))
    images = [_idx(files / f"{part}-images-idx3-ubyte.gz", 16) for part in ("train", "t10k")]
    labels = [_idx(files / f"{part}-labels-idx1-ubyte.gz", 8) for part in ("train", "t10k")]
    pictures = [
        torch.from_numpy((x.reshape(-1, 1, 28, 28) / np.float32(255) - 0.1307) / 0.3081).float() for x in images
    ]
    kinds = [y.astype(np.int64) for y in labels]
    return Data((pictures[0], torch.from_numpy(kinds[0])), (pictures[1], torch.from_numpy(kinds[1])), kinds[0], True)


def _idx(path: Path, header: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header)


def cifar(folder: Path) -> Data:
    """The class-balanced part of CIFAR-10, or generated images of ten kinds."""
    path = folder / "cifar10-subset-jpeg.zip"
    if not path.is_file():
        return _generated((3, 32, 32))
    from PIL import Image

    parts: dict[str, tuple[list[npt.NDArray[np.uint8]], list[int]]] = {"train": ([], []), "test": ([], [])}
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        kinds = sorted({name.split("/")[-2] for name in names})
        for name in names:
            part, kind = name.split("/")[-3:-1]
            parts[part][0].append(np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")))
            parts[part][1].append(kinds.index(kind))
    tensors = []
    for pictures, labels in parts.values():
        raw = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        mean, deviation = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
        tensors.append(((raw - mean.view(3, 1, 1)) / deviation.view(3, 1, 1), torch.tensor(labels)))
    return Data(tensors[0], tensors[1], np.array(parts["train"][1]), True)


def shakespeare(folder: Path) -> Data:
    """Windows of characters and their successors; the last tenth is for testing."""
    path = folder / "tinyshakespeare.txt.gz"
    if path.is_file():
        raw = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
        codes = np.unique(raw, return_inverse=True)[1].astype(np.int64)
    else:
        codes = _markov(300_000)
    windows = (codes.size - 1) // CONTEXT
    given = torch.from_numpy(codes[: windows * CONTEXT].reshape(windows, CONTEXT))
    wanted = torch.from_numpy(codes[1 : windows * CONTEXT + 1].reshape(windows, CONTEXT))
    cut = windows * 9 // 10
    labels = np.arange(cut) * _STRETCHES // cut
    return Data((given[:cut], wanted[:cut]), (given[cut:], wanted[cut:]), labels, path.is_file())


def _generated(shape: tuple[int, int, int], samples: int = 12_000) -> Data:
    random = np.random.default_rng(3)
    kinds = random.normal(size=(10, 3, *shape)).astype(np.float32)
    labels = random.integers(0, 10, samples)
    # Three variants of each kind, mixed, under noise: not linearly separable, and not learnt at once.
    variant = random.integers(0, 3, samples)
    pictures = kinds[labels, variant] * random.uniform(0.2, 1.0, (samples, 1, 1, 1)).astype(np.float32)
    pictures += random.normal(scale=2.0, size=pictures.shape).astype(np.float32)
    images, truth, cut = torch.from_numpy(pictures), torch.from_numpy(labels), samples * 5 // 6
    return Data((images[:cut], truth[:cut]), (images[cut:], truth[cut:]), labels[:cut], False)


def _markov(length: int) -> npt.NDArray[np.int64]:
    random = np.random.default_rng(4)
    chances = random.dirichlet(np.full(VOCABULARY, 0.05), VOCABULARY).cumsum(axis=1)
    out, draws = np.zeros(length, np.int64), random.random(length)
    for at in range(1, length):
        out[at] = min(int(np.searchsorted(chances[out[at - 1]], draws[at])), VOCABULARY - 1)
    return out
