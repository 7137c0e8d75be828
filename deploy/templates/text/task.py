"""A language model over characters: it learns to say the next one. Plain PyTorch; change what you like.

A shard is a text file (UTF-8), or a folder of `.txt` files. The alphabet is fixed, so that no region needs to see
another's text to agree on it.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(ALPHABET)  # every character that is not in the alphabet
INDEX = {character: index for index, character in enumerate(ALPHABET)}


class CharacterModel(nn.Module):
    """Embedding, one GRU, and a linear layer over the alphabet."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, 32)
        self.recurrent = nn.GRU(32, width, batch_first=True)
        self.scores = nn.Linear(width, len(ALPHABET) + 1)

    def forward(self, x):
        """Scores of the next character, B x T x alphabet, of codes, B x T."""
        hidden, _ = self.recurrent(self.embedding(x))
        return self.scores(hidden)


def model(config):
    """Create the model."""
    return CharacterModel(int(config.get("width", 96)))


class Windows(Dataset):
    """Windows of `length` characters, each with the same window one character later; a batch is read at once."""

    def __init__(self, codes, length):
        self.codes, self.length = codes, length

    def __len__(self):
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        stretch = self.codes[start : start + self.length + 1]
        return stretch[:-1], stretch[1:]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def dataset(uri, split, config):
    """Read a text file, or all .txt files of a folder, as windows of `length` characters."""
    path, length = Path(uri), int(config.get("length", 48))
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .txt files")
    windows = Windows(encode("\n".join(read(file) for file in files)), length)
    if len(windows) == 0:
        raise ValueError(f"{path} is shorter than one stretch of {length} characters")
    return windows


def read(path):
    """Text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}") from None


def encode(text):
    """Code of each character; those outside the alphabet share one."""
    return torch.tensor([INDEX.get(character, OTHER) for character in text])


def loss(model, batch):
    """Cross-entropy of the next character, as a mean."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def metrics(model, batches):
    """Accuracy and bits per character over all batches."""
    right, total, loss_sum = 0, 0, 0.0
    for x, y in batches:
        scores = model(x)
        loss_sum += float(F.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum"))
        right += int((scores.argmax(2) == y).sum())
        total += y.numel()
    if not total:
        return {}
    return {"accuracy": right / total, "bits_per_character": loss_sum / total / math.log(2)}


def optimizer(parameters, config):
    """Adam with `config.lr`."""
    return torch.optim.Adam(parameters, lr=float(config.get("lr", 0.005)))
