"""The emulator for a user who is not root, tried as nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.emulator import Emulator

pytestmark = [pytest.mark.alone, pytest.mark.netns]

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
SCRIPT = """
import json, sys
from deploy.emulator import Emulator, load_profile
from deploy.emulator._calibration import ping
from deploy.emulator import CONTROL, EmulatedLink, WanProfile
links = {(a, b): EmulatedLink(delay_ms=10) for a in (CONTROL, "a", "b") for b in (CONTROL, "a", "b") if a != b}
with Emulator(WanProfile("p", "d", "s", ("a", "b"), links)) as emulator:
    rtts = sorted(ping(emulator, ("a", "b"), count=11, interval_s=0.01)["rtts_ms"])
    user = emulator.run("a", ["id", "-u"], capture_output=True, text=True).stdout.strip()
    emulator.partition("a")
    cut = ping(emulator, ("a", "b"), count=1, interval_s=0.001)["rtts_ms"]
    emulator.set_link("b", "a", rate_mbps=5)
    left = emulator.popen("b", ["sleep", "60"])
    about = {"rootless": emulator.status()["rootless"], "rtt_ms": rtts[5], "user": user, "cut": cut}
about["left"] = left.wait(5)
print(json.dumps(about))
"""


def _python_for_nobody() -> str:
    for candidate in ("/usr/bin/python3", shutil.which("python3")):
        check = "import sys, typing; typing.Self"
        if candidate and subprocess.run([*NOBODY, candidate, "-c", check], capture_output=True).returncode == 0:
            return candidate
    pytest.skip("no Python of 3.11 or newer that nobody may run")


@pytest.mark.usefixtures("no_leaks")
def test_whole_life_as_nobody() -> None:
    if os.geteuid() != 0:
        reason = Emulator.supported()
        if reason:
            pytest.skip(reason)
        pytest.skip("already not root: every other test of this folder is this test")
    python = _python_for_nobody()
    root = Path(__file__).resolve().parents[3]
    where = {"PYTHONPATH": f"{root}:{root / 'proto'}", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}
    where |= {"PYTHONDONTWRITEBYTECODE": "1"}
    ask = [*NOBODY, python, "-c", "from deploy.emulator import Emulator; print(Emulator.supported() or '')"]
    asked = subprocess.run(ask, env=where, capture_output=True, text=True, cwd="/")
    if asked.returncode != 0:
        pytest.skip(f"nobody may not read the checkout: {asked.stderr.strip().splitlines()[-1]}")
    if asked.stdout.strip():
        pytest.skip(asked.stdout.strip())
    done = subprocess.run([*NOBODY, python, "-c", SCRIPT], env=where, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    assert about["rootless"] is True
    assert about["user"] == "0"
    assert about["rtt_ms"] == pytest.approx(20, abs=3)
    assert about["cut"] == []
    assert about["left"] == -15
