"""Logistic regression over 30 measurements of a tumour. Rows are read by `format` in the region files."""

import torch
from torch import nn
from torch.nn import functional as F

# Mean and deviation of each measurement in the data that scikit-learn ships. Hospitals would take those of a published
# study, so that none tells its own; or agree on them as the template `tabular` does.
SCALES = {
    "mean_radius": (14.1, 3.52),
    "mean_texture": (19.3, 4.3),
    "mean_perimeter": (92, 24.3),
    "mean_area": (655, 352),
    "mean_smoothness": (0.0964, 0.0141),
    "mean_compactness": (0.104, 0.0528),
    "mean_concavity": (0.0888, 0.0796),
    "mean_concave_points": (0.0489, 0.0388),
    "mean_symmetry": (0.181, 0.0274),
    "mean_fractal_dimension": (0.0628, 0.00705),
    "radius_error": (0.405, 0.277),
    "texture_error": (1.22, 0.551),
    "perimeter_error": (2.87, 2.02),
    "area_error": (40.3, 45.5),
    "smoothness_error": (0.00704, 0.003),
    "compactness_error": (0.0255, 0.0179),
    "concavity_error": (0.0319, 0.0302),
    "concave_points_error": (0.0118, 0.00616),
    "symmetry_error": (0.0205, 0.00826),
    "fractal_dimension_error": (0.00379, 0.00264),
    "worst_radius": (16.3, 4.83),
    "worst_texture": (25.7, 6.14),
    "worst_perimeter": (107, 33.6),
    "worst_area": (881, 569),
    "worst_smoothness": (0.132, 0.0228),
    "worst_compactness": (0.254, 0.157),
    "worst_concavity": (0.272, 0.208),
    "worst_concave_points": (0.115, 0.0657),
    "worst_symmetry": (0.29, 0.0618),
    "worst_fractal_dimension": (0.0839, 0.018),
}


def model(config):
    return nn.Linear(len(SCALES), 1)


def scores(model, batch):
    columns = [(batch[name].float() - mean) / deviation for name, (mean, deviation) in SCALES.items()]
    return model(torch.stack(columns, 1).clamp(-3, 3)).squeeze(1)


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(scores(model, batch), batch["benign"].float())


def metrics(model, batches):
    right = total = 0
    for batch in batches:
        right += int(((scores(model, batch) > 0) == (batch["benign"] > 0)).sum())
        total += len(batch["benign"])
    return {"accuracy": right / total} if total else {}


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=float(config["lr"]), momentum=0.9)
