"""Commands of a page of the documentation, run one after the other as a reader does."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["END", "PROLOGUE", "Printed", "at_terminal", "blocks", "environment", "own_network"]

PROLOGUE = """
set -eu
ip link set lo up 2>/dev/null || true
within() {
    for _ in $(seq 300); do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
    echo "not in time: $*" >&2
    exit 1
}
"""
"""Before the commands of a page: the first that fails ends them. `within` waits for what a reader sees come to be."""
END = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"
"""What they leave running ends with them."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")
_ROWS = 40
_READ_BYTES = 1 << 16


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page that are in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def own_network() -> list[str]:
    """A network of the script's own, so that the default ports are free."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return []


def environment() -> dict[str, str]:
    """Variables of a reader who has this installation, and has set nothing."""
    kept = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for name in ("GEOFED_CONTEXT", "COLUMNS", "LINES", "NO_COLOR"):
        kept.pop(name, None)
    return kept


@dataclass(frozen=True)
class Printed:
    """What commands have shown at a terminal, stdout and stderr together."""

    status: int
    lines: list[str]
    """Without colours; what was written over what stood there, as lines of its own."""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def at_terminal(
    argv: list[str], folder: Path, variables: Mapping[str, str], *, columns: int = 80, seconds: float = 110.0
) -> Printed:
    """Run a command at a terminal of its own. Questions are answered: `y` where that is the question, else Enter."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
        shown = {**variables, "TERM": "xterm"}
        process = subprocess.Popen(argv, cwd=folder, env=shown, stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
    try:
        written = _attend(ours, time.monotonic() + seconds)
        status = process.wait(timeout=5)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    plain = _ESCAPES.sub("", written.decode(errors="replace"))
    return Printed(status, [line for line in re.split(r"[\r\n]+", plain) if line])


def _attend(terminal: int, until: float) -> bytes:
    """Read all that is written until nothing has the terminal open any more, and answer."""
    written = b""
    os.set_blocking(terminal, False)
    while True:
        try:
            part = os.read(terminal, _READ_BYTES)
        except BlockingIOError:
            assert time.monotonic() < until, f"not in time: {written[-2000:].decode(errors='replace')}"
            time.sleep(0.02)
            continue
        except OSError:
            # The last one has closed it.
            return written
        written += part
        if written.endswith(b"[y/N] "):
            os.write(terminal, b"y\n")
        elif written.endswith(b"]: "):
            os.write(terminal, b"\n")
