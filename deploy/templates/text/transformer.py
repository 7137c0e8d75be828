"""A transformer over characters, as a list of layers: a model that may be cut into stages over several functions.

The data and the loss are those of `task.py`. Each entry of `layers` makes one layer when it is called, so that a worker
makes only those of its own stage.
"""

import torch
from task import ALPHABET, dataset, loss, metrics, optimizer  # noqa: F401 - what is not the model is the same
from torch import nn


class Characters(nn.Module):
    """Embeddings of characters and of their positions, added."""

    def __init__(self, width, length):
        super().__init__()
        self.codes, self.places = nn.Embedding(len(ALPHABET) + 1, width), nn.Embedding(length, width)

    def forward(self, x):
        """Vectors, B x T x width, of codes, B x T."""
        return self.codes(x) + self.places(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    """Causal self-attention, and a feed-forward layer."""

    def __init__(self, width, heads):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        """Vectors of the same shape, B x T x width."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.inner(x, src_mask=mask, is_causal=True)


class Scores(nn.Module):
    """Layer norm, and a linear layer over the alphabet."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET) + 1)

    def forward(self, x):
        """Scores of the next character, B x T x alphabet."""
        return self.scores(self.norm(x))


def layers(config):
    """Return the layers of the model in order, each as a function that creates it."""
    width, length = int(config.get("width", 64)), int(config.get("length", 48))
    blocks, heads = int(config.get("blocks", 4)), int(config.get("heads", 4))
    return [lambda: Characters(width, length), *[lambda: Block(width, heads)] * blocks, lambda: Scores(width)]
