"""Measure a few link shapes with whatever back-end runs here, and write the figures as JSON.

Run by the conformance test twice: on this machine with ``hold``, and in a kernel that has netem.
Usage: measure.py BACKEND OUTPUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from deploy.emulator._calibration import ping, transfer_tcp, transfer_udp

A_TO_B = ("a", "b")


def wan() -> WanProfile:
    sites = (CONTROL, "a", "b")
    links = {pair: EmulatedLink() if CONTROL in pair else EmulatedLink(delay_ms=25) for pair in permutations(sites, 2)}
    return WanProfile("conformance", "two regions", "the conformance test", ("a", "b"), links)


def measure(emu: Emulator) -> dict[str, object]:
    figures: dict[str, object] = {"backend": emu.backend}
    figures["constant_ms"] = ping(emu, A_TO_B, count=80, interval_s=0.01)["rtts_ms"]
    emu.set_link(*A_TO_B, jitter_ms=10)
    figures["jitter_ms"] = ping(emu, A_TO_B, count=250, interval_s=0.008)["rtts_ms"]
    emu.set_link(*A_TO_B, jitter_ms=0, loss=0.05)
    figures["loss"] = transfer_udp(emu, A_TO_B, 8, 2, 0)["loss"]
    emu.set_link(*A_TO_B, loss=0, rate_mbps=20)
    # 20 Mbit/s of IP packets are 19.3 of TCP payload
    figures["payload_mbps"] = rates(18.9, lambda: transfer_tcp(emu, A_TO_B, 3, 2)["mbps"], most=3)
    figures["datagram_mbps"] = rates(19.5, lambda: transfer_udp(emu, A_TO_B, 24, 0.5, 0.3)["mbps"], most=8)
    return figures


def rates(close: float, transfer: Callable[[], float], most: int) -> list[float]:
    """Measured rates, in Mbit/s: one, and more where a busy machine held all of them below ``close``."""
    found = [transfer()]
    while max(found) < close and len(found) < most:
        found.append(transfer())
    return found


if __name__ == "__main__":
    with Emulator(wan(), backend=sys.argv[1]) as running:
        found = measure(running)
    Path(sys.argv[2]).write_text(json.dumps(found))
