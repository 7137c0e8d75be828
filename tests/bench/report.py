"""What every benchmark writes: the machine, the versions, every single run, and the bars."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["Bar", "Report", "options", "spread", "waiting_option"]


@dataclass(frozen=True)
class Bar:
    """A figure that must be reached."""

    name: str
    value: float
    unit: str
    target: float
    met: bool

    @classmethod
    def at_least(cls, name: str, value: float, unit: str, target: float) -> Bar:
        return cls(name, value, unit, target, value >= target)

    @classmethod
    def at_most(cls, name: str, value: float, unit: str, target: float) -> Bar:
        return cls(name, value, unit, target, value <= target)


@dataclass
class Report:
    """One benchmark's outcome."""

    benchmark: str
    quick: bool
    machine: dict[str, Any] = field(default_factory=lambda: _machine())
    runs: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def target(self, full: float, *, quick: float) -> float:
        """Of a bar that a quick run, which is smaller, cannot be held to: what holds at this run's size."""
        return quick if self.quick else full

    def close(self, path: Path | None) -> int:
        """Print the bars, write the file; exit status 1 where a bar is not met."""
        for bar in self.bars:
            mark = "met" if bar.met else "MISSED"
            print(f"{mark:<7} {bar.name}: {bar.value:.3g} {bar.unit} (bar {bar.target:g})")
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return 0 if all(bar.met for bar in self.bars) else 1


def options(
    description: str | None,
    argv: Sequence[str] | None = None,
    *,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    **files: Path,
) -> argparse.Namespace:
    """The arguments that all benchmarks take, further ones that name files, with their defaults, and ``more``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the machine, all runs and the bars")
    for name, default in files.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", default=default, help=f"default: {default}")
    more(parser)
    return parser.parse_args(argv)


def waiting_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--waiting``: settings of the waiting policy, so that a rule can be switched off (`waiting.py`)."""

    def parsed(text: str) -> dict[str, float]:
        pairs = (pair.split("=", 1) for pair in text.split(","))
        return {name: float(value) for name, value in pairs}

    told = "settings of the waiting policy that differ from the defaults"
    parser.add_argument("--waiting", metavar="NAME=VALUE,...", type=parsed, default={}, help=told)


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):8.0f} ({min(values):.0f} to {max(values):.0f})"


def _machine() -> dict[str, Any]:
    model = next(
        (ln.split(":")[1].strip() for ln in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in ln), ""
    )
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "numpy": version("numpy"),
        "geofed": version("geofed"),
        "load": os.getloadavg()[0],
    }
