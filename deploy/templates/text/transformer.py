"""A transformer over packed bytes, as a list of layers: it learns to predict the next byte. Plain PyTorch.

The region's file states `format: text` for its data, so geofed reads and packs them: a sample has `input_ids` and
`labels`, one token for each byte, and 256 at the end of a document. Each entry of `layers` makes one layer when it is
called; a model that is cut into stages over several functions has workers that make only those of their own stage.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

TOKENS = 257
"""Tokens: the 256 bytes, and one that ends a document."""


class Tokens(nn.Module):
    """Embeddings of tokens and of their positions, added."""

    def __init__(self, width, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(length, width)

    def forward(self, x):
        """Vectors, B x T x width, of tokens, B x T."""
        return self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))


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
    """Layer norm, and a linear layer over the tokens."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, TOKENS)

    def forward(self, x):
        """Scores of the next token, B x T x tokens."""
        return self.scores(self.norm(x))


def layers(config):
    """Return the layers of the model in order, each as a function that creates it."""
    width, length = int(config.get("width", 64)), int(config.get("length", 64))
    blocks, heads = int(config.get("blocks", 2)), int(config.get("heads", 4))
    return [lambda: Tokens(width, length), *[lambda: Block(width, heads)] * blocks, lambda: Scores(width)]


def scored(model, batch):
    """Scores of all positions but the last, and the tokens that follow them; -100: none follows."""
    scores = model(batch["input_ids"][:, :-1])
    return scores.flatten(0, 1), batch["labels"][:, 1:].flatten()


def loss(model, batch):
    """Cross-entropy of the next token, as a mean."""
    return F.cross_entropy(*scored(model, batch))


def metrics(model, batches):
    """Accuracy and bits per byte over all batches."""
    right, total, loss_sum = 0, 0, 0.0
    for batch in batches:
        scores, following = scored(model, batch)
        loss_sum += float(F.cross_entropy(scores, following, reduction="sum"))
        right += int((scores.argmax(1) == following).sum())
        total += int((following >= 0).sum())
    return {"accuracy": right / total, "bits_per_byte": loss_sum / total / math.log(2)} if total else {}


def optimizer(parameters, config):
    """Adam with `config.lr`."""
    return torch.optim.Adam(parameters, lr=float(config.get("lr", 0.003)))
