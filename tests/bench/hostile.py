"""A federation of five regions in which one is hostile, in each of nine ways in turn: how do the other four end?

    .venv/bin/python tests/bench/hostile.py [--quick] [--json PATH] [--only NAME,...]

Five real parameter servers, synchronous exchange in a full mesh, workers without torch. The hostile region has its
certificate and key. It either does its part of the job and attacks besides, or sends updates of its own that it may not
send. The other four must end with the model that they have without the attack, or fail with a code, and name the
hostile region, within the bound.

With `--quick` it takes 2 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from report import Bar, Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.hostile_peer import HostilePeer, frame_of
from support.pki import Authority
from support.server_process import JOB, LAYOUT, NumpyWorker, Server, wait_until
from support.warm_servers import WarmServers

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.manifest import Manifest
from sync.file_transfer.signing import sign
from sync.file_transfer.wire import manifest_to_proto
from sync.tcp_streams.sockets import dial
from sync.tcp_streams.stream import hello
from sync.tcp_streams.wire import FrameKind, frame

HOSTILE = "mars"
PUSHES = {"east": 1.0, HOSTILE: 5.0, "north": 2.0, "south": 3.0, "west": 4.0}
REGIONS = tuple(sorted(PUSHES))
HONEST = tuple(region for region in REGIONS if region != HOSTILE)
SAMPLES = 10.0
"""Of a region in a round."""
PATIENCE_SECONDS = 5.0
"""For an update of another region; the default is 6 hours, which only "silent" would show."""
BOUND_SECONDS = 20.0
"""From the beginning of an attack to the end of the job."""
DISK_MB = 4.0
"""Of one region's state. A model has 256 bytes, the rest are files' blocks."""
MEMORY_MB = 64.0
"""By which an attack may raise the largest memory of a parameter server."""


@dataclass
class Federation:
    """Five regions; the hostile one has a parameter server only if it does its part."""

    folder: Path
    authority: Authority
    rounds: int
    pause: float
    warm: WarmServers
    members: tuple[str, ...] = REGIONS
    servers: dict[str, Server] = field(default_factory=dict)
    workers: dict[str, NumpyWorker] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Federation:
        planned = dict.fromkeys(REGIONS, SAMPLES)
        for name in self.members:
            self.servers[name] = Server(
                self.folder / name, self.authority, name, REGIONS, warm=self.warm, rounds=self.rounds,
                round_samples=planned, patience_seconds=PATIENCE_SECONDS,
            )  # fmt: skip
            self.servers[name].launch()
        for server in self.servers.values():
            server.await_ready()
        for server in self.servers.values():
            server.configure(*(other for other in self.servers.values() if other is not server))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for worker in self.workers.values():
            worker.stop.set()
        for server in self.servers.values():
            server.kill()

    def train(self) -> None:
        """Start the workers."""
        for name, server in self.servers.items():
            self.workers[name] = NumpyWorker(server, PUSHES[name], samples=SAMPLES, pause=self.pause)
            self.workers[name].start()

    @property
    def honest(self) -> list[Server]:
        """The servers of the regions that are not hostile."""
        return [self.servers[name] for name in HONEST]

    def awaited(self) -> None:
        """Wait until all others wait for the hostile region's first update."""
        for server in self.honest:
            wait_until(lambda server=server: "of round 1 from mars" in _condition(server), f"{server.region} to wait")

    def failure(self, region: str) -> str:
        """Return the error that a region's server ended with; empty: it has not."""
        process = self.servers[region].process
        if process is None or process.poll() is None:
            return ""
        lines = self.servers[region].log.read_text().splitlines()
        return next((line for line in lines if line.startswith("error[")), "error[none]")

    def ended(self) -> bool:
        """Whether every honest region has its final model, or has failed."""
        return all(self.workers[name].finals or self.failure(name) for name in HONEST)


def _condition(server: Server) -> str:
    with contextlib.suppress(grpc.RpcError):
        return server.status().condition
    return ""


Attack = Callable[[Federation, HostilePeer], None]


def _sent(federation: Federation, peer: HostilePeer, make: Callable[[Server], tuple[Any, bytes]]) -> None:
    """Send each of the others an update once it waits for one; what it answers does not matter."""
    federation.awaited()
    for server in federation.honest:
        proto, data = make(server)
        with contextlib.suppress(grpc.RpcError):
            peer.send(server, proto, data)


def forged_weight(federation: Federation, peer: HostilePeer) -> None:
    """An update that counts as 1e30 samples."""
    data = peer.update(1e3)
    _sent(federation, peer, lambda _: (peer.manifest(data, weight=1e30), data))


def malformed(federation: Federation, peer: HostilePeer) -> None:
    """An update with the right digest, for a model of another size."""
    data = frame_of(np.zeros(LAYOUT.size + 1, np.float32))
    _sent(federation, peer, lambda _: (peer.manifest(data, weight=SAMPLES), data))


