"""Batches of a region's shard, which depend only on the seed and the step."""

from __future__ import annotations

import bisect
import copy
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset, default_collate

from geofed_pb.errors import GeofedError
from region_agent.worker.data.batches import Batches
from region_agent.worker.data.fetching import fetch_split
from region_agent.worker.data.streamed import Streamed

__all__ = [
    "BatchStream",
    "Collate",
    "collated",
    "evaluation_batches",
    "fetch_split",
    "joined",
    "move",
    "parts_of",
    "share_of",
    "split_clients",
    "weighted_share_of",
]


Collate = Callable[[list[Any]], Any]
"""Makes a batch of samples."""


def joined(shards: Sequence[Any]) -> Any:
    """Concatenate shards to one dataset; a single shard is returned unchanged."""
    return shards[0] if len(shards) == 1 else _Joined(shards)


class _Joined:
    """Like `torch.utils.data.ConcatDataset`, but reads the samples of a shard in one call if the shard supports it."""

    def __init__(self, shards: Sequence[Any]) -> None:
        self.shards = shards
        self._ends = list(itertools.accumulate(len(shard) for shard in shards))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        shard = bisect.bisect_right(self._ends, index)
        return self.shards[shard][index - (self._ends[shard - 1] if shard else 0)]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        items: list[Any] = [None] * len(indices)
        for shard, places, inside in self._by_shard(indices):
            for place, item in zip(places, _items(shard, inside), strict=True):
                items[place] = item
        return items

    def stacked(self, indices: list[int]) -> list[torch.Tensor] | None:
        """See `_stacked`."""
        order: list[int] = []
        parts: list[list[torch.Tensor]] = []
        for shard, places, inside in self._by_shard(indices):
            part = _stacked(shard, inside)
            if part is None or (parts and [_kind(one) for one in part] != [_kind(one) for one in parts[0]]):
                return None
            order += places
            parts.append(part)
        back = torch.tensor(order).argsort()
        return [torch.cat(column)[back] for column in zip(*parts, strict=True)]

    def _by_shard(self, indices: list[int]) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Yield each shard that has some of the samples, with their positions in ``indices`` and in the shard."""
        places: dict[int, list[int]] = {}
        for place, index in enumerate(indices):
            places.setdefault(bisect.bisect_right(self._ends, index), []).append(place)
        for number, mine in places.items():
            first = self._ends[number - 1] if number else 0
            yield self.shards[number], mine, [indices[place] - first for place in mine]


def _items(data: Any, indices: list[int]) -> Any:
    return data.__getitems__(indices) if hasattr(data, "__getitems__") else [data[index] for index in indices]


class BatchStream:
    """Batches of one worker.

    Each epoch has a new permutation of the shard. The samples of a step depend only on the step, so that any invocation
    draws the same ones. All workers of a region together draw ``region_batch`` samples in a step; which ones does not
    depend on the number of workers.

    Raises ``GeofedError``: SHARD_UNREADABLE if there are no samples; CONFIG_INVALID if a worker would get none.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        region: str,
        worker: int,
        workers: int,
        region_batch: int | Batches,
        collate: Collate | None = None,
    ) -> None:
        """``collate`` makes a batch of samples; None: that of ``DataLoader``."""
        self._data, self._size, self._collate = data, len(data), collate
        self.skipped = 0
        """Drawn samples that are None."""
        if self._size == 0:
            raise GeofedError("SHARD_UNREADABLE", "the training split is empty")
        self._seed = [seed, zlib.crc32(region.encode())]
        self._worker, self._workers = worker, workers
        self._batches = region_batch if isinstance(region_batch, Batches) else Batches(region_batch)
        if self._batches.least < workers:
            text = f"{self._batches.least} samples a step are too few for {workers} workers"
            raise GeofedError("CONFIG_INVALID", text)
        self._weights: tuple[float, ...] = ()
        self._orders: dict[int, npt.NDArray[np.int64]] = {}
        self._blocks = data.order(self._seed, self._batches.of(1)) if isinstance(data, Streamed) else None

    def divide(self, weights: Sequence[float]) -> None:
        """Divide the samples of each step in proportion to the workers' weights, which are above 0, from now on."""
        self._weights = tuple(weights)

    def indices(self, step: int) -> list[int]:
        """Return the indices of this worker's samples in a step; steps count from 1."""
        before, share = self._batches.before(step), self._share(step)
        at, stop, drawn = before + share.start, before + share.stop, list[int]()
        while at < stop:
            epoch, offset = divmod(at, self._size)
            if self._blocks is not None:
                more = self._blocks.at(epoch, offset, min(self._size, offset + stop - at))
            else:
                more = self._order(epoch)[offset : offset + stop - at].tolist()
            drawn += more
            at += len(more)
        return drawn

    def count(self, step: int) -> int:
        """Return this worker's number of samples in a step."""
        return len(self._share(step))

    def _share(self, step: int) -> range:
        if self._weights:
            return weighted_share_of(self._worker, self._weights, self._batches.of(step))
        return share_of(self._worker, self._workers, self._batches.of(step))

    def batch(self, step: int) -> Any:
        """Return the collated samples of a step."""
        return self.parts(step, [self.count(step)])[0][1]

    def parts(self, step: int, sizes: Sequence[int]) -> list[tuple[int, Any]]:
        """Return the same samples in several batches of the given sizes, each with its number of samples.

        Samples that are None are left out, and so are batches without any other. Raises ``GeofedError("TASK_INVALID")``
        if there are no others in the step.
        """
        if isinstance(self._data, Streamed):
            self._data.expect([self.indices(step + ahead) for ahead in range(self._data.prefetch + 1)])
        groups = self.groups(step, sizes)
        return self.kept(step, sizes, [collated(self._data, list(group), self._collate) for group in groups])

    def groups(self, step: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the indices of a step's samples in batches of the given sizes."""
        indices, cut = self.indices(step), list(itertools.accumulate(sizes, initial=0))
        return tuple(tuple(indices[start:stop]) for start, stop in itertools.pairwise(cut))

    def kept(self, step: int, sizes: Sequence[int], made: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Return the batches of a step, made of `groups`, that have samples; count those that are left out.

        Raises ``GeofedError("TASK_INVALID")`` if there are none.
        """
        found = [one for one in made if one[0]]
        self.skipped += sum(sizes) - sum(count for count, _ in found)
        if not found:
            raise GeofedError("TASK_INVALID", f"all {sum(sizes)} samples that dataset gives for step {step} are None")
        return found

    def sampled(self, step: int, rate: float, key: bytes) -> Iterator[Any]:
        """Yield batches of one sample each: those of this worker among the samples of a step, in which each sample of
        the region is with the probability ``rate``, independently of others. Samples that are None are left out.

        They follow from the key and the step, so that all workers of the region draw the same ones.
        """
        words = np.frombuffer(key, np.uint32).tolist()
        drawn = np.flatnonzero(np.random.default_rng([*words, step]).random(self._size) < rate)
        for index in drawn[drawn % self._workers == self._worker].tolist():
            count, batch = collated(self._data, [index], self._collate)
            self.skipped += 1 - count
            if count:
                yield batch

    def micro_batches(self, step: int, sizes: Sequence[int]) -> list[Any]:
        """Return the same samples in several batches of exactly the given sizes, for the stages of a pipeline."""
        found = self.parts(step, sizes)
        if [count for count, _ in found] != list(sizes):
            text = f"of the samples that dataset gives for step {step} some are None, which a pipeline cannot skip"
            raise GeofedError("TASK_INVALID", text)
        return [batch for _, batch in found]

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            if len(self._orders) > 1:
                self._orders.clear()
            self._orders[epoch] = np.random.default_rng([*self._seed, epoch]).permutation(self._size)
        return self._orders[epoch]


def share_of(worker: int, workers: int, region_batch: int) -> range:
    """Return the range of a worker's samples among those of a step."""
    return range(worker * region_batch // workers, (worker + 1) * region_batch // workers)


def weighted_share_of(worker: int, weights: Sequence[float], region_batch: int) -> range:
    """Return the range of a worker's samples among those of a step, at least as many as there are workers; each has
    one, and of the others a part in proportion to its weight."""
    others, total = region_batch - len(weights), sum(weights)
    before, after = (number + int(others * sum(weights[:number]) / total + 1e-9) for number in (worker, worker + 1))
    # The sum of many samples is not exact.
    return range(before, region_batch if worker == len(weights) - 1 else after)


def parts_of(samples: int, at_once: int) -> list[int]:
    """Divide samples into as few parts of at most ``at_once`` as there can be, of nearly equal sizes; 0: no limit."""
    parts = -(-samples // (at_once or samples))
    return [len(share_of(part, parts, samples)) for part in range(parts)]


def evaluation_batches(
    data: Any,
    worker: int,
    workers: int,
    batch: int,
    collate: Collate | None = None,
    made: Callable[[list[list[int]], int], tuple[int, Any]] | None = None,
) -> tuple[list[int], Iterator[Any]]:
    """Return this worker's part of the test split in batches of ``batch`` samples: their sizes, and an iterator.

    ``made``: returns a batch, and its number of samples, of the indices of all batches and its number; None: they are
    collated here.

    Samples that are None are left out; the sizes are corrected as the batches are drawn, to 0 for one without others.
    """
    # Of data that is read in blocks, whole ones.
    mine = share_of(worker, workers, len(data)) if isinstance(data, Streamed) else range(worker, len(data), workers)
    parts = [mine[start : start + batch] for start in range(0, len(mine), batch)]
    sizes = [len(part) for part in parts]

    def draw() -> Iterator[Any]:
        whole = [list(part) for part in parts]
        for place, part in enumerate(whole):
            if made is not None:
                sizes[place], batch = made(whole, place)
            else:
                if isinstance(data, Streamed):
                    data.expect(whole[place : place + data.prefetch + 1])
                sizes[place], batch = collated(data, part, collate)
            if sizes[place]:
                yield batch

    return sizes, draw()


def split_clients(data: Any) -> npt.NDArray[np.int64] | None:
    """Return the number of each sample's client, shape (samples,); None: the data do not tell.

    They do by an attribute `clients` of what the task's `dataset` returns, one entry for each sample, or by the format
    of the region's data. Raises ``GeofedError("TASK_INVALID")`` for an attribute that cannot be used.
    """
    if isinstance(data, _Joined):
        parts = [split_clients(shard) for shard in data.shards]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        begins = itertools.accumulate((int(part.max(initial=-1)) + 1 for part in known[:-1]), initial=0)
        return np.concatenate([part + begin for part, begin in zip(known, begins, strict=True)])
    stated = data.stated_clients if isinstance(data, Streamed) else getattr(data, "clients", None)
    if stated is None:
        by_format = data.rows.index.clients if isinstance(data, Streamed) else None
        return None if by_format is None else by_format.astype(np.int64)
    named = stated.tolist() if hasattr(stated, "tolist") else list(stated)
    if len(named) != len(data):
        text = f"`clients` of what dataset returned has {len(named):,} entries for {len(data):,} samples"
        raise GeofedError("TASK_INVALID", text, hint="give each sample its client")
    if not all(isinstance(name, str | int) for name in named):
        text = "`clients` of what dataset returned has entries that are neither integers nor text"
        raise GeofedError("TASK_INVALID", text, hint="name each sample's client by an integer or a string")
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in named], np.int64)


def collated(data: Any, indices: list[int], collate: Collate | None) -> tuple[int, Any]:
    """Return the number of samples that are not None, and the batch of these; None if there are none."""
    if collate is None and isinstance(data, Streamed) and (made := data.batch(indices)) is not None:
        return len(indices), made
    if collate is None and (stacked := _stacked(data, indices)) is not None:
        return len(indices), stacked
    items = _items(data, indices)
    samples = [sample for sample in items if sample is not None]
    # An item may be several samples: `__getitems__` may return a whole batch as one.
    count = len(indices) - (len(items) - len(samples)) if samples else 0
    return count, (collate or default_collate)(samples) if samples else None


def _stacked(data: Any, indices: list[int]) -> list[torch.Tensor] | None:
    """Collate samples of a `TensorDataset` without reading them one by one; None for other datasets."""
    if isinstance(data, _Joined):
        return data.stacked(indices)
    # A subclass may return other items, and sparse tensors cannot be collated.
    if type(data) is not TensorDataset or any(tensor.layout != torch.strided for tensor in data.tensors):
        return None
    rows = torch.tensor(indices)
    return [tensor[rows] for tensor in data.tensors]


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what tensors must have in common to be concatenated; others are left to `default_collate`."""
    return tensor.dtype, tensor.device, tensor.shape[1:]


def move(batch: Any, device: torch.device) -> Any:
    """Move a batch to a device, with tensors in nested containers.

    Containers keep their types if they can be created again, as with ``DataLoader``'s pinned memory. Objects without
    tensors are returned unchanged. Raises ``GeofedError("TASK_FAILED")`` if an object cannot be moved.
    """
    if device.type == "cpu":
        return batch
    try:
        return _moved(batch, device)
    except Exception as error:
        if isinstance(error, GeofedError | MemoryError | torch.OutOfMemoryError):
            raise
        text = f"moving a batch to {device} raised {type(error).__name__}: {error}"
        raise GeofedError("TASK_FAILED", text) from error


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, str | bytes | type):
        return batch
    if callable(getattr(batch, "to", None)):
        # `to` may change the object in place and return None, or return another object.
        return batch if (moved := batch.to(device)) is None else moved
    if isinstance(batch, Mapping):
        return _with_values(batch, {key: _moved(value, device) for key, value in batch.items()})
    if isinstance(batch, Sequence):
        return _with_items(batch, [_moved(value, device) for value in batch])
    if is_dataclass(batch):
        clone = copy.copy(batch)
        for field in fields(batch):
            if hasattr(batch, field.name):
                # Works for frozen dataclasses, too.
                object.__setattr__(clone, field.name, _moved(getattr(batch, field.name), device))
        return clone
    return batch


def _with_values(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if all(batch[key] is value for key, value in moved.items()):
        return batch
    if isinstance(batch, MutableMapping):
        # A copy keeps attributes besides the items, such as a default factory.
        clone = copy.copy(batch)
        clone.update(moved)
        return clone
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return moved


def _with_items(batch: Sequence[Any], moved: list[Any]) -> Any:
    if all(one is other for one, other in zip(batch, moved, strict=True)):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*moved)
    try:
        return type(batch)(moved)  # type: ignore[call-arg]
    except TypeError:
        return tuple(moved) if isinstance(batch, tuple) else moved
