"""`audit verify` and `agent audit verify` with witnesses: both check the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run_here

from tests.proto.test_audit import CONTROL, OTHER, OWN, STARTED, head_of, told


@pytest.mark.parametrize("command", [("audit",), ("agent", "audit")])
def test_a_log_of_a_region_and_its_witness(command: tuple[str, ...], tmp_path: Path) -> None:
    def written(name: str, lines: list[str]) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    def verified(*arguments: str) -> tuple[int, str, str]:
        found = run_here(*command, "verify", *arguments, program="geofed")
        return found.returncode, found.stdout, " ".join(found.stderr.split())

    witness = ("--witness", written("control", CONTROL))
    own = written("own", told([{**STARTED, "user": "ann\u2028x"}], OTHER, "a"))
    assert verified(own)[0] == 0, "a character that ends a line elsewhere"
    own = written("own", OWN)
    assert verified(own, *witness, "--region", "a")[::2] == (0, "")
    code, _, why = verified(own, *witness, "--region", "b")
    assert (code, "it is the log of region a, not of region b" in why) == (2, True)
    code, _, why = verified(own, "--witness", written("cut", CONTROL[:1]))
    assert (code, "the file ends before the head of the log" in why) == (8, True)
    code, _, why = verified(own, "--witness", written("none", told([], OTHER)))
    assert (code, "it has no head of the log of region a" in why) == (2, True)
    code, _, why = verified(own, "--witness", own)
    assert (code, "it is not the log of a control plane" in why) == (2, True)
    code, _, why = verified(written("odd", [OWN[0], '{"entry": "\\ud800", "hash": "x"}', *OWN[2:]]))
    assert (code, "line 2: entry 1 is not the one that was recorded here" in why) == (8, True)
    code, _, why = verified(written("bare", [json.dumps({"format": "geofed-audit/1", "federation": "f"}), *OWN[1:]]))
    assert (code, "says that it is the log of the control plane, its head region a" in why) == (8, True)
    before = told([STARTED] * 5, OTHER, "a")
    entries: list[dict[str, object]] = [{"kind": "region.head", "region": "a", "error": "none"}]
    entries += [{"kind": "region.head", "region": "a", "head": head_of(one)} for one in (before, OWN)]
    code, _, why = verified(own, "--witness", written("both", told(entries, OTHER)))
    assert (code, "that another key has signed, which are not compared: 1;" in why) == (0, True)
    assert "whose head was not valid, so that it is not compared: 1" in why


@pytest.mark.processes
@pytest.mark.parametrize("command", [("audit",), ("agent", "audit")])
def test_a_log_that_can_be_read_only_once(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "control").write_text("".join(f"{line}\n" for line in CONTROL))
    argv = [
        sys.executable,
        "-m",
        "geofed.cli",
        *command,
        "verify",
        "/dev/stdin",
        "--witness",
        str(tmp_path / "control"),
    ]
    content = "".join(f"{line}\n" for line in OWN)
    found = subprocess.run(argv, input=content, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_state_directory_is_named_after_the_command(tmp_path: Path) -> None:
    arguments = ("agent", "audit", "--state-dir", str(tmp_path), "export", str(tmp_path / "own"))
    found = run_here(*arguments, program="geofed")
    assert (found.returncode, "--state-dir is an option of export" in found.stderr) == (2, True)
