"""Commands of `control-plane` in this process: to start one for each takes ten times as long as what it does."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

import geofed.cli
from control_plane.cli import main as entry
from control_plane.cli._settings import Format, settings

__all__ = ["PROGRAMS", "Elsewhere", "run_here"]

_TESTS = Path(__file__).resolve().parents[1]
_ROOT = _TESTS.parent
_SERVE = f"import sys; sys.path[:0] = {[str(_ROOT), str(_ROOT / 'proto'), str(_TESTS)]!r}\n" + (
    "from support.commands import serve; serve()"
)


_built = functools.cache(typer.main.get_command)
"""Building the commands of a program takes ten times as long as running one of them."""
PROGRAMS = {"control-plane": entry.app, "geofed": geofed.cli.app}


def run_here(*arguments: str, program: str = "control-plane", **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command answers, and what it leaves; all that it leaves open is this process's."""
    settings.debug, settings.ask, settings.format = False, True, Format.TABLE
    out, err, status = io.StringIO(), io.StringIO(), 0
    argv = [program, *arguments]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(typer.main, "get_command", _built),
        mock.patch.dict("os.environ", environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            entry.run(PROGRAMS[program])
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())


class Elsewhere:
    """Commands of `control-plane` in one process that is kept for them, in a network namespace where this one is not:
    one after the other."""

    def __init__(self, start: Callable[..., subprocess.Popen[Any]]) -> None:
        """``start`` starts a command line there, with the options of ``subprocess.Popen``; for the first command."""
        self._start = start
        self._process: Any = None
        self._turn = threading.Lock()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        with self._turn:
            process = self._process = self._process or self._started()
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        assert answer, f"the process for commands ended with {process.wait()}"
        return subprocess.CompletedProcess(["control-plane", *arguments], **json.loads(answer))

    def _started(self) -> Any:
        return self._start([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with process.stdin, process.stdout:
                process.kill()
            process.wait()


def serve() -> None:
    """The part of the process that is kept: a line for each command, and one for what it left."""
    for line in sys.stdin:
        done = run_here(*json.loads(line))
        answer = {"returncode": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        print(json.dumps(answer), flush=True)
