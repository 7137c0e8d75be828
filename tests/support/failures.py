"""Ways to see how a command fails, and to fill a disk up."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import CATALOGUE

COMMANDS = Path(sys.executable).parent
"""Where this installation's commands lie."""


@dataclass(frozen=True)
class Told:
    """A failure as a user sees it."""

    code: str
    text: str
    hint: str
    exit_status: int


def told(done: subprocess.CompletedProcess[str]) -> Told:
    """What a command said when it failed: one sentence with its code, one hint, no traceback, the code's status."""
    assert "Traceback" not in done.stderr, done.stderr
    found = re.findall(r"^error\[([A-Z_]+)\]: (.*?)(?=^hint: )", done.stderr, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"status {done.returncode}: {done.stderr}"
    (hint,) = re.findall(r"^hint: (.+)$", done.stderr, re.MULTILINE)
    code, text = found[0]
    assert done.returncode == CATALOGUE[code].exit, done.stderr
    return Told(code, text.strip(), hint, done.returncode)


PROBED, AT_WORK = "task.config.lr=0.1", "task.config.lr=9"
"""Settings with which a task of `failing_at_work` is as it was shipped, and with which it fails."""


def failing_at_work(shipped: str, functions: str) -> str:
    """A task module whose own `dataset` and `loss` come only with `AT_WORK`: a probe with `PROBED` finds nothing."""
    return (
        f"{shipped}\n_shipped = dict(globals())\n\n\n{functions}\n\n_broken = dict(globals())\n\n\n"
        "def dataset(uri, split, config):\n"
        "    global _chosen\n"
        "    _chosen = _broken if config['lr'] == 9 else _shipped\n"
        "    return _chosen['dataset'](uri, split, config)\n\n\n"
        "def loss(model, batch):\n"
        "    return _chosen['loss'](model, batch)\n"
    )


def command(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an installed command to its end."""
    argv = [str(COMMANDS / name), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


@contextlib.contextmanager
def filled(place: Path) -> Iterator[None]:
    """Take all space that a file system has left, until the block ends."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as out:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while out.write(b"\0" * size) == size:
                    pass
    try:
        yield
    finally:
        ballast.unlink()
