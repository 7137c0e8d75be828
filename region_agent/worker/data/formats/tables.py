"""Samples of tables: a sample is a dict of its columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.contract import missing_package
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["TableReader", "arrow", "checked_schema", "chosen", "data_files"]

_COLUMNS = 4096
"""Most columns of a file that jobs get."""


def arrow(kind: str) -> Any:
    """Import pyarrow. Raises ``GeofedError("CONFIG_INVALID")`` if it is not installed."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise missing_package("pyarrow", kind) from None
    return pyarrow


def data_files(sources: Sources) -> list[int]:
    """Return the numbers of the files that have data: not those that begin with "_" or ".", as systems write beside it.

    Raises ``GeofedError("SHARD_UNREADABLE")`` if there are none.
    """
    found = []
    for number in range(len(sources)):
        if not any(part.startswith(("_", ".")) for part in sources.file(number).name.split("/")):
            found.append(number)
    if not found:
        raise GeofedError("SHARD_UNREADABLE", "there is no file whose name does not begin with _ or .")
    return found


def chosen(spec: FormatSpec, schema: pa.Schema, name: str) -> pa.Schema:
    """Return the columns that jobs get. Raises ``GeofedError("SHARD_UNREADABLE")`` for an unknown one."""
    import pyarrow as pa

    doubled = {one for one in schema.names if schema.names.count(one) > 1} if len(schema) <= _COLUMNS else set()
    if len(schema) > _COLUMNS and not spec.columns:
        text = f"{name}: {len(schema):,} columns exceed {_COLUMNS:,}"
        raise GeofedError("LIMIT_EXCEEDED", text, hint="state `format.columns` in the region's file")
    for column in spec.columns or schema.names:
        if column not in schema.names:
            text = f"{name} has no column {column!r}, only {', '.join(schema.names[:20])}"
            raise GeofedError("SHARD_UNREADABLE", text, hint="correct `format.columns` in the region's file")
        if column in doubled:
            raise GeofedError("SHARD_UNREADABLE", f"{name} has two columns {column!r}")
    found = pa.schema([schema.field(column) for column in spec.columns or schema.names])
    for field in found:
        if not _known(field.type):
            text = f"{name}: column {field.name!r} has the type {field.type}, which no tensor can hold"
            raise GeofedError("SHARD_UNREADABLE", text, hint="leave it out by `format.columns` in the region's file")
    return found


def checked_schema(before: dict[str, str], schema: pa.Schema, name: str) -> dict[str, str]:
    """Return a file's schema; raises ``GeofedError("SHARD_UNREADABLE")`` if an earlier file has another one."""
    found = {field.name: str(field.type) for field in schema}
    for column in {**before, **found} if before else ():
        if before.get(column) != found.get(column):
            text = f"{name}: column {column!r} is {found.get(column, 'missing')}, and {before.get(column, 'missing')} "
            raise GeofedError("SHARD_UNREADABLE", f"{text}in the files before it")
    return found


def _known(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
        return bool(types.is_integer(kind) or types.is_floating(kind))
    plain = (types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string)
    return any(check(kind) for check in (*plain, types.is_binary, types.is_large_binary, types.is_date32))


class TableReader:
    """Takes samples out of Arrow tables."""

    def samples(self, blocks: Sequence[pa.Table], places: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
        """Return samples: a dict of tensors, strings and bytes for each."""
        columns = self.batch(blocks, places, stack=False)
        return [{name: column[at] for name, column in columns.items()} for at in range(len(places))]

    def batch(
        self, blocks: Sequence[pa.Table], places: Sequence[tuple[int, int]], *, stack: bool = True
    ) -> dict[str, Any]:
        """Return columns of the samples: tensors of shape (n, ...), and lists of strings and bytes.

        ``stack``: raise ``GeofedError("TASK_INVALID")`` for lists of different lengths, which make no tensor.
        """
        import pyarrow as pa

        wanted: dict[int, list[int]] = {}
        order: list[tuple[int, int]] = []
        for block, place in places:
            order.append((block, len(wanted.setdefault(block, []))))
            wanted[block].append(place)
        starts, taken, at = {}, [], 0
        for block, inside in wanted.items():
            starts[block] = at
            at += len(inside)
            taken.append(blocks[block].take(pa.array(inside, pa.int64())))
        rows = pa.concat_tables(taken).take(pa.array([starts[block] + nth for block, nth in order], pa.int64()))
        return {name: _values(rows.column(name), name, stack) for name in rows.column_names}


def _values(column: pa.ChunkedArray, name: str, stack: bool) -> Any:
    import pyarrow as pa
    import torch
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        wanted = np.float32 if types.is_floating(kind.value_type) else None
        lists = [torch.from_numpy(np.array(one.values, dtype=wanted)) for one in column]
        if not stack:
            return lists
        if len({len(one) for one in lists}) > 1:
            text = f"the lists of column {name!r} have different lengths"
            raise GeofedError("TASK_INVALID", text, hint="define collate(samples), which pads or cuts them")
        return torch.stack(lists)
    if types.is_date32(kind):
        column = column.cast(pa.int32())
    if types.is_integer(kind) or types.is_floating(kind):
        # torch's own types for numbers: what a model computes with.
        plain, numbers = np.float32 if types.is_floating(kind) else np.int64, column.to_numpy()
        if types.is_uint64(kind) and numbers.max(initial=0) > np.iinfo(np.int64).max:
            text = f"values of column {name!r} are larger than int64 can hold"
            raise GeofedError("SHARD_UNREADABLE", text, hint="leave it out by `format.columns` in the region's file")
        return torch.from_numpy(numbers.astype(plain))
    if types.is_boolean(kind):
        return torch.from_numpy(column.to_numpy().astype(np.bool_))
    return column.to_pylist()