def equivocating(federation: Federation, peer: HostilePeer) -> None:
    """One update for two regions, and another one for the other two."""
    updates = {region: peer.update(float(number % 2)) for number, region in enumerate(HONEST)}
    _sent(federation, peer, lambda server: (peer.manifest(updates[server.region]), updates[server.region]))


def ending_early(federation: Federation, peer: HostilePeer) -> None:
    """A good update that states that the job ends with it."""
    data = peer.update(PUSHES[HOSTILE])
    while not federation.stop.is_set():
        with contextlib.suppress(AssertionError):
            _sent(federation, peer, lambda _: (peer.manifest(data, ends=1), data))
        federation.stop.wait(0.5)


def silent(federation: Federation, peer: HostilePeer) -> None:
    """It sends nothing."""


def filling_disks(federation: Federation, peer: HostilePeer) -> None:
    """Updates of all rounds and of the largest size that is accepted, of which it sends one byte each."""
    federation.awaited()
    size = 4 * LAYOUT.size
    for sequence in range(1, federation.rounds + 1):
        for server in federation.honest:
            for bulk in range(3):
                proto = peer.manifest(bytes([bulk]), sequence, total_bytes=size * (1 + bulk))
                with contextlib.suppress(grpc.RpcError):
                    peer.send(server, proto, b"x")
    for server in federation.honest:
        with contextlib.suppress(grpc.RpcError):
            peer.send(server, peer.manifest(b"y", total_bytes=512 << 20), b"x")


def forged_origin(federation: Federation, peer: HostilePeer) -> None:
    """Updates of other regions: signed by itself, not signed, and ending the job."""
    data = peer.update(1e3)
    while not federation.stop.is_set():
        for server in federation.honest:
            for origin in set(HONEST) - {server.region}:
                for sequence in range(1, federation.rounds + 1):
                    forged = peer.manifest(data, sequence, region=origin, ends=sequence)
                    bare = sync_pb2.UpdateManifest()
                    bare.CopyFrom(forged)
                    bare.ClearField("signature")
                    for proto in (forged, bare):
                        with contextlib.suppress(grpc.RpcError):
                            peer.offer(server, proto)


def replaying(federation: Federation, peer: HostilePeer) -> None:
    """All signed updates that it has, of itself and of others, again and again, and one of another job."""
    state = federation.servers[HOSTILE].folder / "state"
    while not federation.stop.is_set():
        for path in [*state.glob("inbox/*/*.json"), *state.glob("outbox/*.json")]:
            with contextlib.suppress(OSError, ValueError):
                data, proto = path.with_suffix(".frame").read_bytes(), _as_proto(json.loads(path.read_text()))
                if proto.region == HOSTILE:
                    sign(proto, peer.identity)
                for server in federation.honest:
                    with contextlib.suppress(grpc.RpcError):
                        peer.send(server, proto, data)
        data = peer.update(1e3)
        for server in federation.honest:
            with contextlib.suppress(grpc.RpcError):
                peer.send(server, peer.manifest(data, job="job-0"), data)


def _as_proto(manifest: dict[str, Any]) -> Any:
    seen = tuple((region, sequence) for region, sequence in manifest["seen"])
    return manifest_to_proto(JOB, Manifest(**{**manifest, "seen": seen}))


def flooding(federation: Federation, peer: HostilePeer) -> None:
    """Offers without a pause from eight threads, hundreds of connections, and frames of nonsense."""
    data = peer.update(1e3)
    # A number that is in no round, so that its own updates are not contradicted.
    proto = peer.manifest(data, 0)

    def offers(server: Server) -> None:
        while not federation.stop.is_set():
            with contextlib.suppress(grpc.RpcError):
                peer.offer(server, proto)

    def connections(server: Server) -> None:
        lines: list[socket.socket] = []
        while not federation.stop.is_set() and len(lines) < 400:
            with contextlib.suppress(OSError):
                bulk = ("127.0.0.1", server.ports["bulk"])
                if len(lines) % 2:
                    lines.append(socket.create_connection(bulk, 1.0))
                    continue
                line = dial(bulk, server.region, peer.identity, 1.0)
                line.sendall(hello(JOB, collects=False) + frame(FrameKind.OFFER, 1, b"\xff" * 99))
                lines.append(line)
        federation.stop.wait()
        for line in lines:
            line.close()

    works = (offers, offers, connections)
    threads = [threading.Thread(target=work, args=(one,)) for one in federation.honest for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ALONE: tuple[Attack, ...] = (forged_weight, malformed, equivocating, silent, ending_early, filling_disks)
"""The hostile region runs no parameter server."""
BESIDES: tuple[Attack, ...] = (forged_origin, flooding, replaying)
"""It does its part of the job, and attacks besides."""


def _run(attack: Attack | None, given: argparse.Namespace, folder: Path, warm: WarmServers) -> dict[str, Any]:
    authority = Authority()
    members = HONEST if attack in ALONE else REGIONS
    rounds, pause = (3, 0.4) if given.quick else (10, 0.5)
    with Federation(folder, authority, rounds, pause, warm, members) as federation:
        peer = HostilePeer(HOSTILE, authority.region(HOSTILE))
        attacking = threading.Thread(target=attack or (lambda *_: None), args=(federation, peer), daemon=True)
        begun = time.monotonic()
        federation.train()
        attacking.start()
        with contextlib.suppress(AssertionError):
            wait_until(federation.ended, "the end of the job", seconds=BOUND_SECONDS + rounds * pause)
        seconds = time.monotonic() - begun
        failures = {name: federation.failure(name) for name in HONEST}
        faults = [
            f"{fault.region} {fault.code} x{fault.count}"
            for server in federation.honest
            if not failures[server.region]
            for fault in server.status().peer_faults
        ]
        federation.stop.set()
        memory = max(_memory_mb(server) for server in federation.honest)
        attacking.join(10.0)
        finals = [worker.finals[0] for name, worker in federation.workers.items() if name in HONEST and worker.finals]
        disk = max(_disk_bytes(server.folder / "state") for server in federation.honest)
        ended = federation.ended()
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "attack": attack.__name__ if attack else "none",
        "ended": ended,
        "seconds": seconds,
        "failures": failures,
        "finals": [final.tobytes().hex()[:64] for final in finals],
        "models": {final.tobytes() for final in finals},
        "refused": sorted(set(faults)),
        "disk_bytes": disk,
        "memory_mb": memory,
    }


