"""Types of single values in the job file: their checks, their errors, and what the JSON Schema says of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from control_plane._durations import format_duration, parse_duration, parse_moment

BELOW = 1 << 31
"""Integers must be smaller, so that they fit the protocol's messages."""
TRACKING_KINDS = ("csv", "jsonl", "tensorboard", "mlflow", "wandb", "otlp")
"""Kinds of places that metrics are written to (`control_plane.tracking`)."""
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
"""Years of valid deadlines, which every system can represent in any time zone."""
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
_COUNT_SCHEMA = {"type": "integer", "minimum": 1, "exclusiveMaximum": BELOW}


def _auto_or_count(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < BELOW:
        return value
    raise ValueError("must be `auto` or a positive integer")


def _auto_or_number(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < BELOW:
        return value
    raise ValueError("must be `auto` or an integer that is not negative")


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a duration like 30s, 10m or 1h30m")
    return parse_duration(value)


def _workers(value: Any) -> Any:
    counts = list(value.values()) if isinstance(value, dict) else [value]
    for count in counts:
        if count == "auto" and not isinstance(value, dict):
            continue
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < BELOW:
            raise ValueError("must be `auto`, a positive integer, or positive integers by region, like {frankfurt: 4}")
    return value


def _deadline(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value[:1].isdigit() and "-" not in value:
        parse_duration(value)
        return value
    moment = parse_moment(value, "2h", "2030-01-31T18:00:00Z")
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise ValueError(f"{value!r} is not between the years {_FIRST_YEAR} and {_LAST_YEAR}")
    return value


class OneOf:
    """Annotation of a key with one of the given values, like `Literal` for values known only at run time."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self._names))


AutoOrCount = Annotated[
    int | Literal["auto"],
    PlainValidator(_auto_or_count),
    WithJsonSchema({"anyOf": [{"const": "auto"}, _COUNT_SCHEMA]}),
]
AutoOrNumber = Annotated[
    int | Literal["auto"],
    PlainValidator(_auto_or_number),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {**_COUNT_SCHEMA, "minimum": 0}]}),
]
Workers = Annotated[
    int | Literal["auto"] | dict[str, int],
    PlainValidator(_workers),
    WithJsonSchema(
        {"anyOf": [{"const": "auto"}, _COUNT_SCHEMA, {"type": "object", "additionalProperties": _COUNT_SCHEMA}]}
    ),
]
Duration = Annotated[
    timedelta,
    PlainValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["30s", "10m", "1h30m"]}),
]
Deadline = Annotated[
    str,
    BeforeValidator(_deadline),
    WithJsonSchema({"type": "string", "examples": ["2h", "2030-01-31T18:00:00Z"]}),
]
"""A duration from the submission, or a time with a time zone."""
Name = Annotated[str, Field(pattern=_LABEL)]
"""A DNS label."""
