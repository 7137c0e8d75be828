"""What is written to the log."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta

import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.logs import configure_logs

_FAIL = """
import logging, sys
import structlog
from geofed_pb.logs import configure_logs

configure_logs(sys.argv[1])
token = "s3" + "cret"
try:
    raise ValueError("broken")
except ValueError:
    structlog.get_logger().exception("first", region="a")
    logging.getLogger("second").exception("second")
"""


@pytest.mark.processes
@pytest.mark.parametrize("style", ["text", "json"])
def test_tracebacks_tell_where_but_no_values_of_variables(style: str) -> None:
    written = subprocess.run([sys.executable, "-c", _FAIL, style], capture_output=True, text=True, timeout=60).stderr
    assert written.count("ValueError") == 2, written
    assert written.count("broken") == 2
    assert "s3cret" not in written


_LOG = """
import logging, sys, warnings
from geofed_pb.logs import configure_logs

configure_logs(sys.argv[1], relayed=True)
assert "structlog" not in sys.modules
logging.getLogger("geofed.ps").warning("link to %s is down", "oslo")
logging.getLogger("geofed.ps").debug("a detail")
warnings.warn("old")
"""


@pytest.mark.processes
def test_what_another_process_reads() -> None:
    """Its text has no time, which the reader adds; JSON has always the same keys."""
    text, objects = (
        subprocess.run([sys.executable, "-c", _LOG, style], capture_output=True, text=True, timeout=60).stderr
        for style in ("text", "json")
    )
    assert text.splitlines()[0].split() == ["[warning", "]", "link", "to", "oslo", "is", "down", "[geofed.ps]"]
    link, warning = map(json.loads, objects.splitlines())
    assert {key: link[key] for key in ("level", "logger", "event")} == {
        "level": "warning",
        "logger": "geofed.ps",
        "event": "link to oslo is down",
    }
    assert datetime.fromisoformat(link["timestamp"]).utcoffset() == timedelta(0)
    assert "old" in warning["event"]


_DESCRIBED = """
import logging, sys
import structlog
from geofed_pb.logs import configure_logs, describe_process

configure_logs(sys.argv[1])
rounds = iter((3, 4, None))
describe_process(region="east", round=lambda: next(rounds))
with structlog.contextvars.bound_contextvars(job="job-1"):
    logging.getLogger("geofed.ps").warning("of a job")
structlog.get_logger("geofed.hub").info("of a region", region="west")
structlog.get_logger("geofed.hub").info("of none")
"""


@pytest.mark.processes
def test_json_lines_have_region_job_and_round() -> None:
    def written(style: str) -> list[str]:
        done = subprocess.run([sys.executable, "-c", _DESCRIBED, style], capture_output=True, text=True, timeout=60)
        return done.stderr.splitlines()

    lines = [json.loads(line) for line in written("json")]
    told = [{key: line[key] for key in ("event", "job", "region", "round") if key in line} for line in lines]
    assert told == [
        {"event": "of a job", "job": "job-1", "region": "east", "round": 3},
        {"event": "of a region", "region": "west", "round": 4},
        {"event": "of none", "region": "east"},
    ]
    assert "east" not in "".join(written("text")), "people see whose log it is"


@pytest.mark.parametrize("wrong", [("console", "info"), ("json", "loud")])
def test_unknown_formats_and_levels_are_refused(wrong: tuple[str, str]) -> None:
    with pytest.raises(GeofedError, match=f"unknown log .*{'console' if wrong[0] == 'console' else 'loud'}"):
        configure_logs(*wrong)
