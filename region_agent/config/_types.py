"""Types of values in several sections of the region file."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from pydantic import AfterValidator, Field, Strict

from geofed_pb.address import bracketed

Int = Annotated[int, Strict()]
"""A whole number. What is quoted is text, and `true` is no number."""
Float = Annotated[float, Strict()]
"""A number. What is quoted is text, and `true` is no number."""
Positive = Annotated[Float, Field(gt=0)]
NotNegative = Annotated[Float, Field(ge=0)]
Port = Annotated[Int, Field(ge=1, le=65535)]
RegionName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
RoleName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Host = Annotated[str, AfterValidator(bracketed)]
"""Host name or address, with an IPv6 address in brackets, as before a port."""


def _date(text: str) -> str:
    try:
        date.fromisoformat(text if len(text) > len("2026-01") else f"{text}-01")
    except ValueError:
        raise ValueError(f"{text!r} is not a date") from None
    return text


DateText = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}(-[0-9]{2})?$"), AfterValidator(_date)]
"""A day or a month: YYYY-MM-DD or YYYY-MM."""
