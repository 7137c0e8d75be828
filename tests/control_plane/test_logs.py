"""What is written to the log."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FAIL = """
import logging, sys
import structlog
from control_plane._logs import configure_logs

configure_logs(sys.argv[1])
token = "s3" + "cret"
try:
    raise ValueError("broken")
except ValueError:
    structlog.get_logger().exception("first", region="a")
    logging.getLogger("second").exception("second")
"""


@pytest.mark.processes
@pytest.mark.parametrize("style", ["console", "json"])
def test_tracebacks_tell_where_but_no_values_of_variables(style: str) -> None:
    written = subprocess.run([sys.executable, "-c", _FAIL, style], capture_output=True, text=True, timeout=60).stderr
    assert written.count("ValueError") == 2, written
    assert written.count("broken") == 2
    assert "s3cret" not in written
