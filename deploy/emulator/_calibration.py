"""Compares the emulated links with their profile: round trips, throughput, loss."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from deploy.emulator import _probe
from deploy.emulator._link import EmulatedLink, Pair
from geofed_pb.errors import GeofedError

TOLERANCE = 0.05
"""Fraction by which a link may differ from its shape."""
RTT_FLOOR_MS = 1.0
"""Difference of round-trip time that is never an error: smaller ones come from the machine's scheduler."""
_PINGS = 20
"""Echo requests of a measurement of the round trip."""


class RunningSites(Protocol):
    """What a calibration needs of an emulator."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Names of the regions."""

    def address(self, site: str) -> str:
        """Return the IP address of a site."""

    def popen(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process in the network namespace of a site."""

    def status(self) -> dict[str, Any]:
        """Return the state and the meters of all links."""


@dataclass(frozen=True)
class LinkCalibration:
    """Wanted and measured values of one directed link."""

    src: str
    """Sending site."""
    dst: str
    """Receiving site."""
    rtt_ms: float
    """Round trip that the two directions' delays add up to."""
    measured_rtt_ms: float
    """Median round trip of idle links."""
    rate_mbps: float | None
    """Wanted rate of IP packets; None: unshaped."""
    measured_mbps: float
    """Rate of received IP packets, computed from TCP's payload (from datagrams, where jitter or loss is drawn)."""
    payload_mbps: float
    """The part of it that applications receive."""
    loss: float
    """Wanted loss."""
    measured_loss: float | None
    """Loss of datagrams at half the rate; None: not measured, as none is wanted."""
    probe: str
    """``tcp`` or ``udp``."""
    faults: tuple[str, ...]
    """Sentences about deviations beyond the tolerance; empty: the link is as wanted."""


@dataclass(frozen=True)
class Calibration:
    """One calibration of a running emulator."""

    profile: str
    """Name of the profile."""
    backend: str
    """Back-end that ran."""
    congestion_control: str
    """TCP congestion control of the sites."""
    time_s: float
    """When it was done, Unix seconds."""
    links: tuple[LinkCalibration, ...]
    """One entry per directed link measured."""

    @property
    def ok(self) -> bool:
        """Whether no link has a fault."""
        return not any(link.faults for link in self.links)

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration as plain data for JSON, with the tolerance."""
        return {**asdict(self), "tolerance": TOLERANCE, "ok": self.ok}

    def write(self, path: Path) -> None:
        """Write the calibration to a JSON file."""
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def require(self) -> Calibration:
        """Return the calibration. Raises GeofedError CALIBRATION_FAILED if a link deviates."""
        faults = [f"{link.src} to {link.dst}: {fault}" for link in self.links for fault in link.faults]
        if faults:
            raise GeofedError("CALIBRATION_FAILED", "; ".join(faults))
        return self


def calibrate(emulator: RunningSites, *, seconds: float, links: Sequence[Pair] | None) -> Calibration:
    """Measure links one after the other. Raises GeofedError where a probe cannot run."""
    status = emulator.status()
    shapes = {(row["src"], row["dst"]): row for row in status["links"]}
    regions = emulator.regions
    chosen = list(links) if links is not None else [(a, b) for a in regions for b in regions if a != b]
    rtts: dict[frozenset[str], float | None] = {}
    results = []
    for pair in chosen:
        if pair not in shapes:
            raise GeofedError(
                "REGION_NOT_FOUND", f"no link {pair[0]} to {pair[1]}", hint="see `geofed emulator status`"
            )
        if frozenset(pair) not in rtts:
            rtts[frozenset(pair)] = _round_trip(emulator, pair, shapes[pair]["rtt_ms"])
        link = EmulatedLink(**{name: shapes[pair][name] for name in ("rate_mbps", "delay_ms", "jitter_ms", "loss")})
        jitter_ms = link.jitter_ms + shapes[pair[1], pair[0]]["jitter_ms"]
        rtt_ms = shapes[pair]["rtt_ms"]
        results.append(_one(emulator, pair, link, rtt_ms, jitter_ms, rtts[frozenset(pair)], seconds))
    return Calibration(status["profile"], status["backend"], status["congestion_control"], time.time(), tuple(results))


def _one(
    emulator: RunningSites,
    pair: Pair,
    link: EmulatedLink,
    rtt_ms: float,
    jitter_ms: float,
    measured_rtt_ms: float | None,
    seconds: float,
) -> LinkCalibration:
    faults = []
    # the median of random jitter is random, too; three of its standard deviations are allowed
    doubt_ms = 3 * jitter_ms / _PINGS**0.5
    if measured_rtt_ms is None:
        faults.append("no echo came back")
    elif abs(measured_rtt_ms - rtt_ms) > max(RTT_FLOOR_MS, TOLERANCE * rtt_ms) + doubt_ms:
        faults.append(f"round trip {measured_rtt_ms:.2f} ms instead of {rtt_ms:.2f} ms")
    # a connection's start overfills the queue, and retransmitted data arrive in a burst
    warm_s = 1.5 + 15 * rtt_ms / 1000
    measured_loss = None
    if link.drawn:
        # random loss makes TCP slower than the link, so datagrams are used to measure its rate
        half = 0.5 * (link.rate_mbps or 100)
        measured_loss = float(transfer_udp(emulator, pair, half, seconds, 0)["loss"])
        offered = (link.rate_mbps or 100) * 1.15 / max(0.1, 1 - link.loss)
        mbps = float(transfer_udp(emulator, pair, offered, seconds, link.delay_ms / 1000 + 0.5)["mbps"])
        payload = mbps * _probe.PAYLOAD_PER_PACKET
        packets = half * 1e6 * seconds / 12_000
        doubt = 4 * (link.loss * (1 - link.loss) / max(1.0, packets)) ** 0.5
        if abs(measured_loss - link.loss) > max(doubt, TOLERANCE * link.loss):
            faults.append(f"loss {measured_loss:.4f} instead of {link.loss:.4f}")
    else:
        payload = float(transfer_tcp(emulator, pair, warm_s + seconds, warm_s)["mbps"])
        mbps = payload / _probe.PAYLOAD_PER_PACKET
    if link.rate_mbps is not None and abs(mbps - link.rate_mbps) > TOLERANCE * link.rate_mbps:
        faults.append(f"{mbps:.1f} Mbit/s instead of {link.rate_mbps:.1f}")
    return LinkCalibration(
        src=pair[0],
        dst=pair[1],
        rtt_ms=rtt_ms,
        measured_rtt_ms=round(measured_rtt_ms, 3) if measured_rtt_ms is not None else -1.0,
        rate_mbps=link.rate_mbps,
        measured_mbps=round(mbps, 2),
        payload_mbps=round(payload, 2),
        loss=link.loss,
        measured_loss=measured_loss,
        probe="udp" if link.drawn else "tcp",
        faults=tuple(faults),
    )


def _round_trip(emulator: RunningSites, pair: Pair, rtt_ms: float) -> float | None:
    rtts = ping(emulator, pair, count=_PINGS, interval_s=min(0.1, max(0.02, rtt_ms / 4000)))["rtts_ms"]
    return _probe.spread(rtts)["median_ms"] if rtts else None


def ping(emulator: RunningSites, pair: Pair, *, count: int, interval_s: float) -> dict[str, Any]:
    """Echo requests from the first site to the second: ``sent`` and ``rtts_ms``."""
    return _result(_start(emulator, pair[0], "ping", emulator.address(pair[1]), count, interval_s))


def transfer_tcp(emulator: RunningSites, pair: Pair, seconds: float, warm_s: float) -> dict[str, Any]:
    """One TCP connection from the first site to the second: ``mbps`` of payload after the warm-up."""
    receiver = _start(emulator, pair[1], "tcp-receive", seconds, warm_s)
    sender = _start(emulator, pair[0], "tcp-send", emulator.address(pair[1]), _port(receiver))
    result = _result(receiver)
    _result(sender)
    return result


def transfer_udp(emulator: RunningSites, pair: Pair, mbps: float, seconds: float, warm_s: float) -> dict[str, Any]:
    """Datagrams at a rate of IP bytes: ``mbps`` received after the warm-up, and ``loss``."""
    receiver = _start(emulator, pair[1], "udp-receive", seconds + warm_s, warm_s)
    address = emulator.address(pair[1])
    sender = _start(emulator, pair[0], "udp-send", address, _port(receiver), mbps, seconds + warm_s)
    _result(sender)
    return _result(receiver)


def _start(emulator: RunningSites, site: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-S", str(Path(_probe.__file__)), *map(str, arguments)]
    process: subprocess.Popen[str] = emulator.popen(
        site, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process


def _port(receiver: subprocess.Popen[str]) -> int:
    assert receiver.stdout is not None
    line = receiver.stdout.readline()
    if not line:
        _result(receiver)
    return int(json.loads(line)["port"])


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    if process.returncode != 0 or not out.strip():
        raise GeofedError("CALIBRATION_FAILED", f"a probe ended with {process.returncode}: {err.strip()[-500:]}")
    return dict(json.loads(out.strip().splitlines()[-1]))
