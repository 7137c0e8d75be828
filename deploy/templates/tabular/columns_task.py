"""What the regions must agree on before they train: moments of numbers, and levels of categories. It trains nothing.

No row leaves a region: of a number its mean and its mean square, of a category the levels of at least `LEAST` rows.
"""

from collections import Counter

import torch

LEAST = 5
"""Rows of a region that a level must have to be named."""


def metrics(model, batches):
    """Of each column of numbers the mean, the mean square and the part that is there; of each other one its levels."""
    numbers, levels, rows = {}, {}, 0
    for batch in batches:
        for name, values in batch.items():
            if isinstance(values, torch.Tensor):
                there = values[~values.isnan()].double()
                sums = torch.stack([torch.tensor(float(len(there))), there.sum(), (there**2).sum()])
                numbers[name] = numbers.get(name, 0) + sums
            else:
                levels.setdefault(name, Counter()).update(level for level in values if level)
            count = len(values)
        rows += count
    found = {name: {level: count for level, count in held.items() if count >= LEAST} for name, held in levels.items()}
    for name, sums in numbers.items():
        for what, value in zip(("present", "mean", "square"), sums.tolist(), strict=True):
            found[f"{what} {name}"] = value / rows
    return found
