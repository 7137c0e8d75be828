"""Gradient-boosted trees of a table, grown from histograms that the regions add up. Plain PyTorch.

A step is a level of a tree. Each worker adds up gradients and curvatures of its rows by node, column and bin; the
exchange averages these histograms; in the next step every worker chooses the same splits from the average (Chen and
Guestrin 2016, "XGBoost", section 2; histograms as in Ke et al. 2017, "LightGBM", section 2.1). So only sums leave a
region. What a step must set is written as a gradient: with steps of length 1 a parameter becomes what it should be.

The exchange must be `ma`, synchronous, after every step, and with the codec fp32, as in trees.yaml.
"""

import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

COLUMNS = json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8"))
MOST = 2.5
"""Deviations from the mean at which the outer bins of a number begin."""
UNIT = 1000
"""Rows; histograms are counted in so many, so that `smoothing` is too."""
held = UNIT
"""Rows of the region."""


class Trees(nn.Module):
    """Trees of one depth, all stored as numbers; rows are bins, B x columns."""

    def __init__(self, trees, depth, bins, rate, smoothing):
        super().__init__()
        self.depth, self.bins, self.rate, self.smoothing = depth, bins, rate, smoothing
        self.step = nn.Parameter(torch.zeros(1))
        self.splits = nn.Parameter(torch.zeros(trees, 2**depth - 1, 2))  # column, and last bin that goes left
        self.leaves = nn.Parameter(torch.zeros(trees, 2**depth))
        columns = len(COLUMNS["numbers"]) + len(COLUMNS["levels"])
        self.sums = nn.Parameter(torch.zeros(2**depth, columns, bins, 2))  # gradients and curvatures of the last step

    def rows(self, batch):
        """Bins of a dict of columns. Bin 0 holds missing values; levels that are not agreed on share one with them."""
        found, device = [], self.splits.device
        edges = torch.linspace(-MOST, MOST, self.bins - 2, device=device)
        for name, known in COLUMNS["numbers"].items():
            value = (batch[name].to(device).float() - known["mean"]) / known["deviation"]
            found.append(torch.where(value.isnan(), 0, 1 + torch.bucketize(value.nan_to_num(), edges)))
        for name, levels in COLUMNS["levels"].items():
            places = {level: 1 + place for place, level in enumerate(levels)}
            found.append(torch.tensor([places.get(str(level), 0) for level in batch[name]], device=device))
        return torch.stack(found, 1)

    def nodes(self, rows, splits, depth):
        """Number of the node of each row at a depth of one tree."""
        node = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        for level in range(depth):
            column, last = splits[2**level - 1 + node].round().long().unbind(1)
            node = 2 * node + (rows.gather(1, column.unsqueeze(1)).squeeze(1) > last)
        return node

    def scores(self, rows, splits, leaves):
        """Logits of rows."""
        trees, none = zip(splits, leaves, strict=True), torch.zeros(len(rows), device=rows.device)
        return sum((leaf[self.nodes(rows, split, self.depth)] for split, leaf in trees), none)

    def forward(self, batch):
        """Logits of a dict of columns."""
        return self.scores(self.rows(batch), self.splits, self.leaves)

    def grown(self):
        """Splits and leaves after what the last step's sums tell."""
        splits, leaves = self.splits.clone(), self.leaves.clone()
        last = round(float(self.step)) - 1
        tree, level = divmod(last, self.depth + 1)
        if last < 0 or tree >= len(splits):
            return splits, leaves
        sums = self.sums[: 2**level].double()
        if level == self.depth:
            gradient, curvature = sums[:, 0].sum(1).unbind(1)
            leaves[tree] = (-self.rate * gradient / (curvature + self.smoothing)).float()
            return splits, leaves

        def worth(part):
            return part[..., 0] ** 2 / (part[..., 1] + self.smoothing)

        left = sums.cumsum(2)
        gain = (worth(left) + worth(left[:, :, -1:] - left) - worth(left[:, :, -1:])).flatten(1)
        best = gain.argmax(1)
        first = 2**level - 1
        splits[tree, first : first + 2**level] = torch.stack([best // self.bins, best % self.bins], 1).float()
        return splits, leaves


def model(config):
    """Trees without a split. Raises ``ValueError`` for fewer bins than a column needs."""
    bins = int(config.get("bins", 16))
    least = max([3, *(1 + len(levels) for levels in COLUMNS["levels"].values())])
    if bins < least:
        raise ValueError(
            f"config.bins is {bins}; the columns need {least}: one for each level, and one for missing ones"
        )
    return Trees(
        int(config.get("trees", 20)), int(config.get("depth", 3)), bins,
        float(config.get("rate", 0.3)), float(config.get("smoothing", 0.002)),
    )  # fmt: skip


def dataset(rows, split, config):
    """Take note of the number of rows: regions whose steps have as many rows count alike otherwise."""
    global held
    if split == "train":
        held = len(rows)
    return rows


def truth(batch):
    """The column of labels, 0 or 1, as numbers."""
    return batch[COLUMNS["label"]].float()


def loss(model, batch):
    """Cross-entropy of the label, as a mean; its gradient leads each parameter to what it should be after the step."""
    y = truth(batch).to(model.splits.device)
    with torch.no_grad():
        rows, (splits, leaves) = model.rows(batch), model.grown()
        scores = model.scores(rows, splits, leaves)
        tree, level = divmod(round(float(model.step)), model.depth + 1)
        sums = torch.zeros_like(model.sums)
        if tree < len(splits):
            node, part = model.nodes(rows, splits[tree], level), scores.sigmoid()
            both = torch.stack([part - y, part * (1 - part)], 1) * (held / UNIT / len(rows))
            for column in range(rows.shape[1]):
                sums[:, column].index_put_((node, rows[:, column]), both, accumulate=True)
        wanted = [(model.step, model.step + 1), (model.splits, splits), (model.leaves, leaves), (model.sums, sums)]
        value = F.binary_cross_entropy_with_logits(scores, y)
    leading = sum((parameter * (parameter.detach() - target)).sum() for parameter, target in wanted)
    return value + leading - leading.detach()


def metrics(model, batches):
    """Accuracy and loss over all batches."""
    right, total, loss_sum = 0, 0, 0.0
    for batch in batches:
        scores = model(batch)
        y = truth(batch).to(scores.device)
        loss_sum += float(F.binary_cross_entropy_with_logits(scores, y, reduction="sum"))
        right += int(((scores > 0) == (y > 0.5)).sum())
        total += len(y)
    return {"accuracy": right / total, "loss": loss_sum / total} if total else {}


def optimizer(parameters, config):
    """Steps of length 1."""
    return torch.optim.SGD(parameters, lr=1.0)
