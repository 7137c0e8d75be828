"""The units of `deploy/systemd` under a real systemd, installed by the commands of the page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.debian import debian_root
from support.systemd import Machine, booted, need_systemd

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "production.md").read_text()
CONTROL_PLANE, AGENT = "geofed-control-plane", "geofed-region-agent"
CONTEXT = "GEOFED_CONTEXT=/var/lib/geofed/context.json"


def commands(before: str) -> list[list[str]]:
    """Those of the page's block after a text, as root runs them."""
    block = PAGE.partition(before)[2].partition("\n\n")[2].partition("\n\n")[0]
    lines = [shlex.split(line.strip(), comments=True) for line in block.splitlines()]
    assert lines, before
    assert all(words[0] == "sudo" for words in lines)
    return [["runuser", "-u", words[2], "--", *words[3:]] if words[1] == "-u" else words[1:] for words in lines]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Debian with a clone in /srv/clone and a wheel of it, since nothing can be downloaded in the machine."""
    need_systemd()
    root = tmp_path_factory.mktemp("systemd") / "root"
    if not debian_root(root):
        pytest.skip("Debian's Python is not that of this environment, whose packages are installed in the machine")
    wanted = "apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap libseccomp2"
    subprocess.run(["chroot", str(root), "sh", "-c", wanted], check=True, capture_output=True)
    made = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(root / "srv" / "wheels"),
    ]
    subprocess.run([*made, str(ROOT)], check=True, capture_output=True)
    shutil.copytree(ROOT / "deploy" / "systemd", root / "srv" / "clone" / "deploy" / "systemd")
    yield root
    shutil.rmtree(root)


@pytest.fixture
def machine(root: Path) -> Iterator[Machine]:
    with booted(root) as machine:
        yield machine


def _eventually(holds: Callable[[], object], machine: Machine, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: {machine.journal()}"
        time.sleep(0.3)


def _install(machine: Machine) -> None:
    # There is no name server.
    machine("sh", "-c", "mkdir /etc/geofed && echo SERVE_OPTIONS=--advertise localhost > /etc/geofed/control-plane.env")
    for words in commands("**systemd.**"):
        if words[1:3] == ["-m", "venv"]:
            words.insert(3, "--system-site-packages")
        elif words[0].endswith("/pip"):
            assert words[1:] == ["install", ".[worker]"]
            words[1:] = ["install", "-q", "--no-index", "--no-deps", *_wheels(machine)]
        line = " ".join(word if "*" in word else shlex.quote(word) for word in words)
        machine("sh", "-c", f"cd /srv/clone && {line}")


def _wheels(machine: Machine) -> list[str]:
    return machine("sh", "-c", "ls /srv/wheels/*.whl").split()


def test_the_units_run_a_job_come_back_after_a_kill_and_stop(machine: Machine) -> None:
    _install(machine)
    geofed = ("env", CONTEXT, "/opt/geofed/bin/geofed")

    def regions() -> list[dict[str, str]]:
        done = machine.start(*geofed, "region", "list", "-o", "json")
        return json.loads(done.stdout)["data"] if done.returncode == 0 else []

    _eventually(lambda: machine.start(*geofed, "region", "list").returncode == 0, machine, "the control plane")
    # A region on the same machine.
    machine(*geofed, "init", "/srv/first", "--template", "text", "--regions", "east", "--no-input")
    machine("sed", "-i", "s#uri: shards#uri: /srv/first/shards#", "/srv/first/east.yaml")
    invite = shlex.join([*geofed, "region", "invite", "east"])
    machine("sh", "-c", f"{invite} > /srv/east.token && chown geofed /srv/east.token")
    for words in commands("With the units of `deploy/systemd/`"):
        named = {"NAME.token": "/srv/east.token", "region.yaml": "/srv/first/east.yaml"}
        machine(*(named.get(word, word) for word in words))
    _eventually(lambda: [one["state"] for one in regions()] == ["live"], machine, "the region")
    assert [one["isolation"] for one in regions()] == ["bubblewrap"]
    submit = ("submit", "/srv/first/job/job.yaml", "--set", "train.end={steps: 20}", "--watch", "--yes")
    machine(*geofed, *submit, timeout=200)
    (job,) = json.loads(machine(*geofed, "list", "--all", "-o", "json"))["data"]
    assert job["state"] == "succeeded"

    # Killed, they are started again.
    for unit in (CONTROL_PLANE, AGENT):
        assert machine("stat", "--format=%U", f"/proc/{machine.shown(unit, 'MainPID')}").strip() == "geofed"
        machine("sh", "-c", f"kill -9 {machine.shown(unit, 'MainPID')}")
        _eventually(lambda unit=unit: machine.shown(unit, "NRestarts") == "1", machine, f"{unit} starts again")
    _eventually(lambda: [one["state"] for one in regions()] == ["live"], machine, "the region after kills")

    # What a restart cannot mend is not tried again.
    machine("sed", "-i", "s/capacity/capacities/", "/etc/geofed/region.yaml")
    machine("systemctl", "restart", AGENT)
    _eventually(lambda: machine.shown(AGENT, "ActiveState") == "failed", machine, "the agent gives up")
    assert machine.shown(AGENT, "ExecMainStatus") == "2"
    assert "did you mean" in machine("journalctl", "--no-pager", "-u", AGENT)
    machine("sed", "-i", "s/capacities/capacity/", "/etc/geofed/region.yaml")
    machine("systemctl", "restart", AGENT)
    _eventually(lambda: [one["state"] for one in regions()] == ["live"], machine, "the region")

    # They end in time, and leave no process.
    before, begun = machine("journalctl", "--no-pager"), time.monotonic()
    machine("systemctl", "stop", AGENT, CONTROL_PLANE)
    assert time.monotonic() - begun < 20
    assert {machine.shown(unit, "Result") for unit in (AGENT, CONTROL_PLANE)} == {"success"}
    left = machine.start("find", "/proc", "-maxdepth", "1", "-user", "geofed").stdout
    assert not left, left
    during = machine("journalctl", "--no-pager").removeprefix(before)
    assert not re.search(r"Traceback|left-over process|Killing process", during), during
