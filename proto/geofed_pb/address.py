"""Addresses as they are written: host:port, where an IPv6 host stands in brackets."""

from __future__ import annotations

import ipaddress

__all__ = ["bracketed", "joined"]


def bracketed(host: str) -> str:
    """A host as it stands before a colon and a port: ``[::1]`` for ``::1``, all others as they are.

    Raises ``ValueError`` where it has a colon and is no IPv6 address.
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
    """``host:port``; raises ``ValueError`` as `bracketed` does."""
    return f"{bracketed(host)}:{port}"
