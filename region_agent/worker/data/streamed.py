"""A split that is read block by block."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats import format_of
from region_agent.worker.data.formats.text import TextReader
from region_agent.worker.data.index import BlockIndex
from region_agent.worker.data.order import SMALL_BYTES, BlockOrder
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.invocation import ShardFile

__all__ = ["Rows", "Streamed"]

_THREADS = 16
"""Blocks that are read at the same time; most of the threads wait for a store."""


class Rows(Dataset[Any]):
    """Samples of a split as a map-style dataset, which a task's `dataset` gets in place of a path.

    A block is read when one of its samples is needed, and kept while others of it are likely to be.
    """

    def __init__(self, spec: FormatSpec, files: Sequence[ShardFile], index: BlockIndex) -> None:
        if len(index) and int(index.file.max()) >= len(files):
            raise GeofedError("SHARD_UNREADABLE", "the split has other files than when it was indexed")
        self.schema = dict(index.schema)
        """Parts of a sample with their types."""
        self.sources = Sources(files)
        """The split's files."""
        self.index = index
        """The split's blocks."""
        self._reader = format_of(spec).reader(spec, self.sources, index)
        self._ends = np.cumsum(index.samples)
        self._held: dict[int, Future[Any]] = {}
        self._held_bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._given: dict[int, Any] | None = None

    def __len__(self) -> int:
        return self.index.total

    def __getitem__(self, index: int) -> Any:
        at = operator.index(index)
        return self.__getitems__([at + len(self) if at < 0 else at])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._given is not None:
            if lacking := [index for index in indices if index not in self._given]:
                text = f"with num_workers, a sample is made of its own row alone; dataset asked for row {lacking[0]}"
                raise GeofedError("TASK_INVALID", text)
            return [self._given[index] for index in indices]
        return self._reader.samples(*self._taken(indices))

    def give(self, rows: dict[int, Any]) -> None:
        """Have these samples, by their indices, and no others from now on: in a process that does not read itself."""
        self._given = rows

    def batch(self, indices: list[int]) -> Any:
        """Return the samples collated as by ``default_collate``; None: it has to do so."""
        return self._reader.batch(*self._taken(indices))

    def expect(self, indices: Sequence[int]) -> None:
        """Read the blocks of these samples in the background, and forget others if there are many.

        The samples that are needed first come first.
        """
        blocks = list(dict.fromkeys(self._blocks_of(indices).tolist()))
        wanted = set(blocks)
        for block in [held for held in self._held if held not in wanted]:
            if self._held_bytes <= SMALL_BYTES:
                break
            self._forget(block)
        for block in blocks:
            self._begin(block)

    def held_bytes(self, indices: Sequence[int]) -> int:
        """Return the bytes in memory of the blocks of these samples."""
        return int(self.index.held[np.unique(self._blocks_of(indices))].sum())

    def use_tokenizer(self, path: Path) -> None:
        """Make the text's tokens by a file of the package tokenizers.

        Raises ``GeofedError``: TASK_INVALID, also if the split has no text; CONFIG_INVALID.
        """
        if not isinstance(self._reader, TextReader):
            raise GeofedError("TASK_INVALID", "the task states a tokenizer, and the format of the data is no text")
        self._reader.use_tokenizer(path)

    def close(self) -> None:
        """Forget all blocks, and close the files."""
        for block in list(self._held):
            self._forget(block)
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self.sources.close()

    def _taken(self, indices: list[int]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return the blocks of some samples, and for each sample its block's position and its place in the block."""
        if not indices or not 0 <= min(indices) <= max(indices) < len(self):
            raise IndexError(f"of {len(self)} samples there is none with the index {max(indices, default=0)}")
        blocks = self._blocks_of(indices)
        if len(set(blocks.tolist()) - set(self._held)):
            self.expect(indices)
        numbers = {block: at for at, block in enumerate(dict.fromkeys(blocks.tolist()))}
        first = self._ends - self.index.samples
        places = [(numbers[block], at - int(first[block])) for at, block in zip(indices, blocks.tolist(), strict=True)]
        return [self._block(block) for block in numbers], places

    def _blocks_of(self, indices: Sequence[int]) -> Any:
        return np.searchsorted(self._ends, np.asarray(indices, np.int64), side="right")

    def _block(self, number: int) -> Any:
        try:
            return self._begin(number).result()
        except BaseException:
            # The next invocation of this process tries again.
            self._forget(number)
            raise

    def _begin(self, number: int) -> Future[Any]:
        if number not in self._held:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="data")
            self._held[number] = self._pool.submit(self._reader.load, number)
            self._held_bytes += int(self.index.held[number])
        return self._held[number]

    def _forget(self, number: int) -> None:
        if (found := self._held.pop(number, None)) is not None:
            found.cancel()
            self._held_bytes -= int(self.index.held[number])


class Streamed:
    """A split as the worker trains on it: its rows, or what the task makes of them."""

    def __init__(self, rows: Rows, items: Any, prefetch: int) -> None:
        """``items``: the rows, or a dataset whose item i is made of row i. ``prefetch``: steps that are read ahead."""
        self.rows, self._items, self.prefetch = rows, items, prefetch

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_plain(self) -> bool:
        """Whether the task has no dataset of its own."""
        return self._items is self.rows

    @property
    def stated_clients(self) -> Any:
        """Clients of the samples, as the task's own dataset states them; None: it does not."""
        return None if self._items is self.rows else getattr(self._items, "clients", None)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def __getitems__(self, indices: list[int]) -> Any:
        if hasattr(self._items, "__getitems__"):
            return self._items.__getitems__(indices)
        return [self._items[index] for index in indices]

    def batch(self, indices: list[int]) -> Any:
        """Return the samples collated as by ``default_collate``; None: it has to do so."""
        return self.rows.batch(indices) if self._items is self.rows else None

    def order(self, seed: Sequence[int], batch: int) -> BlockOrder:
        """Return the order for training; ``batch``: samples of all workers in a step."""
        return BlockOrder(self.rows.index, seed, batch)

    def expect(self, steps: Sequence[Sequence[int]]) -> None:
        """Read ahead what steps need, the first of them first."""
        self.rows.expect([index for step in steps for index in step])

    def expect_within(self, steps: Sequence[Sequence[int]], most_bytes: int) -> None:
        """Read ahead what the first step needs, and the next ones as far as their blocks have so many bytes at most."""
        wanted: list[int] = []
        for step in steps:
            if wanted and self.rows.held_bytes([*wanted, *step]) > most_bytes:
                break
            wanted += step
        self.rows.expect(wanted)
