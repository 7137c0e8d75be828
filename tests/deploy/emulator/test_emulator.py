from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile, load_profile
from deploy.emulator._calibration import ping, transfer_udp
from geofed_pb.errors import GeofedError

pytestmark = [pytest.mark.netns, pytest.mark.usefixtures("emulator_works")]

Build = Callable[[EmulatedLink], WanProfile]
AB = ("a", "b")


@pytest.fixture(scope="module")
def wan(emulator_works: None, two_regions: Build) -> Iterator[Emulator]:
    with Emulator(two_regions(EmulatedLink(delay_ms=10))) as emulator:
        yield emulator


@pytest.fixture(autouse=True)
def plain_links(wan: Emulator) -> Iterator[None]:
    yield
    wan.heal()
    wan.set_link("a", "b", both=True, rate_mbps=None, delay_ms=10, jitter_ms=0, loss=0)


def undisturbed_rtt(emulator: Emulator, pair: tuple[str, str] = AB) -> float:
    """The second shortest of some: busy cores delay packets, and never hasten them."""
    return float(sorted(ping(emulator, pair, count=11, interval_s=0.01)["rtts_ms"])[1])


def test_sites_and_backend(wan: Emulator) -> None:
    assert wan.backend in ("netem", "hold")
    assert wan.sites == (CONTROL, "a", "b")
    assert len({wan.address(site) for site in wan.sites}) == 3


def test_every_site_has_loopback_and_its_own_address(wan: Emulator) -> None:
    for site in wan.sites:
        shown = wan.run(site, ["ip", "-br", "addr"], capture_output=True, text=True, check=True).stdout
        assert "127.0.0.1/8" in shown
        assert wan.address(site) in shown


def test_round_trip_and_unshaped_control_links(wan: Emulator) -> None:
    assert undisturbed_rtt(wan) == pytest.approx(20, abs=2)
    assert undisturbed_rtt(wan, (CONTROL, "a")) < 2


