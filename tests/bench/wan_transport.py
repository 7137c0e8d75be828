"""One update between two regions over the emulated WAN: this transport against raw TCP on the same links, in turn.

    .venv/bin/python tests/bench/wan_transport.py [--quick] [--json PATH]

Ours is a sender in one region and the exchange service in the other, each in its own process: mutual TLS, chunks
with checksums, written to disk, verified against the digest and flushed before the acknowledgement that ends the clock.
Raw TCP sends the same bytes over 1, 4 or 8 warm connections with default sockets, in equal parts, to a receiver that
drops them, until each connection has been acknowledged. Every bar is held against the best of the three.

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Bar, Report, options
from wan_transport_site import serve

from deploy.emulator import Emulator, load_profile
from geofed_pb.errors import GeofedError

MB = 1_000_000
GIVER, TAKER = "shanghai", "chongqing"
LINKS = {
    "100 Mbit/s, 30 ms": (100.0, 30.0, 0.0, 0.97),
    "500 Mbit/s, 150 ms": (500.0, 150.0, 0.0, 0.95),
    "100 Mbit/s, 30 ms, 0.1 % loss": (100.0, 30.0, 0.001, 0.95),
    "500 Mbit/s, 150 ms, 0.1 % loss": (500.0, 150.0, 0.001, 0.95),
}
RAW_STREAMS = (1, 4, 8)
_WARM_UPS = 3
"""Of ours: in them it opens its streams, learns from the kernel how many, and sizes their buffers."""
PAYLOAD = 1448 / 1500
"""Of a full IP packet."""


class Pair:
    """The two processes."""

    def __init__(self, emulator: Emulator, folder: Path) -> None:
        self._emulator = emulator
        self.taker = self._start(TAKER, "take", str(folder), emulator.address(TAKER))
        ports = json.loads(self._line(self.taker))
        self.giver = self._start(GIVER, "give", str(folder), emulator.address(TAKER), json.dumps(ports))
        self._line(self.giver)

    def _start(self, region: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--site", *arguments]
        return self._emulator.popen(region, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise GeofedError("INTERNAL", "a site of the benchmark has ended")
        return line

    def begin(self, way: str, size: int) -> None:
        assert self.giver.stdin is not None
        self.giver.stdin.write(json.dumps({"way": way, "bytes": size}) + "\n")
        self.giver.stdin.flush()

    def end(self) -> dict[str, Any]:
        return dict(json.loads(self._line(self.giver)))

    def send(self, way: str, size: int) -> dict[str, Any]:
        self.begin(way, size)
        return self.end()

    def close(self) -> None:
        for process in (self.giver, self.taker):
            process.kill()
            process.wait()


def main() -> int:
    given = options(__doc__)
    report = Report("wan_transport", given.quick)
    sizes = (8, 64) if given.quick else (8, 64, 256)
    with tempfile.TemporaryDirectory() as folder, Emulator(load_profile("seed-2")) as emulator:
        links = list(LINKS)[:2] if given.quick else list(LINKS)
        for name in links:
            _compare(emulator, Path(folder) / name.replace("/", " per "), name, sizes, given.quick, report)
        _cut(emulator, Path(folder) / "cut", report, given.quick)
    return report.close(given.json)


def _shape(emulator: Emulator, rate_mbps: float, rtt_ms: float, loss: float) -> None:
    emulator.set_link(GIVER, TAKER, both=True, rate_mbps=rate_mbps, delay_ms=rtt_ms / 2, loss=loss)


def _calibrate(emulator: Emulator, report: Report, name: str, when: str) -> None:
    calibration = emulator.calibrate(seconds=2.0, links=[(GIVER, TAKER)])
    report.runs.append({"link": name, "calibration": when, **calibration.as_dict()})
    link = calibration.links[0]
    print(
        f"{name}: {calibration.backend}, {when}: {link.measured_mbps:.1f} Mbit/s, {link.measured_rtt_ms:.1f} ms"
        f"{'' if calibration.ok else '  OFF: ' + '; '.join(link.faults)}"
    )


def _compare(emulator: Emulator, folder: Path, name: str, sizes: tuple[int, ...], quick: bool, report: Report) -> None:
    rate, rtt, loss, target = LINKS[name]
    _shape(emulator, rate, rtt, loss)
    _calibrate(emulator, report, name, "before")
    raw_ways = [f"raw {count}" for count in RAW_STREAMS]
    pair = Pair(emulator, folder)
    try:
        for way, times in (("ours", _WARM_UPS), *((way, 2) for way in raw_ways)):
            for _ in range(times):
                pair.send(way, (16 if rate < 200 else 64) * MB)
        for size in sizes:
            repetitions = 2 if quick else 5
            seconds: dict[str, list[float]] = {way: [] for way in ("ours", *raw_ways)}
            for _ in range(repetitions):
                for way in seconds:
                    result = pair.send(way, size * MB)
                    seconds[way].append(result["seconds"])
                    report.runs.append({"link": name, "megabytes": size, **result})
            _judge(name, size, seconds, rate, rtt, target, report)
    finally:
        pair.close()
    _calibrate(emulator, report, name, "after")


def _judge(
    name: str, size: int, seconds: dict[str, list[float]], rate: float, rtt: float, target: float, report: Report
) -> None:
    ceiling = rate * PAYLOAD
    # The last byte needs half a round trip, and its acknowledgement the other half.
    physics = size * 8 / ceiling + rtt / 1000
    print(f"  {size} MB; no faster than {physics:.3f} s ({size * 8 / physics:.1f} Mbit/s)")
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    for way, values in seconds.items():
        rates = sorted(size * 8 / value for value in values)
        print(
            f"    {way:<6} {size * 8 / medians[way]:8.1f} Mbit/s ({rates[0]:.1f} to {rates[-1]:.1f}), "
            f"{physics / medians[way]:.3f} of the ceiling"
        )
    raw = {way: value for way, value in medians.items() if way != "ours"}
    if "loss" in name:
        best, label = raw["raw 8"], "eight raw streams"
    else:
        way = min(raw, key=lambda way: raw[way])
        best, label = raw[way], f"raw TCP's best ({way})"
    ratio = best / medians["ours"]
    report.bars.append(Bar.at_least(f"{name}, {size} MB, of {label}", ratio, "x", target))


def _cut(emulator: Emulator, folder: Path, report: Report, quick: bool) -> None:
    """Cut the link twice in the middle of a message: what is sent again?"""
    rate, rtt, _, _ = LINKS["100 Mbit/s, 30 ms" if quick else "500 Mbit/s, 150 ms"]
    size = 64 if quick else 256
    _shape(emulator, rate, rtt, 0.0)
    pair = Pair(emulator, folder)
    try:
        for _ in range(2):
            pair.send("ours", 64 * MB if not quick else 16 * MB)
        whole = size * 8 / rate
        pair.begin("ours", size * MB)
        for _ in range(2):
            time.sleep(whole / 4)
            emulator.partition(GIVER)
            # Longer than the transport waits for an answer, so that it has to resume.
            time.sleep(8.0)
            emulator.heal()
            time.sleep(4.0)
        result = pair.end()
    finally:
        pair.close()
    report.runs.append({"link": "cut twice", "megabytes": size, **result})
    again = result["sent_bytes"] - size * MB
    allowed = result["streams"] * 2 * result["chunk_bytes"]
    print(
        f"cut twice in {size} MB: {again / MB:.2f} MB sent again over {result['streams']} streams "
        f"(chunks of {result['chunk_bytes'] / MB:.2f} MB), {result['failures']} resumptions, {result['seconds']:.1f} s"
    )
    report.bars.append(
        Bar(
            "bytes sent again after two cuts, in chunks a stream and cut",
            again / allowed * 1.0,
            "",
            1.0,
            again <= allowed,
        )
    )


if __name__ == "__main__":
    sys.exit(serve(sys.argv[2:]) if sys.argv[1:2] == ["--site"] else main())
