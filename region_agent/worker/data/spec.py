"""Format of a dataset whose samples geofed reads itself, as the region file states it and as workers get it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

__all__ = ["FormatSpec", "Stream"]

_MOST_NAMES = 4096
"""Most columns that a format names."""
Name = Annotated[str, Field(min_length=1, max_length=256)]


class FormatSpec(BaseModel):
    """Format of the files. A word alone, such as `parquet`, is its `kind`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, alias_generator=to_camel, populate_by_name=True
    )

    kind: str
    """Kind of the files: `parquet` or `csv`."""
    columns: Annotated[tuple[Name, ...], Field(max_length=_MOST_NAMES)] = ()
    """Columns that jobs get; the others are not read. Default: all."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_word(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class Stream(BaseModel):
    """How a worker reads a split block by block."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: FormatSpec
    index_key: str
    """Channel key of the split's `BlockIndex`."""
