"""A table with numbers, categories and missing values: logistic regression, or a network with one hidden layer.

The region's file states `format: csv` or `parquet` for its data, so geofed reads them: a batch is a dict of columns.
`columns.json` holds what all regions must agree on: mean and deviation of each column of numbers, and the levels of
each column of categories. `columns.py` writes it from what `columns.yaml` measures.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

COLUMNS = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))


class Encoded(nn.Module):
    """Makes a vector of a row. A number is standardised, and 0 where it is missing, which a further input says.

    A category has an input for each agreed level, and one for any other or none. No layer has statistics of its own:
    regions with different rows would disagree on them.
    """

    def __init__(self):
        super().__init__()
        self.places = {
            name: {level: place for place, level in enumerate(levels)} for name, levels in COLUMNS["levels"].items()
        }

    @property
    def size(self):
        """Length of a vector."""
        return 2 * len(COLUMNS["numbers"]) + sum(len(levels) + 1 for levels in self.places.values())

    def forward(self, batch):
        """Vectors, B x size, of a dict of columns."""
        parts = []
        for name, known in COLUMNS["numbers"].items():
            value = (batch[name].float() - known["mean"]) / known["deviation"]
            parts += [value.nan_to_num(0.0).clamp(-5, 5).unsqueeze(1), value.isnan().float().unsqueeze(1)]
        for name, places in self.places.items():
            codes = [places.get(str(level), len(places)) for level in batch[name]]
            parts.append(F.one_hot(torch.tensor(codes), len(places) + 1).float())
        device = next((one.device for one in batch.values() if isinstance(one, torch.Tensor)), None)
        return torch.cat([part.to(device) for part in parts], 1)


def model(config):
    """Logistic regression for `config.hidden` 0, else a network with a hidden layer of this size."""
    encoded, hidden = Encoded(), int(config.get("hidden", 0))
    if not hidden:
        return nn.Sequential(encoded, nn.Linear(encoded.size, 1))
    return nn.Sequential(encoded, nn.Linear(encoded.size, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def truth(batch):
    """The column of labels, 0 or 1, as numbers."""
    return batch[COLUMNS["label"]].float()


def loss(model, batch):
    """Cross-entropy of the label, as a mean."""
    return F.binary_cross_entropy_with_logits(model(batch).squeeze(1), truth(batch))


def metrics(model, batches):
    """Accuracy and loss over all batches."""
    right, total, loss_sum = 0, 0, 0.0
    for batch in batches:
        scores, y = model(batch).squeeze(1), truth(batch)
        loss_sum += float(F.binary_cross_entropy_with_logits(scores, y, reduction="sum"))
        right += int(((scores > 0) == (y > 0.5)).sum())
        total += len(y)
    return {"accuracy": right / total, "loss": loss_sum / total} if total else {}


def optimizer(parameters, config):
    """Adam with `config.lr` and `config.weightDecay`."""
    return torch.optim.Adam(
        parameters, lr=float(config.get("lr", 0.01)), weight_decay=float(config.get("weightDecay", 0.0))
    )
