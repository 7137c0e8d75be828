"""Formats and splits addresses like host:port, with an IPv6 host in brackets."""

from __future__ import annotations

import ipaddress

__all__ = ["addresses_of", "bracketed", "joined", "split"]


def bracketed(host: str) -> str:
    """Return a host as it is written before a colon and a port: ``[::1]`` for ``::1``, others unchanged.

    Raises ``ValueError`` if it contains a colon and is not an IPv6 address.
    """
    bare = host.removeprefix("[").removesuffix("]")
    if ":" not in bare:
        return host
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        raise ValueError(f"{host!r} is neither a name nor an address; a port is not part of it") from None
    return f"[{bare}]"


def joined(host: str, port: int) -> str:
    """Return ``host:port``; raises ``ValueError`` as `bracketed` does."""
    return f"{bracketed(host)}:{port}"


def addresses_of(text: str) -> tuple[str, ...]:
    """Return the addresses of the control planes of a federation, which are separated by commas."""
    return tuple(address for part in text.split(",") if (address := part.strip()))


def split(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port of ``host:port``; raises ``ValueError`` if it is none."""
    host, _, port = address.rpartition(":")
    bare = bracketed(host).strip("[]")
    if not bare or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{address!r} is not host:port")
    return bare, int(port)