def test_tcp_connects_in_one_true_round_trip(wan: Emulator) -> None:
    wan.set_link("a", "b", delay_ms=40)
    listener = "import socket, time; s=socket.create_server(('0.0.0.0', 7)); print(1, flush=True); time.sleep(60)"
    server = wan.popen("b", [sys.executable, "-S", "-c", listener], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    dial = (
        "import socket, sys, time\n"
        "for _ in range(5):\n"
        "    t = time.perf_counter()\n"
        "    socket.create_connection((sys.argv[1], 7)).close()\n"
        "    print(time.perf_counter() - t)\n"
    )
    argv = [sys.executable, "-S", "-c", dial, wan.address("b")]
    took = wan.run("a", argv, capture_output=True, text=True, check=True).stdout
    server.kill()
    server.communicate()
    assert min(map(float, took.split())) * 1000 == pytest.approx(50, abs=3)


def test_directions_differ(wan: Emulator) -> None:
    wan.set_link("a", "b", rate_mbps=8)
    wan.set_link("b", "a", rate_mbps=32)
    there = transfer_udp(wan, ("a", "b"), 12, 0.5, 0.2)["mbps"]
    back = transfer_udp(wan, ("b", "a"), 48, 0.5, 0.2)["mbps"]
    assert there == pytest.approx(8, rel=0.08)
    assert back == pytest.approx(32, rel=0.08)


def test_meters_count_every_byte_of_a_direction(wan: Emulator) -> None:
    before = wan.bytes()
    ping(wan, AB, count=10, interval_s=0.002)
    after = wan.bytes()
    packet = 20 + 8 + 32
    assert after["a", "b"] - before["a", "b"] == 10 * packet
    assert after["b", "a"] - before["b", "a"] == 10 * packet
    assert after["a", CONTROL] == before["a", CONTROL]


def test_set_reaches_the_live_link(wan: Emulator) -> None:
    wan.set_link("a", "b", both=True, delay_ms=30)
    assert undisturbed_rtt(wan) == pytest.approx(60, abs=2)
    wan.set_link("a", "b", both=True, delay_ms=0)
    assert undisturbed_rtt(wan) < 2
    row = next(row for row in wan.status()["links"] if (row["src"], row["dst"]) == AB)
    assert row["delay_ms"] == 0


def test_total_loss_and_back(wan: Emulator) -> None:
    wan.set_link("a", "b", loss=1)
    assert ping(wan, AB, count=3, interval_s=0.001)["rtts_ms"] == []
    wan.set_link("a", "b", loss=0)
    assert undisturbed_rtt(wan) == pytest.approx(20, abs=2)


def test_partition_is_silent_and_heals(wan: Emulator) -> None:
    wan.partition("a", "b")
    assert ping(wan, AB, count=2, interval_s=0.001)["rtts_ms"] == []
    assert undisturbed_rtt(wan, (CONTROL, "a")) < 2
    wan.partition("a")
    assert ping(wan, (CONTROL, "a"), count=2, interval_s=0.001)["rtts_ms"] == []
    assert sum(row["cut"] for row in wan.status()["links"]) == 4
    wan.heal()
    assert undisturbed_rtt(wan) == pytest.approx(20, abs=2)


def test_one_direction_can_be_cut(wan: Emulator) -> None:
    wan.cut("a", "b")
    assert [(r["src"], r["dst"]) for r in wan.status()["links"] if r["cut"]] == [AB]


def test_unknown_sites_and_bad_shapes_are_errors(wan: Emulator) -> None:
    with pytest.raises(GeofedError, match="no site 'x'"):
        wan.set_link("a", "x", loss=0)
    with pytest.raises(GeofedError, match="no site 'x'"):
        wan.popen("x", ["true"])
    with pytest.raises(GeofedError, match="to itself"):
        wan.set_link("a", "a", loss=0)
    with pytest.raises(GeofedError, match="jitter_ms"):
        wan.set_link("a", "b", jitter_ms=11)
    with pytest.raises(GeofedError, match="no site 'x'"):
        wan.partition("a", "x")


def test_kill_of_the_popen_kills_the_command(wan: Emulator) -> None:
    process = wan.popen("a", ["sleep", "60"])
    deadline = time.monotonic() + 5
    while Path(f"/proc/{process.pid}/comm").read_text().strip() != "sleep" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep"
    process.kill()
    assert process.wait(5) == -signal.SIGKILL


@pytest.mark.usefixtures("no_leaks")
def test_down_ends_what_runs_inside(tmp_path: Path) -> None:
    with Emulator(load_profile("lan"), state_dir=tmp_path) as emulator:
        process = emulator.popen("red", ["sleep", "60"])
        time.sleep(0.1)
    assert process.wait(5) == -signal.SIGTERM
    assert {path.name for path in tmp_path.iterdir()} == {"lock", "emulator.log"}
    emulator.down()
    with pytest.raises(GeofedError, match="EMULATOR_OFF"):
        emulator.status()


@pytest.mark.usefixtures("no_leaks")
def test_two_emulators_live_side_by_side(two_regions: Build, tmp_path: Path) -> None:
    with (
        Emulator(two_regions(EmulatedLink(delay_ms=5)), state_dir=tmp_path / "1") as one,
        Emulator(two_regions(EmulatedLink(delay_ms=20)), state_dir=tmp_path / "2") as two,
    ):
        assert undisturbed_rtt(one) == pytest.approx(10, abs=2)
        assert undisturbed_rtt(two) == pytest.approx(40, abs=2)
        with pytest.raises(GeofedError, match="ILLEGAL_STATE"):
            Emulator(two_regions(EmulatedLink()), state_dir=tmp_path / "1").start()
        assert undisturbed_rtt(one) == pytest.approx(10, abs=2)


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_owner_takes_everything_along(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from deploy.emulator import Emulator, load_profile\n"
        "emulator = Emulator(load_profile('lan'), state_dir=sys.argv[1]).start()\n"
        "print(emulator.popen('red', ['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    inside = int(owner.stdout.readline())
    time.sleep(0.1)
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 5
    while _runs(inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(inside)


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_core_is_swept_up_by_down_and_by_the_next_up(tmp_path: Path) -> None:
    for sweep in ("down", "up"):
        emulator = Emulator(load_profile("lan"), state_dir=tmp_path).start()
        inside = emulator.popen("red", ["sleep", "60"])
        time.sleep(0.1)
        os.kill(emulator.status()["pid"], signal.SIGKILL)
        if sweep == "up":
            time.sleep(0.2)
            with Emulator(load_profile("lan"), state_dir=tmp_path):
                assert inside.wait(5) == -signal.SIGTERM
        emulator.down()
        assert inside.wait(5) == -signal.SIGTERM


def test_a_stopped_relay_cuts_and_never_unshapes(wan: Emulator) -> None:
    relay = wan.status()["relay"]
    if relay is None:
        pytest.skip("back-end netem has no relay")
    os.kill(relay["pid"], signal.SIGSTOP)
    try:
        assert ping(wan, AB, count=2, interval_s=0.001)["rtts_ms"] == []
    finally:
        os.kill(relay["pid"], signal.SIGCONT)
    assert undisturbed_rtt(wan) == pytest.approx(20, abs=2)


@pytest.mark.usefixtures("no_leaks")
def test_a_killed_relay_ends_the_emulator(two_regions: Build, tmp_path: Path) -> None:
    emulator = Emulator(two_regions(EmulatedLink(delay_ms=10)), state_dir=tmp_path).start()
    relay = emulator.status()["relay"]
    if relay is not None:
        os.kill(relay["pid"], signal.SIGKILL)
        time.sleep(0.3)
        with pytest.raises(GeofedError, match="EMULATOR_OFF"):
            emulator.status()
    emulator.down()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
