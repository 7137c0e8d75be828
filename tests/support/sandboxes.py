"""Whether this machine can run sandboxes."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest


@functools.cache
def _lacking() -> str:
    """Why bubblewrap cannot be used; empty if it can."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    tried = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"missing on this machine: {done.stderr.strip()}"


needs_sandboxes = pytest.mark.skipif(bool(_lacking()), reason=_lacking())
