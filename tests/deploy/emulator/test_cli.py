from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.timing import cpu_seconds

from deploy.emulator import Emulator
from deploy.emulator.cli import _quantity, app
from geofed_pb.errors import GeofedError

RATES = {"kbit": 1e-3, "mbit": 1.0, "": 1.0}


def wan(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "deploy.emulator.cli", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, env={"GEOFED_EMULATOR_STATE": str(state), "PATH": PATH})


PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def test_help_is_quick_and_lists_the_verbs(tmp_path: Path) -> None:
    # A fifth of a second on an idle machine; with torch among what it imports it would be two.
    assert min(cpu_seconds(lambda: wan(tmp_path, "--help")) for _ in range(4)) < 0.6
    shown = wan(tmp_path, "--help")
    for verb in ("up", "status", "exec", "set", "partition", "heal", "calibrate", "down", "profiles"):
        assert f"  {verb} " in shown.stdout


def test_profiles_are_listed(tmp_path: Path) -> None:
    listed = json.loads(wan(tmp_path, "profiles", "-o", "json").stdout)
    assert listed["schema_version"] == 1
    assert [profile["name"] for profile in listed["data"]["profiles"]][-1] == "seed-2"


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["status", "-o", "json"], 4, "EMULATOR_OFF"),
        (["exec", "a", "--", "true"], 4, "EMULATOR_OFF"),
        (["up", "nowhere", "-o", "json"], 2, "CONFIG_INVALID"),
        (["up", "lan", "--backend", "magic"], 2, "CONFIG_INVALID"),
        (["set", "a", "b", "--rate", "fast"], 2, "CONFIG_INVALID"),
        (["set", "a", "b"], 2, "CONFIG_INVALID"),
    ],
)
def test_errors_have_codes_and_statuses(tmp_path: Path, arguments: list[str], status: int, code: str) -> None:
    done = wan(tmp_path / "state", *arguments)
    assert done.returncode == status
    assert f"error[{code}]: " in done.stderr
    if "json" in arguments:
        assert json.loads(done.stdout)["error"]["code"] == code
    else:
        assert done.stdout == ""


def test_quantities() -> None:
    assert _quantity("512kbit", RATES) == 0.512
    assert _quantity("2.5", RATES) == 2.5
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        _quantity("-3mbit", RATES)


@pytest.mark.netns
@pytest.mark.usefixtures("emulator_works", "no_leaks")
def test_a_day_at_the_command_line(tmp_path: Path) -> None:
    up = wan(tmp_path, "up", "seed-2", "-o", "json")
    try:
        assert up.returncode == 0, up.stderr
        assert wan(tmp_path, "up", "seed-2").returncode == 8
        inside = wan(tmp_path, "exec", "shanghai", "--", "sh", "-c", "ip -br addr; exit 7")
        assert inside.returncode == 7
        assert "10.213.1.2" in inside.stdout
        change = ["--both", "--rate", "50mbit", "--delay", "2ms", "--loss", "1%"]
        assert wan(tmp_path, "set", "shanghai", "chongqing", *change).returncode == 0
        assert wan(tmp_path, "partition", "chongqing").returncode == 0
        links = json.loads(wan(tmp_path, "status", "-o", "json").stdout)["data"]["links"]
        row = next(link for link in links if link["src"] == "shanghai" and link["dst"] == "chongqing")
        assert (row["rate_mbps"], row["delay_ms"], row["rtt_ms"], row["loss"]) == (50, 2, 4, 0.01)
        assert row["cut"]
        assert isinstance(row["bytes"], int)
        assert wan(tmp_path, "heal").returncode == 0
        assert "FROM" in wan(tmp_path, "status").stdout
        assert wan(tmp_path, "exec", "nowhere", "--", "true").returncode == 4
        assert Emulator.attach(tmp_path).regions == ("shanghai", "chongqing")
        calibrated = wan(tmp_path, "calibrate", "--link", "shanghai:control", "--seconds", "0.5", "-o", "json")
        assert json.loads(calibrated.stdout)["data"]["links"][0]["probe"] == "tcp"
        assert json.loads((tmp_path / "calibration.json").read_text())["profile"] == "seed-2"
    finally:
        assert wan(tmp_path, "down").returncode == 0
    assert wan(tmp_path, "status").returncode == 4


@pytest.mark.netns
@pytest.mark.usefixtures("emulator_works", "no_leaks")
def test_the_examples_of_the_help_run_one_after_the_other(tmp_path: Path) -> None:
    """All but `calibrate`, whose verdict is the machine's: it runs above, and in test_accuracy.py."""
    shown = {command.callback.__name__.strip("_"): command.epilog for command in app.registered_commands}
    assert set(shown) == {"up", "status", "exec", "set", "partition", "heal", "calibrate", "down", "profiles"}
    for name, epilog in shown.items():
        if name == "calibrate":
            continue
        words = shlex.split(epilog.removeprefix("Example: geofed emulator "))
        done = wan(tmp_path, *words)
        assert done.returncode == 0, (name, done.stderr)
        if name == "exec":
            assert "10." in done.stdout
    assert wan(tmp_path, "status").returncode == 4
