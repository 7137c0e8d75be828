"""Which ports a parameter server is given."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from geofed_pb.errors import GeofedError
from region_agent import doctor
from region_agent.config import RegionConfig
from region_agent.doctor import examine
from region_agent.link.identity import Identity
from region_agent.partition.server.process import free_ports

HOST = "127.0.0.1"
NONE = (0, 0, 0)


@pytest.fixture
def first() -> int:
    """Of four ports in a row that nobody listens on, below those that the system gives out."""
    for port in range(23000, 32000, 4):
        with contextlib.suppress(OSError), _taken(*range(port, port + 4)):
            return port
    raise AssertionError("no four ports are free")


@contextlib.contextmanager
def _taken(*ports: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server((HOST, port)))
        yield


def test_without_a_range_the_system_chooses_and_the_choice_is_kept(first: int) -> None:
    assert free_ports(HOST, None, NONE) == NONE
    kept = (first + 1, first, first + 3)
    assert free_ports(HOST, None, kept) == kept


def test_without_a_range_another_takes_the_place_of_one_that_somebody_has(first: int) -> None:
    """A connection that goes out may have it: the system had chosen it among those that it gives to these."""
    with _taken(first):
        assert free_ports(HOST, None, (first + 1, first, first + 3)) == (first + 1, 0, first + 3)


def test_three_free_ports_of_the_range_are_taken(first: int) -> None:
    with _taken(first + 1):
        assert free_ports(HOST, (first, first + 3), NONE) == (first, first + 2, first + 3)


def test_a_server_keeps_the_ports_that_it_had_though_others_are_free(first: int) -> None:
    kept = (first + 3, first + 2, first + 1)
    assert free_ports(HOST, (first, first + 3), kept) == kept


def test_what_somebody_has_taken_in_the_meantime_is_given_up(first: int) -> None:
    with _taken(first + 2):
        assert free_ports(HOST, (first, first + 3), (first, first + 1, first + 2)) == (first, first + 1, first + 3)
        assert free_ports(HOST, (first, first + 3), (first + 2, first + 3, 0)) == (first, first + 1, first + 3)


def test_two_free_ports_leave_none_for_bulk_streams(first: int) -> None:
    assert free_ports(HOST, (first, first + 1), NONE) == (first, first + 1, None)
    assert free_ports(HOST, (first, first + 1), (first, first + 1, 0)) == (first, first + 1, None)


def test_a_server_that_had_two_gets_a_third_beside_them(first: int) -> None:
    assert free_ports(HOST, (first, first + 3), (first, first + 2, 0)) == (first, first + 2, first + 1)


def test_ports_outside_a_changed_range_are_given_up(first: int) -> None:
    assert free_ports(HOST, (first, first + 2), (1, 2, 3)) == (first, first + 1, first + 2)


def test_one_free_port_is_too_few(first: int) -> None:
    with _taken(first, first + 1, first + 3), pytest.raises(GeofedError) as raised:
        free_ports(HOST, (first, first + 3), NONE)
    assert raised.value.code == "PORT_IN_USE"
    assert f"{first}, {first + 1}, {first + 3} are in use; 1 is free" in raised.value.message


def test_a_port_must_be_free_where_workers_and_where_other_regions_reach_it(first: int) -> None:
    with socket.create_server(("127.0.0.2", first)):
        assert free_ports(HOST, (first, first + 3), NONE)[0] == first
        found = free_ports(HOST, (first, first + 3), NONE, worker_host="127.0.0.2")
        assert found == (first + 1, first + 2, first + 3)


def _region(tmp_path: Path, ports: tuple[int, int]) -> RegionConfig:
    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "server": {"exchangeHost": HOST, "ports": list(ports)},
        }
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _isolation_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start a gateway."""

    async def tried(config: RegionConfig) -> str:
        return "not tried"

    monkeypatch.setattr(doctor, "_isolation", tried)


@pytest.mark.parametrize(
    ("busy", "ok", "says"), [(1, True, "at least three free"), (2, True, "two free"), (3, False, "are in use")]
)
def test_the_doctor_looks_at_the_ports(tmp_path: Path, first: int, busy: int, ok: bool, says: str) -> None:
    with _taken(*range(first, first + busy)):
        findings = asyncio.run(examine(_region(tmp_path, (first, first + 3)), tmp_path))
    (ports,) = [finding for finding in findings if finding.name == "ports"]
    assert (ports.ok, says in ports.text) == (ok, True), ports


@pytest.mark.parametrize(
    ("listen", "advertise", "ok", "says"),
    [
        (HOST, HOST, True, "127.0.0.1:{port} leads to this machine, tried from here"),
        ("0.0.0.0", "127.0.0.3", True, "127.0.0.3:{port} leads to this machine, tried from here"),
        ("127.0.0.2", "127.0.0.3", False, "127.0.0.3:{port} does not lead to this machine: "),
        (HOST, "nowhere.invalid", False, "`advertise` is nowhere.invalid, which has no address: "),
    ],
)
def test_the_doctor_connects_as_other_regions_do(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch, listen: str, advertise: str, ok: bool, says: str
) -> None:
    """Addresses of loopback in the place of those at which other machines reach this one."""
    monkeypatch.setattr(doctor, "_is_own", lambda _: False)
    config = _region(tmp_path, (first, first + 3)).model_copy(update={"advertise": advertise})
    config = config.model_copy(update={"server": config.server.model_copy(update={"exchange_host": listen})})
    (found,) = [one for one in asyncio.run(examine(config, tmp_path)) if one.name == "exchange"]
    assert (found.ok, says.format(port=first + 1) in found.text) == (ok, True), found
    assert ok or found.hint


@pytest.mark.parametrize(("address", "ok"), [("127.0.0.1:7444", True), ("hub.example.com:7444", False)])
def test_an_address_of_this_machine_alone_does_for_a_federation_on_it(
    tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch, address: str, ok: bool
) -> None:
    monkeypatch.setattr(Identity, "joined", True)
    monkeypatch.setattr(Identity, "federation", SimpleNamespace(address=address, region="east"))
    told = doctor._exchange(_region(tmp_path, (first, first + 3)), Identity(tmp_path))
    if ok:
        assert asyncio.run(told) == "127.0.0.1, which only regions on this machine reach"
        return
    with pytest.raises(GeofedError, match="at which regions on other machines do not reach this one") as raised:
        asyncio.run(told)
    assert "region file" in raised.value.hint
