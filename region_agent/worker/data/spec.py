"""Format of a dataset whose samples geofed reads itself, as the region file states it and as workers get it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

__all__ = ["ClientColumn", "FormatSpec", "Stream"]

_MOST_NAMES = 4096
"""Most columns that a format names."""
Name = Annotated[str, Field(min_length=1, max_length=256)]


class ClientColumn(BaseModel):
    """A column that names the client of each sample."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, alias_generator=to_camel, populate_by_name=True
    )

    column: Name
    """Name of the column, of integers, text or dates. Jobs get it only if `columns` does not leave it out."""


class FormatSpec(BaseModel):
    """Format of the files. A word alone, such as `parquet`, is its `kind`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, alias_generator=to_camel, populate_by_name=True
    )

    kind: str
    """Kind of the files: `parquet`, `csv`, `image-folder`, `webdataset`, `jsonl` or `text`."""
    columns: Annotated[tuple[Name, ...], Field(max_length=_MOST_NAMES)] = ()
    """Of `parquet` and `csv`: columns that jobs get; the others are not read. Default: all."""
    types: Annotated[dict[Name, Literal["int64", "float64", "bool", "string"]], Field(max_length=_MOST_NAMES)] = {}
    """Of `csv`: types of columns, where all values of a region would give another one than those of the other regions:
    `int64`, `float64`, `bool` or `string`. Default: found by reading every value."""
    delimiter: Literal[",", ";", "\t", "|"] = ","
    """Of `csv`: character between values: `,`, `;`, `|` or a tabulator, `"\\t"`."""
    classes: Annotated[tuple[Name, ...], Field(max_length=100_000)] = ()
    """Of `image-folder`: the classes, in the order of their labels. Default: the folders by name."""
    size: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Of `image-folder` and `webdataset`: height and width to which images are scaled. Default: their own."""
    sequence: Annotated[int, Field(ge=2, le=1 << 20)] = 512
    """Of `text` and `jsonl`: bytes of text in a sample."""
    field: Name = "text"
    """Of `jsonl`: key of the text in each line's object."""

    clients: Literal["folder"] | ClientColumn | None = None
    """Which client each sample belongs to, for jobs with `clients` (docs/clients.md). `folder`: the first folder of a
    file's path in the split's folder, or a file that lies in none. `{column: NAME}`: of `parquet` and `csv`. Default:
    samples belong to no client."""

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
