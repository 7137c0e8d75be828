"""Formats of files whose samples geofed reads itself, one module each."""

from __future__ import annotations

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats.contract import FileFormat
from region_agent.worker.data.formats.csv import CsvFormat
from region_agent.worker.data.formats.image_folder import ImageFolderFormat
from region_agent.worker.data.formats.parquet import ParquetFormat
from region_agent.worker.data.formats.text import JsonLinesFormat, TextFormat
from region_agent.worker.data.formats.webdataset import WebDatasetFormat
from region_agent.worker.data.spec import ClientColumn, FormatSpec

__all__ = ["FORMATS", "check_format", "format_of"]

_ALL: tuple[FileFormat, ...] = (
    CsvFormat(), ImageFolderFormat(), JsonLinesFormat(), ParquetFormat(), TextFormat(), WebDatasetFormat()
)  # fmt: skip
FORMATS: dict[str, FileFormat] = {one.kind: one for one in _ALL}
"""All formats by name."""


def format_of(spec: FormatSpec) -> FileFormat:
    """Return a format. Raises ``GeofedError("CONFIG_INVALID")`` if it is not known here."""
    if spec.kind not in FORMATS:
        text = f"unknown format {spec.kind!r}"
        raise GeofedError("CONFIG_INVALID", text, hint="the region that has stated it is newer: update this agent")
    return FORMATS[spec.kind]


def check_format(spec: FormatSpec) -> FormatSpec:
    """Return a valid specification. Raises ``ValueError``."""
    if spec.kind not in FORMATS:
        raise ValueError(f"{spec.kind!r} is not one of {', '.join(sorted(FORMATS))}")
    for option in sorted(spec.model_fields_set - {"kind", "clients", *FORMATS[spec.kind].options}):
        raise ValueError(f"{option!r} has no meaning for {spec.kind}")
    if isinstance(spec.clients, ClientColumn) and "columns" not in FORMATS[spec.kind].options:
        raise ValueError(f"{spec.kind} has no columns: state `clients: folder`")
    return spec
