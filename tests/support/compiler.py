"""The compiler that `torch.compile` needs."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from shutil import which

import pytest

_HEADER = Path(sysconfig.get_paths()["include"], "Python.h")

NEEDS_COMPILER = pytest.mark.skipif(
    which("g++") is None or not _HEADER.exists(), reason="g++ or Python's headers are not installed"
)
