"""Probabilistic matrix factorisation of ratings, with biases. Plain PyTorch; change what you like.

A shard is a file of ratings, or a folder of files, as MovieLens has them, as they are or packed (`.gz`):

    1::1193::5::978300760                ratings.dat of ML-1M and ML-10M
    userId,movieId,rating,timestamp      ratings.csv of the later ones
    196 242 3 881250949                  u.data of ML-100K, with tabs between the columns

The time may be missing; it is not used. Ids are taken as they stand: they are rows of the model, which must be the
same in all regions, so no region may number its users or items by itself.
"""

import io

import numpy as np
import records
import torch
from torch import nn
from torch.utils.data import Dataset

ENDINGS = (".dat", ".csv", ".data", ".tsv")
SEPARATORS = {"dat": b"::", "csv": b",", "tab": b"\t"}
FORMS = {"dat": "user::item::rating::time", "csv": "user,item,rating,time", "tab": "user, item, rating, time with tabs"}
MOST_RATING = 1e6
"""Largest rating that is read; a larger number is a column in the wrong place."""
DIGITS = tuple(bytes([digit]) for digit in b"0123456789")


class Factorisation(nn.Module):
    """rating = mean + user's bias + item's bias + user's factors . item's factors"""

    def __init__(self, users, items, rank, mean, l2):
        super().__init__()
        self.mean, self.l2 = mean, l2
        self.user = nn.Parameter(0.1 * torch.randn(users, rank))
        self.item = nn.Parameter(0.1 * torch.randn(items, rank))
        self.user_bias = nn.Parameter(torch.zeros(users))
        self.item_bias = nn.Parameter(torch.zeros(items))

    def rows(self, user, item):
        """Factors and biases of users and items; shape of the ids, and rank."""
        shape, user, item = user.shape, user.flatten(), item.flatten()
        factors = self.user.index_select(0, user), self.item.index_select(0, item)
        biases = self.user_bias.index_select(0, user), self.item_bias.index_select(0, item)
        return *(factor.view(*shape, -1) for factor in factors), *(bias.view(shape) for bias in biases)

    def forward(self, user, item):
        """Ratings, of shape (B,), of users and items."""
        u, v, b, c = self.rows(user, item)
        return self.mean + b + c + (u * v).sum(-1)


def model(config):
    """Create the model."""
    users, items = sizes(config)
    rank = int(config.get("rank", 20))
    return Factorisation(users, items, rank, float(config.get("mean", 3.5)), float(config.get("l2", 0.02)))


def sizes(config):
    """Return the number of users and of items, the same in all regions."""
    users, items = int(config.get("users", 0)), int(config.get("items", 0))
    if users < 1 or items < 1:
        raise ValueError("config.users and config.items must be set, alike for all regions, above the greatest ids")
    return users, items


class Ratings(Dataset):
    """Ratings as arrays of users, items and values."""

    def __init__(self, user, item, rating):
        self.user, self.item, self.rating = (torch.from_numpy(array) for array in (user, item, rating))

    def __len__(self):
        return len(self.rating)

    def __getitem__(self, index):
        return self.user[index], self.item[index], self.rating[index]

    def __getitems__(self, indices):
        """The whole batch as one item, which collates to 1 x batch."""
        return [self[torch.as_tensor(indices)]]


def dataset(uri, split, config):
    """Read a file of ratings, or all of a folder."""
    limits, form = sizes(config), config.get("format", "auto")
    if form not in ("auto", *SEPARATORS):
        raise ValueError(f"config.format is {form!r}; it can be auto, {', '.join(SEPARATORS)}")
    files = records.files_of(uri, ENDINGS)
    # A folder as MovieLens packs it holds more than ratings.
    files = [file for file in files if file.name.startswith(("ratings.", "u.data"))] or files
    parts = [], [], []
    for path in files:
        known = None
        for lines in records.stretches(path):
            known = known or begin(lines, form)
            if known:  # there was more than blank lines
                for part, array in zip(parts, read(lines, *known, limits), strict=True):
                    part.append(array)
    dtypes = np.int32, np.int32, np.float32
    ratings = Ratings(*(records.joined(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)))
    if len(ratings) == 0:
        raise ValueError(f"{uri} holds no ratings")
    return ratings


