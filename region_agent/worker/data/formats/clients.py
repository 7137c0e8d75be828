"""Which client each sample of a split belongs to, as the region file states it by `format.clients`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats import format_of
from region_agent.worker.data.index import BlockIndex
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import ClientColumn, FormatSpec

__all__ = ["MOST_CLIENTS", "clients_of"]

MOST_CLIENTS = 1_000_000
"""Most clients of a split."""
_MOST_SAMPLES = 1 << 25
"""Most samples of a split with clients: their numbers take 128 MiB in the index."""


def clients_of(spec: FormatSpec, sources: Sources, index: BlockIndex) -> npt.NDArray[np.int32] | None:
    """Return the number of each sample's client, shape (samples,), counted from 0 in the order of the samples; None:
    the format states no clients. Reads the column of the clients, of all files.

    Raises ``GeofedError``: SHARD_UNREADABLE for a missing column or value; LIMIT_EXCEEDED.
    """
    if spec.clients is None:
        return None
    if index.total > _MOST_SAMPLES:
        text = f"{index.total:,} samples exceed the limit of {_MOST_SAMPLES:,} for a split with clients"
        raise GeofedError("LIMIT_EXCEEDED", text)
    if isinstance(spec.clients, ClientColumn):
        blocks = _of_column(spec, spec.clients, sources, index)
    else:
        folders = [sources.file(number).name.partition("/")[0] for number in range(len(sources))]
        pairs = zip(index.file.tolist(), index.samples.tolist(), strict=True)
        blocks = ([folders[file]] * samples for file, samples in pairs)
    numbers: dict[Any, int] = {}
    found: list[npt.NDArray[np.int32]] = []
    for block, values in enumerate(blocks):
        if len(values) != int(index.samples[block]):
            raise GeofedError(
                "SHARD_UNREADABLE", f"block {block}: {len(values)} clients for {index.samples[block]} samples"
            )
        found.append(np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int32))
        if len(numbers) > MOST_CLIENTS:
            raise GeofedError("LIMIT_EXCEEDED", f"there are more than {MOST_CLIENTS:,} clients")
    return np.concatenate(found) if found else np.zeros(0, np.int32)


def _of_column(spec: FormatSpec, clients: ClientColumn, sources: Sources, index: BlockIndex) -> Iterator[list[Any]]:
    """Yield the clients of each block's samples."""
    from pyarrow import types

    of_kind, kinds = format_of(spec), {name: kind for name, kind in spec.types.items() if name == clients.column}
    if "types" in of_kind.options:
        # As integers, 007 and 7 would be one client.
        kinds = {clients.column: "string", **kinds}
    alone = FormatSpec(kind=spec.kind, columns=(clients.column,), types=kinds)
    reader = of_kind.reader(alone, sources, of_kind.index(alone, sources))
    for number in range(len(index)):
        column = reader.load(number).column(clients.column)
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        known = (types.is_integer, types.is_string, types.is_large_string, types.is_date32)
        if not any(check(kind) for check in known):
            text = f"column {clients.column!r} has the type {kind}, which names no clients"
            raise GeofedError("SHARD_UNREADABLE", text, hint="use integers, text or dates, none missing")
        values = column.to_pylist()
        if None in values or "" in values:
            name = sources.file(int(index.file[number])).name
            text = f"{name}: a sample has no {clients.column!r}, which names its client"
            raise GeofedError("SHARD_UNREADABLE", text, hint="name the client of each sample")
        yield values
