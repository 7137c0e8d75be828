"""What the sections of the job file have in common."""

from __future__ import annotations

from pydantic import (
    BaseModel,
    ConfigDict,
)
from pydantic.alias_generators import to_camel

__all__ = ["STORED", "Section"]

STORED = {"stored": True}
"""Validation context of a stored job, which an earlier version has admitted."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )
