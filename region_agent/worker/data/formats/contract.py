"""What a format of files provides. Formats are listed in `region_agent.worker.data.formats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from geofed_pb.errors import GeofedError, install_hint
from region_agent.worker.data.index import BlockIndex
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec

__all__ = ["FileFormat", "Reader", "missing_package"]


class Reader(Protocol):
    """Reads blocks of a split, from several threads, and takes samples out of them."""

    def load(self, number: int) -> Any:
        """Read and decode a block, so that it needs about the bytes that the index states.

        Raises ``GeofedError("SHARD_UNREADABLE")``.
        """

    def samples(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[Any]:
        """Return samples, each given by the position of its block in ``blocks`` and its place in the block."""

    def batch(self, blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> Any:
        """Return what ``default_collate`` would make of the samples; None: it has to."""


class FileFormat(Protocol):
    """A format of files."""

    @property
    def kind(self) -> str:
        """Name in the region file."""

    @property
    def options(self) -> tuple[str, ...]:
        """Options of `FormatSpec` that it knows."""

    def index(self, spec: FormatSpec, sources: Sources) -> BlockIndex:
        """Index a split. Blocks; raises ``GeofedError``: SHARD_UNREADABLE, LIMIT_EXCEEDED, CONFIG_INVALID."""

    def reader(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> Reader:
        """Return a reader of an indexed split."""


def missing_package(name: str, kind: str) -> GeofedError:
    """Return the error for a format whose package is not installed."""
    hint = f"{install_hint('data')}, for the agent and in the image of the functions"
    return GeofedError("CONFIG_INVALID", f"format {kind} needs the package {name}", hint=hint)
