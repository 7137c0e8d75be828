"""Where a region lets another one's word make it connect to."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

from geofed_pb.errors import GeofedError
from region_agent.config import RegionConfig
from region_agent.link.networks import allowed, resolved


@pytest.mark.parametrize(
    ("address", "seen", "taken"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "", True),
        ("::1", "127.0.0.1", True),
        ("10.4.0.7", "10.9.1.2", True),
        ("192.168.3.4", "10.9.1.2", True),
        ("100.64.1.1", "10.9.1.2", True),
        ("fd00::7", "fd00::8", True),
        ("::ffff:10.4.0.7", "10.9.1.2", True),
        ("203.0.113.7", "203.0.113.7", True),
        ("8.8.4.4", "8.8.4.4", True),
        ("2600::7", "2600::7", True),
        ("8.8.4.4", "8.8.8.8", False),
        ("10.4.0.7", "8.8.8.8", False),
        ("127.0.0.1", "8.8.8.8", False),
        ("::ffff:127.0.0.1", "8.8.8.8", False),
        ("8.8.8.8", "10.4.0.7", False),
        ("8.8.8.8", "", False),
        ("169.254.169.254", "127.0.0.1", False),
        ("169.254.169.254", "10.9.1.2", False),
        ("fe80::1", "fd00::8", False),
        ("0.0.0.0", "127.0.0.1", False),
        ("224.0.0.1", "10.9.1.2", False),
    ],
)
def test_without_a_setting_a_region_points_at_itself_or_within_one_network(
    address: str, seen: str, taken: bool
) -> None:
    assert allowed(ip_address(address), seen, None) is taken


@pytest.mark.parametrize(
    ("address", "taken"), [("203.0.113.9", True), ("203.0.114.9", False), ("127.0.0.1", False), ("2001:db8::1", True)]
)
def test_the_networks_of_the_file_are_all_there_is(address: str, taken: bool) -> None:
    assert allowed(ip_address(address), "127.0.0.1", ("203.0.113.0/24", "2001:db8::/32")) is taken


def test_a_name_becomes_an_address_that_is_allowed() -> None:
    assert asyncio.run(resolved("127.0.0.1:9000", "b", "127.0.0.1", None)) == "127.0.0.1:9000"
    assert asyncio.run(resolved("[::1]:9000", "b", "127.0.0.1", None)) == "[::1]:9000"
    assert asyncio.run(resolved("localhost:9000", "b", "127.0.0.1", None)).endswith(":9000")


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("169.254.169.254:80", "CONFIG_INVALID"),
        ("localhost:80", "CONFIG_INVALID"),
        ("127.0.0.1", "CONFIG_INVALID"),
        ("127.0.0.1:99999", "CONFIG_INVALID"),
        (":80", "CONFIG_INVALID"),
        ("no-such-host.invalid:80", "UNAVAILABLE"),
    ],
)
def test_another_address_is_refused_by_name(address: str, code: str) -> None:
    with pytest.raises(GeofedError, match="region b") as caught:
        asyncio.run(resolved(address, "b", "8.8.8.8", None))
    assert caught.value.code == code


def test_the_setting_is_checked_when_the_file_is_read() -> None:
    facts = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "a"}, "cloud": "test",
        "capacity": {"workers": 1}, "policy": {"peerNetworks": ["10.0.0.0/8"]},
    }  # fmt: skip
    assert RegionConfig.model_validate(facts).policy.peer_networks == ("10.0.0.0/8",)
    with pytest.raises(ValueError, match="peerNetworks"):
        RegionConfig.model_validate(facts | {"policy": {"peerNetworks": ["10.0.0.1/8"]}})
