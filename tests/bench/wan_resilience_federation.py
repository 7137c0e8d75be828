"""Three regions in the emulator: a parameter server and a worker's process each, with a clock that reads their logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from wan_resilience_audit import Journal
from wan_resilience_site import JOB, PORTS, SiteConfig, total, written

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.pki import Authority, write

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from geofed_pb.errors import GeofedError
from sync.ps.config import PsConfig

__all__ = ["PUSHES", "REGIONS", "Federation", "Shape", "profile"]

PUSHES = {"east": 2.0**-10, "north": 2.0**-9, "west": 2.0**-8}
"""With small whole numbers they make changes that the codecs send without a rest."""
REGIONS = tuple(PUSHES)
RATE_MBPS, RTT_MS = 100.0, 30.0
_TOKEN_KEY = "a key of the right length for a test of it"
_READ_SECONDS = 0.03
_START_SECONDS, _END_SECONDS = 40.0, 90.0


def profile() -> WanProfile:
    """Every pair of regions alike."""
    sites = (CONTROL, *REGIONS)
    link = EmulatedLink(rate_mbps=RATE_MBPS, delay_ms=RTT_MS / 2)
    links = {(a, b): EmulatedLink() if CONTROL in (a, b) else link for a in sites for b in sites if a != b}
    text = f"Three regions, every pair {RATE_MBPS:g} Mbit/s and {RTT_MS:g} ms"
    return WanProfile("resilience", text, "a measurement's own", REGIONS, links)


@dataclass(frozen=True)
class Shape:
    """Of the work."""

    codec: str
    size: int
    rounds: int
    steps_per_round: int
    step_seconds: float
    waiting: dict[str, float] = field(default_factory=dict)
    """Settings of the waiting policy that differ from the defaults."""

    @property
    def round_seconds(self) -> float:
        return self.steps_per_round * self.step_seconds


class Region:
    """Its processes and files."""

    def __init__(self, emulator: Emulator, authority: Authority, name: str, folder: Path, shape: Shape) -> None:
        self._emulator, self.name, self.folder = emulator, name, folder
        folder.mkdir(parents=True)
        files = write(authority.region(name), folder / "identity")
        addresses = {region: f"{emulator.address(region)}:{PORTS['exchange']}" for region in REGIONS}
        config = PsConfig(
            job=JOB, region=name, regions=REGIONS, epoch=1, attempt=1, workers=1, rounds=shape.rounds,
            steps_per_round=shape.steps_per_round, evaluate_every=0, wan_policy="ma",
            wan_settings={"background": 1.0}, waiting=shape.waiting, codec=shape.codec, channel="file",
            channel_address=str(folder / "channel"), state_dir=folder / "state",
            worker_listen=f"127.0.0.1:{PORTS['worker']}", exchange_listen=addresses[name], bulk_port=PORTS["bulk"],
            ready_file=folder / "ready.json", token_key=_TOKEN_KEY, ca_file=files[0], certificate_file=files[1],
            key_file=files[2],
        )  # fmt: skip
        (folder / "ps.json").write_text(config.model_dump_json())
        site = SiteConfig(
            name, PUSHES[name], shape.size, shape.rounds, shape.steps_per_round, shape.step_seconds, _TOKEN_KEY,
            str(folder / "identity"), str(folder / "channel"), str(folder / "events"), str(folder / "final.npy"),
            addresses,
        )  # fmt: skip
        written(site, folder / "site.json")
        self.journal = Journal(folder / "state", name)
        self.stopped = False
        """One of its processes does not continue, and answers nothing."""
        self.server = self._launched()
        program = str(Path(__file__).with_name("wan_resilience.py"))
        command = [sys.executable, program, "--site", str(folder / "site.json")]
        with (folder / "site.log").open("ab") as log:
            self.site = emulator.popen(
                name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def _launched(self) -> subprocess.Popen[Any]:
        (self.folder / "ready.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "sync.ps", "--config", str(self.folder / "ps.json"), "--die-with-parent"]
        with (self.folder / "server.log").open("ab") as log:
            return self._emulator.popen(self.name, command, stderr=log)

    def pause(self, process: subprocess.Popen[Any]) -> None:
        process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self, process: subprocess.Popen[Any]) -> None:
        process.send_signal(signal.SIGCONT)
        self.stopped = False

    def kill_server(self) -> None:
        self.server.kill()
        self.server.wait()

    def start_server(self) -> None:
        """Again, on its state."""
        self.server = self._launched()

    @property
    def ready(self) -> bool:
        if self.server.poll() is not None:
            raise GeofedError("INTERNAL", f"{self.name} has ended: {(self.folder / 'server.log').read_text()[-2000:]}")
        return (self.folder / "ready.json").exists()

    def ask(self, what: str) -> dict[str, Any]:
        """Have the region's process do something."""
        if self.stopped:
            return {"unreached": "stopped"}
        assert self.site.stdin is not None
        assert self.site.stdout is not None
        self.site.stdin.write(what + "\n")
        self.site.stdin.flush()
        return dict(json.loads(self.site.stdout.readline() or '{"unreached": "the process has ended"}'))

    def events(self) -> list[dict[str, Any]]:
        """What the worker has told so far."""
        path = self.folder / "events"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def server_cpu_seconds(self) -> float:
        """Of the server's present life."""
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sockets(self) -> list[str]:
        """Connections to other regions that wait for a timer of the kernel, as `ss` shows them."""
        shown = self._emulator.run(self.name, ["ss", "-Htano"], stdout=subprocess.PIPE, text=True).stdout
        return [
            " ".join(line.split()) for line in shown.splitlines() if "timer:(on" in line and "127.0.0.1" not in line
        ]

    def close(self) -> None:
        for process in (self.site, self.server):
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self.journal.close()


