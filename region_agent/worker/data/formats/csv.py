"""CSV files, read in blocks of lines."""

from __future__ import annotations

import io
import json
import math
import threading
from typing import TYPE_CHECKING, Any

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.lines import line_blocks
from region_agent.worker.data.formats.tables import TableReader, arrow, checked_schema, chosen, data_files
from region_agent.worker.data.index import Block, BlockIndex
from region_agent.worker.data.sources import Source, Sources, file_faults
from region_agent.worker.data.spec import ClientColumn, FormatSpec

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["CsvFormat"]

_HEADER_BYTES, _MOST_HEADER_BYTES = 16 << 10, 1 << 20
"""Bytes that are read at a time for the first line, and at most."""


class CsvFormat:
    """CSV with a line of names first. Samples are counted, and types found, by reading every line once."""

    kind = "csv"
    options = ("columns", "types", "delimiter")

    def index(self, spec: FormatSpec, sources: Sources) -> BlockIndex:
        """Index a split in blocks of lines, and check all of them."""
        pa = arrow(self.kind)
        blocks: list[Block] = []
        found: dict[str, str] = {}
        # The type of the clients' column counts where jobs do not get it, too: it is read apart.
        apart = spec.clients.column if isinstance(spec.clients, ClientColumn) and spec.columns else None
        types = {name: kind for name, kind in spec.types.items() if name != apart or name in spec.columns}
        stated = {name: pa.type_for_alias(kind) for name, kind in types.items()}
        names: list[str] = []
        for number in data_files(sources):
            source = sources[number]
            with file_faults(source.name):
                header, begin = _header(source, spec.delimiter)
                if names and header != names:
                    raise GeofedError("SHARD_UNREADABLE", f"{source.name}: other columns than in the files before it")
                names = header
                for at, content in line_blocks(source, begin, quotes=True):
                    where = f"{source.name}, byte {at:,}"
                    table = _parsed(content, names, list(spec.columns) or names, stated, where, spec.delimiter)
                    _check_closed(content, names, table.num_rows, where, spec.delimiter)
                    for name in stated:
                        _check_complete(table, name, where)
                    found = _widened(found, table)
                    blocks.append(Block(number, at, len(content), table.num_rows, max(table.nbytes, len(content))))
        # A column that is empty everywhere has no type of its own.
        kinds = {name: found.get(name, "null").replace("null", "float64") for name in spec.columns or names}
        kinds |= types
        schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in kinds.items()])
        return BlockIndex.of(blocks, checked_schema({}, chosen(spec, schema, "the split"), "the split"))

    def reader(self, spec: FormatSpec, sources: Sources, index: BlockIndex) -> _CsvReader:
        """Return a reader."""
        arrow(self.kind)
        return _CsvReader(sources, index, spec.delimiter)


def _header(source: Source, delimiter: str) -> tuple[list[str], int]:
    """Return the names of the columns, and where the lines after them begin."""
    from pyarrow import csv

    content = b""
    while b"\n" not in content and len(content) < min(_MOST_HEADER_BYTES, source.size):
        content += source.read(len(content), min(_HEADER_BYTES, source.size - len(content)))
    end = content.find(b"\n") + 1 or len(content)
    if not content[:end].strip() or len(content) >= end > _MOST_HEADER_BYTES:
        raise GeofedError("SHARD_UNREADABLE", f"{source.name}: the first line has no names of columns")
    first = content[:end].removeprefix(b"\xef\xbb\xbf")
    names = list(csv.read_csv(io.BytesIO(first), parse_options=csv.ParseOptions(delimiter=delimiter)).column_names)
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
        raise GeofedError("SHARD_UNREADABLE", f"{source.name}: two columns are called {twice!r}", hint="rename one")
    other = next((mark for mark in (";", "\t", "|", ",") if len(names) == 1 and mark in names[0]), None)
    if other is not None:
        text = f"{source.name}: the first line has one name only, {names[0][:60]!r}"
        hint = f"state what is between the values: `format: {{kind: csv, delimiter: {json.dumps(other)}}}`"
        raise GeofedError("SHARD_UNREADABLE", text, hint=hint)
    return names, end