def _memory_mb(server: Server) -> float:
    """Largest memory of a server's process so far, in MB; 0 once it has ended."""
    with contextlib.suppress(OSError, AttributeError, IndexError):
        status = Path(f"/proc/{server.process.pid}/status").read_text()  # type: ignore[union-attr]
        return int(status.split("VmHWM:")[1].split()[0]) / 1024
    return 0.0


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _outcome(run: dict[str, Any], baseline: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the four have ended as they must, and how."""
    failed = [line for line in run["failures"].values() if line]
    if not failed:
        same = len(run["finals"]) == len(HONEST) and run["models"] == baseline["models"]
        return same, "the same model" if same else "ANOTHER MODEL" if run["finals"] else "NO END"
    named = [line for line in failed if HOSTILE in line]
    codes = sorted({line.split("[")[1].split("]")[0] for line in failed})
    # The control plane ends the job with the first failure, so it needn't be all of them that see the cause.
    whole = bool(named) and run["ended"] and set(codes) <= {"PEER_INVALID", "REGION_LOST"}
    return whole, f"failed: {', '.join(codes)}; {len(named)} of {len(failed)} name {HOSTILE}"


def _more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="NAME,...", help="these attacks only")


def main() -> int:
    """Run the baseline and each attack, print the table, and judge."""
    given = options(__doc__, more=_more)
    report = Report("hostile", given.quick)
    chosen = [attack for attack in (*ALONE, *BESIDES) if not given.only or attack.__name__ in given.only.split(",")]
    with tempfile.TemporaryDirectory() as scratch, WarmServers() as warm:
        baseline = _run(None, given, Path(scratch) / "none", warm)
        if len(baseline["models"]) != 1 or len(baseline["finals"]) != len(HONEST):
            raise GeofedError("INTERNAL", f"without an attack the job did not end: {baseline['failures']}")
        print(f"{'attack':<15} {'seconds':>7} {'disk KB':>8} {'MB more':>8}  how the other four end")
        for attack in chosen:
            run = _run(attack, given, Path(scratch) / attack.__name__, warm)
            _judge(run, baseline, report)
    report.runs.insert(0, {name: value for name, value in baseline.items() if name != "models"})
    return report.close(given.json)


def _judge(run: dict[str, Any], baseline: dict[str, Any], report: Report) -> None:
    """Print a line of the table, and hold the run to its bars."""
    whole, how = _outcome(run, baseline)
    more = max(0.0, run["memory_mb"] - baseline["memory_mb"])
    figures = f"{run['seconds']:>7.1f} {run['disk_bytes'] / 1024:>8.0f} {more:>8.1f}"
    print(f"{run['attack']:<15} {figures}  {how}", flush=True)
    for text in [*{line for line in run["failures"].values() if line}, *run["refused"]][:4]:
        print(f"{'':<16}{text[:150]}")
    name, bound = run["attack"].replace("_", " "), BOUND_SECONDS + baseline["seconds"]
    report.bars += [
        Bar(f"{name}: the other four end as they must", float(whole), "", 1.0, whole),
        Bar.at_most(f"{name}: time to the end", run["seconds"], "s", bound),
        Bar.at_most(f"{name}: disk of a region", run["disk_bytes"] / 1e6, "MB", DISK_MB),
        Bar.at_most(f"{name}: memory beyond that without an attack", more, "MB", MEMORY_MB),
    ]
    report.runs.append({name: value for name, value in run.items() if name != "models"} | {"outcome": how})


if __name__ == "__main__":
    sys.exit(main())
