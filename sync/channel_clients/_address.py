"""Addresses of stores: URLs whose password is never shown."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from geofed_pb.errors import GeofedError

__all__ = ["Address", "number", "parsed", "whole"]


@dataclass(frozen=True)
class Address:
    """The parts of a store's URL."""

    scheme: str
    host: str | None
    port: int | None
    path: str
    options: dict[str, str]
    """The options after `?`."""
    shown: str
    """The address without user and password, for messages."""
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)


def parsed(text: str, schemes: Collection[str], options: Collection[str]) -> Address:
    """Parse a URL. Raises ``GeofedError("CONFIG_INVALID")``; the message contains neither user nor password."""
    try:
        url = urlsplit(text)
        port = url.port
        given = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    except ValueError:
        raise GeofedError("CONFIG_INVALID", "the channel's address is not a URL", hint=_form(schemes)) from None
    if url.scheme not in schemes:
        raise GeofedError(
            "CONFIG_INVALID", f"the channel's address begins with {url.scheme or 'no scheme'!r}", hint=_form(schemes)
        )
    unknown = sorted({name for name, _ in given} - set(options))
    if unknown:
        text = f"the channel's address has an unknown option: {', '.join(unknown)}"
        raise GeofedError("CONFIG_INVALID", text, hint=f"known: {', '.join(sorted(options))}")
    return Address(
        scheme=url.scheme,
        host=url.hostname,
        port=port,
        path=unquote(url.path),
        options=dict(given),
        shown=_shown(url),
        user=unquote(url.username) if url.username else None,
        password=unquote(url.password) if url.password else None,
    )


def whole(address: Address, name: str, default: int) -> int:
    """Return an option that is an integer above zero. Raises ``GeofedError("CONFIG_INVALID")`` for another value."""
    value = address.options.get(name, str(default))
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise GeofedError("CONFIG_INVALID", f"{name} of the channel's address is {value!r}, not a whole number above 0")
    return int(value)


def number(address: Address, name: str, default: float) -> float:
    """Return an option that is a number above zero. Raises ``GeofedError("CONFIG_INVALID")`` for another value."""
    value = address.options.get(name, str(default))
    try:
        result = float(value)
    except ValueError:
        result = 0.0
    if not 0 < result < float("inf"):
        raise GeofedError("CONFIG_INVALID", f"{name} of the channel's address is {value!r}, not a number above 0")
    return result


def _shown(url: SplitResult) -> str:
    return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def _form(schemes: Collection[str]) -> str:
    return f"it begins with {' or '.join(f'{scheme}://' for scheme in schemes)}"
