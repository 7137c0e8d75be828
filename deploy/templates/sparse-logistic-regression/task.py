"""Logistic regression over sparse features: click prediction and the like. Plain PyTorch; change what you like.

A shard is a file, or a folder of files, with one sample in a line, in one of two forms, as they are or packed (`.gz`):

    label index:value index:value ...         LibSVM, libFM
    label I1 ... I13 C1 ... C26               Criteo, with tabs between the columns

A LibSVM index is taken as it stands. Of a Criteo line, the 13 numbers are features 0 to 12, as sign(x) log(1 + |x|); a
column and its category are hashed to one of the features from 13 on, by the same rule everywhere.
"""

import formats
import numpy as np
import records
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

ENDINGS = (".svm", ".libsvm", ".libfm", ".tsv", ".txt")


class LogisticRegression(nn.Module):
    """A weight for each feature, and a bias. Scores are log-odds."""

    def __init__(self, dimension):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dimension))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, index, value):
        """Index and value: ... x features of a sample, of which those with value 0 do not count."""
        weight = self.weight.index_select(0, index.flatten()).view_as(index)
        return (weight * value).sum(-1) + self.bias


def model(config):
    """Create the model."""
    return LogisticRegression(dimension_of(config))


def dimension_of(config):
    """Return the number of features of `config.dimension`, the same in all regions."""
    dimension = int(config.get("dimension", 0))
    if dimension <= formats.NUMBERS:
        raise ValueError(f"config.dimension must be set, alike for all regions, and be above {formats.NUMBERS}")
    return dimension


class Samples(Dataset):
    """Sparse rows, one after the other: row i has the entries from offset[i] to offset[i + 1]."""

    def __init__(self, label, length, index, value):
        self.label, self.offset = label, np.concatenate(([0], np.cumsum(length, dtype=np.int64)))
        self.index, self.value = index, value  # with one entry more, of value 0, that fills short rows
        self.width = max(1, int(length.max(initial=1)))

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        return self.rows(np.array([index]), self.width, 0)

    def __getitems__(self, indices):
        """The whole batch as one item, as wide as its longest row: it collates to 1 x batch x width."""
        chosen = np.asarray(indices)
        width = max(1, int((self.offset[chosen + 1] - self.offset[chosen]).max(initial=1)))
        return [self.rows(chosen, width, slice(None))]

    def rows(self, chosen, width, part):
        """Indices, values and labels of the chosen rows, each padded to `width` entries."""
        place = self.offset[chosen, None] + np.arange(width)
        place = np.where(place < self.offset[chosen + 1, None], place, len(self.index) - 1)
        index, value, label = self.index[place].astype(np.int64), self.value[place], self.label[chosen]
        return tuple(torch.from_numpy(array)[part] for array in (index, value, label.astype(np.float32)))


def dataset(uri, split, config):
    """Read a file, or all files of a folder, as sparse rows."""
    dimension, form = dimension_of(config), config.get("format", "auto")
    if form not in ("auto", "libsvm", "criteo"):
        raise ValueError(f"config.format is {form!r}; it can be auto, libsvm or criteo")
    parts = [], [], [], []
    for path in records.files_of(uri, ENDINGS):
        known = form
        for lines in records.stretches(path):
            known = formats.detect(lines) if known == "auto" else known
            if known is None:  # nothing but blank lines so far
                known = "auto"
                continue
            for part, array in zip(parts, formats.read(lines, known, dimension), strict=True):
                part.append(array)
    for part in parts[2:]:
        part.append(np.zeros(1))
    dtypes = np.int8, np.int32, np.int32, np.float32
    samples = Samples(*(records.joined(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)))
    if len(samples) == 0:
        raise ValueError(f"{uri} holds no samples")
    return samples


def loss(model, batch):
    """Logistic loss, as a mean."""
    index, value, label = batch
    return F.binary_cross_entropy_with_logits(model(index, value), label)


def metrics(model, batches):
    """Accuracy and loss over all batches."""
    right, total, loss_sum = 0, 0, 0.0
    for index, value, label in batches:
        score = model(index, value)
        loss_sum += float(F.binary_cross_entropy_with_logits(score, label, reduction="sum"))
        right += int(((score > 0) == (label > 0.5)).sum())
        total += label.numel()
    return {"accuracy": right / total, "loss": loss_sum / total} if total else {}


def optimizer(parameters, config):
    """Adam with `config.lr` and `config.weightDecay`."""
    return torch.optim.Adam(
        parameters, lr=float(config.get("lr", 0.001)), weight_decay=float(config.get("weightDecay", 0.0))
    )
