"""A causal language model of which only LoRA adapters are trained. Plain PyTorch; change what you like.

The model is a small GPT over bytes, made from the job's seed, so that it runs anywhere; `train.initialModel` of the job
file puts weights of yours in its place. Frozen weights are never exchanged: regions compare their digests and exchange
the adapters alone.

LoRA (Hu et al. 2022) adds B A to a frozen matrix. The mean of several regions' B times the mean of their A is not the
mean of their products (FLoRA, Wang et al. 2024). With `train_a: false` all regions keep the same random A and train B
only, as in FFA-LoRA (Sun et al. 2024): the mean is then exact, with half of the bytes.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class LoRA(nn.Module):
    """A frozen linear layer, plus B A x * alpha / rank."""

    def __init__(self, inputs, outputs, config):
        super().__init__()
        rank = int(config.get("rank", 8))
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.lora_A.requires_grad_(bool(config.get("train_a", False)))
        self.scale = float(config.get("alpha", 16)) / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a layer norm."""

    def __init__(self, width, heads, config):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = LoRA(width, 3 * width, config), LoRA(width, width, config)
        self.up, self.down = LoRA(width, 4 * width, config), LoRA(4 * width, width, config)
        for norm in (self.norm_1, self.norm_2):
            norm.requires_grad_(False)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LanguageModel(nn.Module):
    """Scores of the next token."""

    def __init__(self, config):
        super().__init__()
        width, vocabulary = int(config.get("width", 64)), int(config.get("vocabulary", 256))
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(int(config.get("length", 48)), width)
        self.blocks = nn.ModuleList(
            Block(width, int(config.get("heads", 4)), config) for _ in range(int(config.get("blocks", 4)))
        )
        self.norm = nn.LayerNorm(width)
        # Scores of a new model are then of about the size that cross-entropy expects.
        nn.init.normal_(self.tokens.weight, std=2 / math.sqrt(width))
        for frozen in (self.tokens, self.places, self.norm):
            frozen.requires_grad_(False)

    def forward(self, x):
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return (self.norm(hidden) @ self.tokens.weight.T).float()


def model(config):
    """Create the model."""
    return LanguageModel(config)


class Windows(Dataset):
    """Windows of `length` bytes, each with the same window one byte later."""

    def __init__(self, codes, length):
        self.codes, self.length = codes, length

    def __len__(self):
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index):
        stretch = self.codes[index * self.length : (index + 1) * self.length + 1].long()
        return stretch[:-1], stretch[1:]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def dataset(uri, split, config):
    """Read a text file, or all .txt files of a folder, as windows of bytes."""
    path, length = Path(uri), int(config.get("length", 48))
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .txt files")
    text = b"\n".join(file.read_bytes() for file in files)
    if len(text) <= length:
        raise ValueError(f"{path} is shorter than one stretch of {length} bytes")
    return Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), length)


def loss(model, batch):
    """Cross-entropy of the next byte, as a mean."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def metrics(model, batches):
    """Loss and perplexity over all batches."""
    total, loss_sum = 0, 0.0
    for x, y in batches:
        loss_sum += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"))
        total += y.numel()
    return {"loss": loss_sum / total, "perplexity": math.exp(min(50.0, loss_sum / total))} if total else {}


def optimizer(parameters, config):
    """AdamW of the adapters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=float(config.get("lr", 0.01)), weight_decay=0.0)
