"""LoRA adapters of a causal language model of `transformers`, made by `peft`; the job is peft.yaml.

`folder` in `task.config` is one in which `save_pretrained` has put a model: its weights are frozen, and with the files
of a tokenizer there it reads a shard's text. Without `folder` a small Llama over bytes is made from the job's seed.
Nothing is loaded from a hub.

`train_a: false` trains B only over the same random A, so that the mean of several regions is exact; see task.py.
"""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


def model(config):
    """Create the model, and freeze all but the adapters."""
    if config.get("folder"):
        kind = getattr(torch, config.get("dtype", "float32"))
        base = AutoModelForCausalLM.from_pretrained(config["folder"], local_files_only=True, dtype=kind)
    else:
        base = AutoModelForCausalLM.from_config(_small(config))
    base.config.use_cache = False
    lora = LoraConfig(
        r=int(config.get("rank", 8)),
        lora_alpha=float(config.get("alpha", 16)),
        target_modules=config.get("modules", "all-linear"),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(base, lora)
    if not config.get("train_a", False):
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name:
                parameter.requires_grad_(False)
    return adapted


def _small(config):
    width, heads = int(config.get("width", 64)), int(config.get("heads", 4))
    return LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=int(config.get("blocks", 4)),
        num_attention_heads=heads, max_position_embeddings=int(config.get("length", 48)),
        initializer_range=width**-0.5,
    )  # fmt: skip


class Windows(Dataset):
    """Windows of `length` tokens, each with the same window one token later."""

    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        stretch = self.tokens[index * self.length : (index + 1) * self.length + 1].long()
        return stretch[:-1], stretch[1:]


def dataset(uri, split, config):
    """Read a text file, or all .txt files of a folder, as windows of tokens. The region file counts them as samples."""
    path, length = Path(uri), int(config.get("length", 48))
    files = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not files:
        raise FileNotFoundError(f"{path} holds no .txt files")
    text = b"\n".join(file.read_bytes() for file in files)
    folder = config.get("folder")
    if folder and (Path(folder) / "tokenizer_config.json").exists():
        read = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = torch.tensor(read(text.decode(), add_special_tokens=False, verbose=False)["input_ids"])
    else:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(tokens) <= length:
        raise ValueError(f"{path} is shorter than one stretch of {length} tokens")
    return Windows(tokens, length)


def loss(model, batch):
    """Cross-entropy of the next token, as a mean."""
    x, y = batch
    return F.cross_entropy(model(input_ids=x).logits.float().flatten(0, 1), y.flatten())


def metrics(model, batches):
    """Mean loss over all batches."""
    total, loss_sum = 0, 0.0
    for x, y in batches:
        loss_sum += float(loss(model, (x, y))) * y.numel()
        total += y.numel()
    return {"loss": loss_sum / total} if total else {}


def optimizer(parameters, config):
    """AdamW of the adapters."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=float(config.get("lr", 0.01)), weight_decay=0.0)
