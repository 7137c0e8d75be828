"""Image classification: a small CNN or ResNet, or LeNet-5 for images of 28x28. Plain PyTorch; change what you like.

A shard is a `.npz` file with `x` (N x H x W, uint8 or float32) and `y` (N, integers), or a folder that holds such
files or MNIST's IDX files.
"""

import gzip
import math
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Shift(nn.Module):
    """Moves each batch by up to one pixel while training, where `augment` is on."""

    def forward(self, x):
        """Return the batch, moved while training."""
        if not self.training:
            return x
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return torch.roll(x, (down, right), dims=(2, 3))


def cnn(size, classes, width):
    """Two convolutions, one hidden layer. Fit for images from 8x8 on."""
    side = size // 2
    return [
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * side * side, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    ]


def lenet(size, classes):
    """LeNet-5 with ReLU and max pooling. Fit for images from 16x16 on."""
    side = (size // 2 - 4) // 2
    return [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    ]


class Residual(nn.Module):
    """Two convolutions and a path around them. GroupNorm, since BatchNorm's statistics differ between regions."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(math.gcd(4, after), after) for _ in range(2))
        same = stride == 1 and before == after
        self.around = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        """Return the sum of both paths, after a ReLU."""
        hidden = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(hidden)) + self.around(x))


def resnet(classes, width):
    """Three residual blocks (ResNet-8, after He et al. 2016, section 4.2). Fit for images from 8x8 on."""
    return [
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.GroupNorm(math.gcd(4, width), width),
        nn.ReLU(),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    ]


def model(config):
    """Create the network that `config.arch` names."""
    arch, size, classes = config.get("arch", "cnn"), int(config.get("size", 8)), int(config.get("classes", 10))
    if arch == "cnn":
        layers = cnn(size, classes, int(config.get("width", 16)))
    elif arch == "resnet":
        layers = resnet(classes, int(config.get("width", 16)))
    elif arch == "lenet":
        layers = lenet(size, classes)
    else:
        raise ValueError(f"config.arch is {arch!r}; it can be cnn, resnet or lenet")
    return nn.Sequential(Shift(), *layers) if config.get("augment", False) else nn.Sequential(*layers)


def dataset(uri, split, config):
    """Read images and labels from .npz files or MNIST's IDX files."""
    path = Path(uri)
    if path.is_file():
        parts = [read_npz(path)]
    elif not path.is_dir():
        raise FileNotFoundError(f"{path} is not there")
    elif sorted(path.glob("*.npz")):
        parts = [read_npz(file) for file in sorted(path.glob("*.npz"))]
    else:
        parts = [read_idx(path, split, config)]
    size = int(config.get("size", 8))
    for x, _ in parts:
        if x.shape[1:] != (size, size):
            raise ValueError(f"{path}: images are {x.shape[1]}x{x.shape[2]}, config.size is {size}")
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    scale = 255 if x.dtype == np.uint8 else 1
    images = torch.from_numpy(x.astype(np.float32) / scale).unsqueeze(1)
    return TensorDataset(images, torch.from_numpy(y.astype(np.int64)))


def read_npz(path):
    """Images x, N x H x W, and labels y of an .npz file. Raises ``ValueError``."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in ("x", "y") if name in arrays.files}
    except (OSError, EOFError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no .npz file: {error}") from None
    if len(held) < 2:
        raise ValueError(f"{path} must hold the arrays x and y, it holds {', '.join(held) or 'neither'}")
    x, y = held["x"], held["y"]
    if x.ndim != 3 or x.dtype not in (np.uint8, np.float32):
        raise ValueError(f"{path}: x must be N x H x W of uint8 or float32, it is {x.dtype} {x.shape}")
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y must be {len(x)} integers, it is {y.dtype} {y.shape}")
    return x, y


def read_idx(folder, split, config):
    """MNIST's files. `config.shard: [k, n]` takes the k-th of n equal parts, counted from 0."""
    prefix = "train" if split == "train" else "t10k"
    x = read_idx_file(folder, f"{prefix}-images-idx3-ubyte", 3)
    y = read_idx_file(folder, f"{prefix}-labels-idx1-ubyte", 1)
    if len(x) != len(y):
        raise ValueError(f"{folder}: {prefix} has {len(x)} images, but {len(y)} labels")
    index, count = config.get("shard", [0, 1])
    if not 0 <= index < count:
        raise ValueError(f"config.shard is [{index}, {count}]; the first must be from 0 to {count - 1}")
    return x[index::count], y[index::count]


def read_idx_file(folder, name, dimensions):
    """Array of bytes in an IDX file, packed or not. Raises ``ValueError`` or ``FileNotFoundError``."""
    path = next((found for found in (folder / f"{name}.gz", folder / name) if found.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} holds neither .npz files nor {name}.gz")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None
    begin = 4 + 4 * dimensions
    if len(content) < begin or struct.unpack(">HBB", content[:4]) != (0, 8, dimensions):
        raise ValueError(f"{path} is no IDX file of bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:begin])
    body = np.frombuffer(content, np.uint8, offset=begin)
    if body.size != int(np.prod(shape)):
        raise ValueError(f"{path} holds {body.size} bytes, its header says {shape}")
    return body.reshape(shape)


def loss(model, batch):
    """Cross-entropy, as a mean."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def metrics(model, batches):
    """Accuracy and loss over all batches."""
    right, total, loss_sum = 0, 0, 0.0
    for x, y in batches:
        scores = model(x)
        loss_sum += float(F.cross_entropy(scores, y, reduction="sum"))
        right += int((scores.argmax(1) == y).sum())
        total += len(y)
    return {"accuracy": right / total, "loss": loss_sum / total} if total else {}


def optimizer(parameters, config):
    """SGD with `config.lr`, `config.momentum` and `config.weightDecay`."""
    return torch.optim.SGD(
        parameters,
        lr=float(config.get("lr", 0.05)),
        momentum=float(config.get("momentum", 0.9)),
        weight_decay=float(config.get("weightDecay", 0.0)),
    )
