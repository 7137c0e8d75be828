"""One run of one contender over the emulated WAN: what is asked, how it is started, and what is read from it.

A contender starts its processes in the regions and leaves marks: one file of JSON lines per region,
``scene.marks(region)``, with ``{"event": "begin"}`` when that region's warm-up is over, and with ``{"event": "end",
"steps": N, "seconds": S, "phases": {NAME: SECONDS}, "notes": {}}`` when it has done what is measured. Everything else,
the bytes, the load, the end of the processes, is done here, the same for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile

REGIONS = ("east", "west", "south")
_POLL_S = 0.02
_MARK = "GEOFED_BENCH_RUN"
"""Variable that tells which run a process belongs to, since some start their own in groups of their own."""
_OTHERS_CORES = 0.35
"""Cores that other processes may keep busy when a run starts."""

Started = subprocess.Popen[Any]


@dataclass(frozen=True)
class Setting:
    """Links and compute that a table stands for."""

    rate_mbps: float | None
    """Of each direction between two regions; None is unshaped."""
    rtt_ms: float
    compute_ms: float
    """Calibrated compute of a step."""
    local_steps: int = 20
    """Steps between two exchanges, where a method has local steps."""

    @property
    def name(self) -> str:
        link = "unshaped" if self.rate_mbps is None else f"{self.rate_mbps:g} Mbit/s, {self.rtt_ms:g} ms"
        return f"{link}, t = {self.compute_ms:g} ms"

    def profile(self) -> WanProfile:
        sites = (CONTROL, *REGIONS)
        wan = EmulatedLink(rate_mbps=self.rate_mbps, delay_ms=self.rtt_ms / 2)
        links = {(a, b): EmulatedLink() if CONTROL in (a, b) else wan for a in sites for b in sites if a != b}
        return WanProfile("three-equal", self.name, "a setting of the benchmark", REGIONS, links)


@dataclass(frozen=True)
class Scene:
    """What a contender is given to start in."""

    emulator: Emulator
    setting: Setting
    folder: Path
    """Empty, of this run alone."""
    warmup: int
    """Exchanges before the measurement."""
    exchanges: int
    """Exchanges that are measured."""
    started: list[Started] = field(default_factory=list)
    """Every process of this run."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.emulator.address(region) for region in REGIONS)

    def marks(self, region: str) -> Path:
        """Where this region's marks go."""
        return self.folder / f"{region}.marks"

    def start(self, region: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Started:
        """A process in a region (or ``control``), its output in the run's folder; it is ended with its group."""
        with open(self.folder / f"{region}.log", "a") as log:
            process = self.emulator.popen(
                region,
                argv,
                env={**os.environ, **(env or {}), _MARK: str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    kind: Literal["bound", "rival", "ours"]
    start: Callable[[Scene], None]
    """Starts everything by ``scene.start``, without waiting for it."""
    window: Callable[[Setting], tuple[int, int]]
    """Exchanges to warm up and to measure."""
    versions: Callable[[], dict[str, str]] = dict
    """Of what runs, by package."""
    prepare: Callable[[], None] = lambda: None
    """Before the first run: installs what is missing. Raises RuntimeError with the reason where it cannot."""
    stop: Callable[[Scene], None] = lambda scene: None
    """After each run, before its processes are ended."""
    timeout_s: float = 180.0
    """For the warm-up, and for the measurement."""
    quick: bool = False
    """Takes part in ``--quick``."""


@dataclass(frozen=True)
class Run:
    """What came of it."""

    contender: str
    kind: str
    setting: dict[str, Any]
    repetition: int
    steps_per_s: float = 0.0
    """Of the slowest region."""
    wan_bytes_per_step: float = 0.0
    """IP bytes over all links between regions, both directions, per step."""
    regions: dict[str, dict[str, Any]] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    cores_busy_before: float = 0.0
    """By other processes, right before the start."""
    cores_busy: float = 0.0
    """By everything, during the measurement."""
    load: float = 0.0
    failure: str = ""

    def phase_ms(self, name: str) -> float:
        """Milliseconds per step that the slowest region spent in a phase."""
        slowest = min(self.regions.values(), key=lambda marked: marked["steps"] / marked["seconds"])
        return 1000 * float(slowest["phases"].get(name, 0.0)) / float(slowest["steps"])


def measure(
    contender: Contender,
    emulator: Emulator,
    setting: Setting,
    folder: Path,
    repetition: int,
    patience_s: float = 60.0,
) -> Run:
    """Run a contender once, when the machine is quiet or patience ends. What fails is told in the result."""
    folder.mkdir(parents=True)
    warmup, exchanges = contender.window(setting)
    scene = Scene(emulator, setting, folder, warmup, exchanges)
    about: dict[str, Any] = {
        "contender": contender.name,
        "kind": contender.kind,
        "setting": asdict(setting),
        "repetition": repetition,
        "cores_busy_before": quiet(patience_s),
    }
    try:
        contender.start(scene)
        _follow(scene, "begin", contender.timeout_s)
        bytes_before, busy_before = emulator.bytes(), _busy_s()
        marks = _follow(scene, "end", contender.timeout_s)
        bytes_after, (busy_s, wall_s) = emulator.bytes(), _since(busy_before)
    except (RuntimeError, OSError) as error:
        return Run(**about, load=os.getloadavg()[0], failure=str(error))
    finally:
        contender.stop(scene)
        end(scene)
    moved = {f"{a} to {b}": bytes_after[a, b] - bytes_before[a, b] for a, b in bytes_after if CONTROL not in (a, b)}
    return Run(
        **about,
        steps_per_s=min(marked["steps"] / marked["seconds"] for marked in marks.values()),
        wan_bytes_per_step=sum(moved.values()) / max(1, min(marked["steps"] for marked in marks.values())),
        regions=marks,
        link_bytes=moved,
        cores_busy=busy_s / wall_s,
        load=os.getloadavg()[0],
    )


def _follow(scene: Scene, event: str, timeout_s: float) -> dict[str, dict[str, Any]]:
    """The marks of an event, once every region has left it. Raises RuntimeError where that does not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        marks = {region: found for region in REGIONS if (found := _mark(scene.marks(region), event)) is not None}
        if len(marks) == len(REGIONS):
            return marks
        failed = [process.returncode for process in scene.started if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            why = f"a process ended with {failed[0]}" if failed else f"no {event!r} within {timeout_s:g} s"
            raise RuntimeError(f"{why}\n{_tail(scene)}")
        time.sleep(_POLL_S)


def _mark(path: Path, event: str) -> dict[str, Any] | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        if fields["event"] == event:
            return dict(fields)
    return None


def _tail(scene: Scene) -> str:
    logs = sorted(scene.folder.glob("*.log"))
    return "\n".join(f"{log.name}: {log.read_text(errors='replace').strip()[-700:]}" for log in logs)


def end(scene: Scene) -> None:
    """End the run's processes and all that they started."""
    for kind, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for pid in _alive(scene):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and _alive(scene):
            time.sleep(5 * _POLL_S)


def _alive(scene: Scene) -> list[int]:
    for process in scene.started:
        process.poll()
    mark = f"{_MARK}={scene.folder}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def quiet(patience_s: float) -> float:
    """Wait until the machine's other processes are, and return how many cores they keep busy all the same."""
    deadline = time.monotonic() + patience_s
    while True:
        before = _busy_s()
        time.sleep(1.0)
        busy_s, wall_s = _since(before)
        if busy_s / wall_s <= _OTHERS_CORES or time.monotonic() > deadline:
            return round(busy_s / wall_s, 3)


def _busy_s() -> tuple[float, float]:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), time.monotonic()


def _since(before: tuple[float, float]) -> tuple[float, float]:
    now = _busy_s()
    return now[0] - before[0], max(1e-6, now[1] - before[1])