def begin(lines, form):
    """Return format and number of columns, by the first line that is not blank; a header is removed. None if all are
    blank."""
    first, number = lines.first()
    if not first:
        return None
    if form == "auto":
        form = next((form for form, separator in SEPARATORS.items() if separator in first), None)
    if form is None or first.count(SEPARATORS[form]) not in (2, 3):
        expected = FORMS[form] if form else ", or ".join(FORMS.values())
        raise ValueError(f"{lines.path}:{number}: expected {expected}; found {records.shown(first)}")
    if form == "csv" and first[:1] not in DIGITS:
        names = first.replace(b'"', b"").strip().lower().split(b",")
        if names[:3] not in ([b"userid", item, b"rating"] for item in (b"movieid", b"itemid")):
            text = f"expected the header userId,movieId,rating,timestamp; found {records.shown(first)}"
            raise ValueError(f"{lines.path}:{number}: {text}")
        lines.text = lines.text.replace(first, b"", 1)
    return form, first.count(SEPARATORS[form]) + 1


def read(lines, form, columns, limits):
    """Users, items and ratings of whole lines. Raises ValueError at FILE:LINE."""
    table = read_at_once(lines.text.strip(b"\n") + b"\n", SEPARATORS[form], columns, limits)
    if table is None:  # something is unusual or wrong
        rows = list(lines.each(lambda line: read_line(line, form, columns, limits)))
        table = np.array(rows, np.float64).reshape(-1, 3)
    return table[:, 0].astype(np.int32), table[:, 1].astype(np.int32), table[:, 2].astype(np.float32)


def read_at_once(text, separator, columns, limits):
    """A row of user, item and rating for each line; None if any line is not plainly that."""
    # Without the numbers, all lines are the same.
    if text.translate(None, b"0123456789.") != (separator * (columns - 1) + b"\n") * text.count(b"\n"):
        return None
    text = text.replace(separator, b",")
    try:
        table = np.loadtxt(io.BytesIO(text), delimiter=",", usecols=(0, 1, 2), comments=None, ndmin=2)
    except ValueError:
        return None
    ids = table[:, :2]
    if not ((ids < limits).all() and (ids == np.floor(ids)).all() and (table[:, 2] <= MOST_RATING).all()):
        return None
    return table


def read_line(line, form, columns, limits):
    """Read one line; returns user, item and rating. Raises ``ValueError``."""
    fields = line.strip(b" ").split(SEPARATORS[form])
    if len(fields) != columns:
        raise ValueError(f"expected {columns} columns, as in {FORMS[form]}; found {len(fields)}")
    user, item = records.whole(fields[0], "the user"), records.whole(fields[1], "the item")
    for name, value, limit in (("user", user, limits[0]), ("item", item, limits[1])):
        if value >= limit:
            text = f"{name} {value} is not below config.{name}s, {limit}"
            raise ValueError(f"{text}: raise it to {value + 1} or more, alike for all regions")
    return user, item, records.decimal(fields[2], "the rating", MOST_RATING)


def loss(model, batch):
    """Mean squared error, with the L2 terms of the rows that the batch has ratings of, once for each rating."""
    user, item, rating = batch
    u, v, b, c = model.rows(user, item)
    error = rating - model.mean - b - c - (u * v).sum(-1)
    size = (u * u).sum(-1) + (v * v).sum(-1) + b * b + c * c
    return (error * error + model.l2 * size).mean()


def metrics(model, batches):
    """Means over the ratings, so that parts can be merged: the root of the federation's mse is its RMSE."""
    total, squares, distance = 0, 0.0, 0.0
    for user, item, rating in batches:
        error = rating - model(user, item)
        squares += float((error * error).sum())
        distance += float(error.abs().sum())
        total += rating.numel()
    return {"mse": squares / total, "mae": distance / total} if total else {}


def optimizer(parameters, config):
    """Adam, whose steps do not depend on how rarely a row has a rating; SGD would need an `lr` that fits the data."""
    kind = config.get("optimizer", "adam")
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=float(config.get("lr", 0.01)))
    if kind == "sgd":
        momentum = float(config.get("momentum", 0.8))
        return torch.optim.SGD(parameters, lr=float(config.get("lr", 1.0)), momentum=momentum, nesterov=momentum > 0)
    raise ValueError(f"config.optimizer is {kind!r}; it can be adam or sgd")
