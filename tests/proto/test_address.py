"""Hosts and ports as they are written."""

from __future__ import annotations

import pytest

from geofed_pb.address import bracketed, joined


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("::1", "[::1]"), ("[::1]", "[::1]"), ("fe80::1%eth0", "[fe80::1%eth0]"), ("10.0.0.1", "10.0.0.1"),
        ("host.example", "host.example"), ("", ""),
    ],
)  # fmt: skip
def test_ipv6_stands_in_brackets(host: str, written: str) -> None:
    assert bracketed(host) == written
    assert joined(host, 7443) == f"{written}:7443"


@pytest.mark.parametrize("host", ["10.0.0.1:7443", "[::1]:7443", "a:b", "::g"])
def test_a_host_with_a_port_is_no_host(host: str) -> None:
    with pytest.raises(ValueError, match="neither a name nor an address"):
        bracketed(host)
