"""Parquet files, read by row groups."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.tables import TableReader, arrow, checked_schema, chosen, data_files
from region_agent.worker.data.index import Block, BlockIndex
from region_agent.worker.data.sources import RangeFile, Source, Sources, file_faults
from region_agent.worker.data.spec import FormatSpec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ParquetFormat"]

_MOST_GROUP_BYTES = 256 << 20
"""Most bytes of a row group in memory: a worker holds several."""
_VALUE_BYTES = 16
"""Bytes that a value may take in memory however well the file packs it: an offset and an index, or a number."""
_MOST_FOOTER_BYTES = 256 << 20
"""Most bytes of a file's metadata."""
_GROUP_HINT = "write it with smaller row groups, such as row_group_size=10_000 of pyarrow.parquet.write_table"


class ParquetFormat:
    """Parquet. Samples are counted by the files' metadata."""

    kind = "parquet"
    options = ("columns",)

    def index(self, spec: FormatSpec, sources: Sources) -> BlockIndex:
        """Index a split by the row groups; reads the files' metadata only."""
        arrow(self.kind)
        blocks: list[Block] = []
        schema: dict[str, str] = {}
        for number in data_files(sources):
            source = sources[number]
            with file_faults(source.name):
                opened = _opened(source)
                columns = chosen(spec, opened.schema_arrow, source.name)
                schema = checked_schema(schema, columns, source.name)
                blocks += self._groups(opened.metadata, set(columns.names), source)
        return BlockIndex.of(blocks, schema)

    def _groups(self, metadata: Any, columns: set[str], source: Source) -> list[Block]:
        found = []
        for group in range(metadata.num_row_groups):
            told = metadata.row_group(group)
            parts = [told.column(at) for at in range(told.num_columns)]
            parts = [part for part in parts if part.path_in_schema.partition(".")[0] in columns]
            read = sum(part.total_compressed_size for part in parts)
            held = max(sum(part.total_uncompressed_size for part in parts), told.num_rows * len(parts) * _VALUE_BYTES)
            if min(told.num_rows, read, held) < 0 or read > source.size:
                raise GeofedError("SHARD_UNREADABLE", f"{source.name}: row group {group} has impossible sizes")
            if held > _MOST_GROUP_BYTES:
                text = f"{source.name}: row group {group} has {held >> 20:,} MiB of {_MOST_GROUP_BYTES >> 20}"
                raise GeofedError("LIMIT_EXCEEDED", text, hint=_GROUP_HINT)
            found.append(Block(source.number, group, read, told.num_rows, held))
        return found

    def reader(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> _ParquetReader:
        """Return a reader, which reads the metadata of a file with its first row group."""
        arrow(self.kind)
        return _ParquetReader(sources, index)


def _opened(source: Source, metadata: Any = None, strings: list[str] | None = None) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    if metadata is None:
        tail = source.read(max(0, source.size - 8), min(8, source.size))
        if tail[4:] != b"PAR1" or int.from_bytes(tail[:4], "little") > min(_MOST_FOOTER_BYTES, source.size):
            raise GeofedError("SHARD_UNREADABLE", f"{source.name}: not a Parquet file, or one that is cut off")
    file = pa.PythonFile(RangeFile(source), mode="r")
    # Strings stay encoded by the file's dictionary, so that few bytes cannot become many.
    return parquet.ParquetFile(file, metadata=metadata, pre_buffer=True, read_dictionary=strings or [])


class _ParquetReader(TableReader):
    def __init__(self, sources: Sources, index: BlockIndex) -> None:
        self._sources, self._index = sources, index
        self._strings = [name for name, kind in index.schema.items() if "string" in kind or "binary" in kind]
        self._metadata: dict[int, Any] = {}
        self._lock = threading.Lock()

    def load(self, number: int) -> pa.Table:
        """Read a row group."""
        block = self._index.block(number)
        source = self._sources[block.file]
        with file_faults(source.name):
            with self._lock:
                if block.file not in self._metadata:
                    if len(self._metadata) > 256:
                        self._metadata.clear()
                    self._metadata[block.file] = _opened(source).metadata
                metadata = self._metadata[block.file]
            opened = _opened(source, metadata, self._strings)
            table = opened.read_row_group(block.offset, columns=list(self._index.schema), use_threads=False)
            for column in table.column_names:
                table = _without_nulls(table, column, f"{source.name}: row group {block.offset}")
            if table.num_rows != block.samples:
                raise GeofedError("SHARD_UNREADABLE", f"{source.name}: row group {block.offset} has other rows")
            return table


def _without_nulls(table: pa.Table, name: str, where: str) -> pa.Table:
    """Replace missing floating-point numbers by NaN. Raises ``GeofedError("SHARD_UNREADABLE")`` for other types."""
    import math

    from pyarrow import types

    column = table.column(name)
    listed = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    if not column.null_count and not (listed and sum(part.flatten().null_count for part in column.chunks)):
        return table
    if not types.is_floating(column.type):
        text = f"{where}: values of column {name!r} are null"
        raise GeofedError("SHARD_UNREADABLE", text, hint="fill them, or leave the column out by `format.columns`")
    return table.set_column(table.column_names.index(name), name, column.fill_null(math.nan))
