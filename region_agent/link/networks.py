"""Which addresses this region connects to: the address of another region is that region's word, and a connection to it
would tell what answers there."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from geofed_pb.address import joined
from geofed_pb.errors import GeofedError

__all__ = ["allowed", "resolved"]

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Addresses behind a provider's NAT, which VPNs between clouds use as well."""


def allowed(address: _Address, seen: str, networks: Sequence[str] | None) -> bool:
    """Whether another region's servers may be connected to at an address.

    ``networks``: `policy.peerNetworks` of the region file. Without it the address must be the one that the region's own
    agent connects from, as the control plane has ``seen`` it; or both are private or of the loopback interface. So
    regions in one network need no setting, a region on the Internet cannot point into this region's network, and
    nobody can point to link-local addresses, at which clouds serve the machine's credentials.
    """
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if networks is not None:
        return any(address in ipaddress.ip_network(network) for network in networks)
    if not seen:
        # An older control plane does not tell it.
        return _is_inside(address)
    origin = ipaddress.ip_address(seen)
    return address == origin or (_is_inside(address) and _is_inside(origin))


def _is_inside(address: _Address) -> bool:
    """Whether an address is private or of the loopback interface."""
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    return address.is_private or (address.version == 4 and address in _SHARED)


async def resolved(address: str, region: str, seen: str, networks: Sequence[str] | None) -> str:
    """Return the host:port of another region's server with the host as an IP address that may be connected to.

    Raises ``GeofedError``: CONFIG_INVALID if there is none, or the address is invalid; UNAVAILABLE if the name cannot
    be resolved now.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise GeofedError("CONFIG_INVALID", f"region {region} gives {address!r} as its address")
    for found in await _addresses(host, region):
        if allowed(found, seen, networks):
            return joined(str(found), int(port))
    hint = f"if that is right, add its network to policy.peerNetworks in this region's file: it connects from {seen}"
    text = f"region {region} gives {address} as its address, which this region's policy.peerNetworks does not allow"
    raise GeofedError("CONFIG_INVALID", text, hint=hint if seen else None)


async def _addresses(host: str, region: str) -> list[_Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise GeofedError("UNAVAILABLE", f"the host name of region {region} cannot be resolved: {host}") from None
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
