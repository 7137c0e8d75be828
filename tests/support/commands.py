"""Commands of `control-plane` in this process: to start one for each takes ten times as long as what it does."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from unittest import mock

from control_plane.cli import main as entry
from control_plane.cli._settings import Format, settings

__all__ = ["run_here"]


def run_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command answers, and what it leaves; all that it leaves open is this process's."""
    settings.debug, settings.ask, settings.format = False, True, Format.TABLE
    out, err, status = io.StringIO(), io.StringIO(), 0
    argv = ["control-plane", *arguments]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict("os.environ", environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            entry.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(argv, status, out.getvalue(), err.getvalue())