class Federation:
    """A job from its start to its end."""

    def __init__(self, emulator: Emulator, folder: Path, shape: Shape) -> None:
        self.emulator, self.shape = emulator, shape
        self.followers: list[Callable[[], bool]] = []
        """Asked whenever the logs have been read, until they are content."""
        authority = Authority()
        self.regions = {name: Region(emulator, authority, name, folder / name, shape) for name in REGIONS}
        self.until(lambda: all(region.ready for region in self.regions.values()), _START_SECONDS)
        for region in self.regions.values():
            region.ask("introduce")
        for region in self.regions.values():
            region.ask("train")

    def read(self) -> None:
        for region in self.regions.values():
            region.journal.read()
        self.followers = [follower for follower in self.followers if not follower()]

    def until(self, holds: Callable[[], bool], seconds: float) -> float | None:
        """Read the logs until something holds; returns when it did, None where it has not in so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            if holds():
                return time.monotonic()
            if time.monotonic() > deadline:
                return None
            time.sleep(_READ_SECONDS)

    def wait(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def ended(self) -> dict[str, int]:
        """The last round of every region whose end is durable."""
        self.read()
        return {name: region.journal.ended for name, region in self.regions.items()}

    def holds(self, who: str, whose: str, sequence: int) -> bool:
        """Whether a region's model has another's update."""
        return self.regions[who].journal.marks.get(whose, 0) >= sequence

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the job, and hold its outcome to what the durable records say."""
        done = self.until(lambda: all(r.events()[-1:] == [{"done": True}] for r in self.regions.values()), _END_SECONDS)
        self.read()
        rounds, expected = self.shape.rounds, total(PUSHES, self.shape.rounds, self.shape.size)
        outcome: dict[str, Any] = {"finished": done is not None, "regions": {}}
        for place, (name, region) in enumerate(self.regions.items()):
            status, verdict = region.ask("status"), region.journal.verdict(REGIONS, rounds)
            found: dict[str, Any] = {"status": status, "lost": verdict.lost, "twice": verdict.twice}
            found["unseen_merges"] = verdict.unseen
            found["applied_off"] = status.get("applied_updates", 0) - (rounds * (len(REGIONS) - 1) + (place > 0))
            marks = region.journal.checkpoint_marks()
            found["marks_off"] = sum(abs(marks.get(other, 0) - rounds) for other in REGIONS)
            final = region.folder / "final.npy"
            off = np.abs(np.load(final) / expected - 1.0).max() if final.exists() else np.inf
            found["model_off"] = float(off)
            found["seconds_of_cpu"] = region.server_cpu_seconds()
            found["failed"] = [event["failed"] for event in region.events() if "failed" in event]
            outcome["regions"][name] = found
        models = [np.load(r.folder / "final.npy") for r in self.regions.values() if (r.folder / "final.npy").exists()]
        outcome["differ"] = float(max((np.abs(model / models[0] - 1.0).max() for model in models), default=np.inf))
        return outcome

    def wire_bytes(self) -> dict[str, int]:
        """IP bytes of each directed link so far."""
        return {f"{a}-{b}": count for (a, b), count in self.emulator.bytes().items() if CONTROL not in (a, b)}

    def close(self) -> None:
        for region in self.regions.values():
            region.close()