def _parsed(content: bytes, names: list[str], columns: list[str], types: Any, where: str, delimiter: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv

    for column in columns:
        if column not in names:
            text = f"{where.partition(',')[0]} has no column {column!r}, only {', '.join(names[:20])}"
            raise GeofedError("SHARD_UNREADABLE", text, hint="correct `format.columns` in the region's file")
    try:
        return csv.read_csv(
            io.BytesIO(content),
            csv.ReadOptions(use_threads=False, block_size=len(content) + 1, column_names=names),
            csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            csv.ConvertOptions(include_columns=columns, column_types=types, timestamp_parsers=[]),
        )
    except pa.ArrowInvalid as error:
        raise GeofedError("SHARD_UNREADABLE", f"{where}: {error}"[:400], hint="correct the line") from None


def _check_closed(content: bytes, names: list[str], rows: int, where: str, delimiter: str) -> None:
    """Raise ``GeofedError("SHARD_UNREADABLE")`` if a quotation mark is open at a block's end: what follows it, up to
    there, would be one value."""
    if b'"' not in content:
        return
    import pyarrow as pa

    one_more = content + (b"" if content.endswith(b"\n") else b"\n") + delimiter.join("0" * len(names)).encode()
    try:
        closed = _parsed(one_more, names, names, dict.fromkeys(names, pa.string()), where, delimiter).num_rows > rows
    except GeofedError:
        closed = False
    if not closed:
        hint = "close it; one within a value is written twice, and the value between two"
        raise GeofedError("SHARD_UNREADABLE", f"{where}: a quotation mark is not closed", hint=hint)


def _check_complete(table: pa.Table, name: str, where: str) -> None:
    """Raise ``GeofedError("SHARD_UNREADABLE")`` if a column of a stated type has missing values, and the type none."""
    from pyarrow import types

    if name not in table.column_names:
        text = f"{where.partition(',')[0]} has no column {name!r} of those that jobs get"
        raise GeofedError("SHARD_UNREADABLE", text, hint="correct `format.types` in the region's file")
    column = table.column(name)
    if column.null_count and not (types.is_floating(column.type) or types.is_string(column.type)):
        text = f"{where}: values of column {name!r} are missing, which {column.type} cannot hold"
        raise GeofedError("SHARD_UNREADABLE", text, hint="state float64 in `format.types`, or fill them")


def _widened(found: dict[str, str], table: pa.Table) -> dict[str, str]:
    """Return types that hold all values so far: int64, float64, bool or string, and float64 where some are missing."""
    from pyarrow import types

    widened = dict(found)
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if types.is_null(kind):
            here = "null"
        elif types.is_integer(kind) or types.is_floating(kind):
            here = "int64" if types.is_integer(kind) and not column.null_count else "float64"
        else:
            here = "bool" if types.is_boolean(kind) and not column.null_count else "string"
        pair = {widened.get(name, here), here}
        if len(pair) > 1:
            here = "float64" if pair <= {"int64", "float64", "null"} else "string"
        widened[name] = here
    return widened


class _CsvReader(TableReader):
    def __init__(self, sources: Sources, index: BlockIndex, delimiter: str) -> None:
        self._sources, self._index, self._delimiter = sources, index, delimiter
        self._names: dict[int, list[str]] = {}
        self._lock = threading.Lock()

    def load(self, number: int) -> pa.Table:
        """Read a block of lines."""
        import pyarrow as pa

        block = self._index.block(number)
        source = self._sources[block.file]
        with file_faults(source.name):
            with self._lock:
                if block.file not in self._names:
                    self._names[block.file] = _header(source, self._delimiter)[0]
            types = {name: pa.type_for_alias(kind) for name, kind in self._index.schema.items()}
            content = source.read(block.offset, block.length)
            where = f"{source.name}, byte {block.offset:,}"
            table = _parsed(content, self._names[block.file], list(self._index.schema), types, where, self._delimiter)
            if table.num_rows != block.samples:
                raise GeofedError("SHARD_UNREADABLE", f"{where}: other lines than when the job began")
        for at, name in enumerate(table.column_names):
            if table.column(name).null_count:
                filled = table.column(name).fill_null(math.nan if types[name] == pa.float64() else "")
                table = table.set_column(at, name, filled)
        return table
