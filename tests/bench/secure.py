"""Round time with secure aggregation beside that of int8 without it: five regions over an emulated WAN.

    .venv/bin/python tests/bench/secure.py [--quick] [--json PATH]

The tensors are those of ResNet-18 for CIFAR (11.17 M coordinates, 44.7 MB as float32); compute is a calibrated
sleep, the same in both. Parameter servers, transport and worker loop are the real ones, in one network namespace per
region. Both take turns; the first rounds, in which updates have other sizes, are not measured.

Links: 30 ms, and 100 Mbit/s for what a region sends in all, a quarter for each other region; and 100 Mbit/s for each
pair of regions, which is four times as much, and more than two cores can emulate without waiting.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from peers.peer import shapes
from report import Bar, Report, options
from support.pki import Authority

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from sync.codec import Decoding, codec_named
from sync.policy import Contribution, ModelAverage
from sync.ps.execution.replica import Replica, ReplicaState
from sync.secure import MaskKey, PairMasks, SharedScale
from sync.wan import ExchangeSettings

REGIONS = ("east", "north", "south", "up", "west")
RTT_MS, COMPUTE_MS, STEPS = 30.0, 40.0, 10
WARM_UP, MEASURED, SPARE = 3, 4, 2
RATES = {"100 Mbit/s for each region": 25.0, "100 Mbit/s for each pair": 100.0}
BAR = 1.15
_SITE = Path(__file__).resolve().parent / "ours" / "region.py"
_SHARES = dict.fromkeys(REGIONS, 1 / len(REGIONS))
KINDS: dict[str, dict[str, Any]] = {
    "int8": {"codec": "int8"},
    "secure": {"codec": "int8-masked", "wan_settings": {"secure": 3.0}},
}


def main() -> int:
    given = options(__doc__)
    reason = Emulator.supported()
    if reason is not None:
        print(f"the emulator cannot run here: {reason}", file=sys.stderr)
        return 2
    report = Report("secure", given.quick)
    report.details["cpu_s"] = _work()
    for name, mbps in list(RATES.items())[: 1 if given.quick else None]:
        _compare(name, mbps, 1 if given.quick else 3, report)
    return report.close(given.json)


def _work() -> dict[str, float]:
    """Return the CPU seconds that a parameter server takes to make its update and to merge all, in memory."""
    size, names = sum(int(np.prod(shape)) for shape in shapes()), list(REGIONS)
    rng, found = np.random.default_rng(1), {}
    start, end = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    keys = {name: MaskKey() for name in names}
    secrets = {name: keys["east"].secret("east", name, keys[name].public, "") for name in names[1:]}
    scale, scales = SharedScale("east", _SHARES, "int8-masked"), np.full(-(-size // 512), -8.0, np.float32)
    for kind in KINDS:
        replica = Replica(
            ModelAverage(), ExchangeSettings(), codec_named("int8"), ReplicaState(start, start), owned=True
        )
        begun = time.process_time()
        if kind == "int8":
            made = replica.own_update(end, 1, decoded=False)
            values = [Decoding(made.codec, made.tensors, size) for _ in names]
            empty = np.empty(0, np.float32)
            merged = [Contribution(name, 1.0, empty, later=one) for name, one in zip(names, values, strict=True)]
            replica.merge(merged, None, own="east")
        else:
            residual = np.zeros(size)
            update = scale.encode(end, start, residual, size, scales, PairMasks("east", secrets), 2)
            delta, _ = scale.decode([update] * len(names), size, scales)
            np.add(start, delta, out=delta)
        found[kind] = time.process_time() - begun
    print(", ".join(f"{kind}: {seconds:.2f} s of one core to encode and merge" for kind, seconds in found.items()))
    return found


def _compare(name: str, mbps: float, times: int, report: Report) -> None:
    sites = (CONTROL, *REGIONS)
    wan = EmulatedLink(rate_mbps=mbps, delay_ms=RTT_MS / 2)
    links = {(a, b): EmulatedLink() if CONTROL in (a, b) else wan for a in sites for b in sites if a != b}
    rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory() as folder,
        Emulator(WanProfile("five-equal", name, "a setting of the benchmark", REGIONS, links)) as emulator,
    ):
        calibration = emulator.calibrate(seconds=2.0, links=[REGIONS[:2]])
        report.runs.append({"links": name, "calibration": calibration.as_dict()})
        for number in range(times):
            for kind, settings in KINDS.items():
                run = _run(emulator, Path(folder) / f"{kind}-{number}", settings)
                report.runs.append({"links": name, "kind": kind, **run})
                rounds[kind].append(run["exchange_s"])
                print(f"{name}, {kind}: {run['exchange_s']:.2f} s a round, {run['bytes_per_round'] / 1e6:.1f} MB")
    found = {kind: statistics.median(seconds) for kind, seconds in rounds.items()}
    report.details[name] = {"exchange_s": found, "load": os.getloadavg()[0]}
    compute = STEPS * COMPUTE_MS / 1000
    ratio = (found["secure"] + compute) / (found["int8"] + compute)
    report.bars.append(Bar.at_most(f"round time against int8, {name}", ratio, "times", BAR))


def _run(emulator: Emulator, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the regions until all have made their measured rounds."""
    folder.mkdir()
    authority = Authority()
    for region in REGIONS:
        tls = authority.region(region)
        pems = [tls.ca_pem.decode(), tls.certificate_pem.decode(), tls.key_pem.decode()]
        (folder / f"{region}.json").write_text(json.dumps(pems))
    addresses = {region: emulator.address(region) for region in REGIONS}
    told = {
        "regions": REGIONS,
        "addresses": addresses,
        "marks": {region: str(folder / f"{region}.marks") for region in REGIONS},
        "settings": {
            "rounds": WARM_UP + MEASURED + SPARE, "steps_per_round": STEPS, "shares": _SHARES, **settings,
        },
        "options": {
            "addresses": ",".join(addresses.values()), "compute_ms": COMPUTE_MS, "local_steps": STEPS,
            "warmup": WARM_UP, "exchanges": MEASURED,
        },
    }  # fmt: skip
    (folder / "told.json").write_text(json.dumps(told))
    processes = [_start(emulator, folder, region) for region in REGIONS]
    try:
        _marks(folder, "begin")
        before = emulator.bytes()
        marks = _marks(folder, "end")
        moved = sum(count - before[pair] for pair, count in emulator.bytes().items() if CONTROL not in pair)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for region in REGIONS:
            shutil.rmtree(Path("/dev/shm") / f"geofed-bench-{folder.name}-{region}", ignore_errors=True)
    seconds = max(float(mark["seconds"]) for mark in marks) / MEASURED
    exchange = seconds - STEPS * COMPUTE_MS / 1000
    return {"round_s": seconds, "exchange_s": exchange, "bytes_per_round": moved / MEASURED}


def _start(emulator: Emulator, folder: Path, region: str) -> subprocess.Popen[Any]:
    argv = [sys.executable, str(_SITE), "--told", str(folder / "told.json"), "--region", region]
    with (folder / f"{region}.log").open("w") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        more: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        return emulator.popen(region, argv, env=env, **more)


def _marks(folder: Path, event: str) -> list[dict[str, Any]]:
    """Wait until every region has left a mark, and return them."""
    deadline = time.monotonic() + 240.0
    while True:
        found = []
        for region in REGIONS:
            file = folder / f"{region}.marks"
            lines = file.read_text().splitlines() if file.exists() else []
            found += [mark for mark in map(json.loads, lines) if mark["event"] == event]
        if len(found) == len(REGIONS):
            return found
        if time.monotonic() > deadline:
            logs = "\n".join((folder / f"{region}.log").read_text()[-1500:] for region in REGIONS)
            raise RuntimeError(f"no {event!r} from all regions:\n{logs}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
