"""The shell completes commands, options, and the names of what there is, asked as shells ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run_here

from tests.control_plane.cli.conftest import HOLD, Federation, Run

pytestmark = pytest.mark.processes

PROGRAMS = Path(sys.executable).parent


def _completed(run: Run, folder: Path, *words: str, program: str = "geofed", **environment: str) -> list[str]:
    """What bash offers for the last word, by the script that `completion` prints."""
    script = folder / "completion"
    script.write_text(run_here("completion", "bash", program=program).stdout)
    quoted = " ".join(f"'{word}'" for word in words)
    function = f"_{program.replace('-', '_')}_completion"
    asked = f"COMP_WORDS=({program} {quoted}); COMP_CWORD={len(words)}; {function} '{PROGRAMS / program}'"
    code = f'source {script}; {asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout.split()


def test_commands_and_options(run: Run, tmp_path: Path) -> None:
    for program in ("geofed", "control-plane"):
        assert _completed(run, tmp_path, "su", program=program) == ["submit", "support-bundle"]
    assert _completed(run, tmp_path, "agent", "jo") == ["join"]
    of_regions = ["list", "describe", "invite", "drain", "undrain", "revoke", "remove"]
    assert _completed(run, tmp_path, "region", "") == of_regions
    assert "--ttl" in _completed(run, tmp_path, "region", "invite", "a", "--")
    assert _completed(run, tmp_path, "submit", "--req") == ["--request-id"]


def test_names(live: Federation, run: Run, job_file: str, tmp_path: Path) -> None:
    job = run("submit", job_file, "--name", "to-complete", *HOLD, "-o", "name").out.strip()
    assert run("user", "add", "zoe").status == 0
    try:
        for command in ("describe", "cancel", "status"):
            assert _completed(run, tmp_path, command, "to-compl") == [job], command
        assert job in _completed(run, tmp_path, "logs", "")
        assert _completed(run, tmp_path, "region", "describe", "") == ["a", "b"]
        assert _completed(run, tmp_path, "logs", job, "--region", "") == ["a", "b"]
        assert _completed(run, tmp_path, "scale", job, "") == ["a=", "b="]
        assert _completed(run, tmp_path, "user", "remove", "zo") == ["zoe"]
        other = ("--context", str(live.context), "to-compl")
        assert _completed(run, tmp_path, "describe", *other, GEOFED_CONTEXT="/none") == [job]
    finally:
        assert run("cancel", job, "--yes").status == 0


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_ask_by_their_own_scripts(live: Federation, run: Run, shell: str) -> None:
    script = run("completion", shell).out
    assert f"_CONTROL_PLANE_COMPLETE=complete_{shell}" in script
    script = run_here("completion", shell, program="geofed").stdout
    assert f"_GEOFED_COMPLETE=complete_{shell}" in script
    asked = {"_TYPER_COMPLETE_ARGS": "geofed region describe ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    environment = {**os.environ, **asked, "_GEOFED_COMPLETE": f"complete_{shell}"}
    ran = subprocess.run([str(PROGRAMS / "geofed")], capture_output=True, text=True, env=environment, check=True)
    assert ran.stderr == ""
    assert "a" in ran.stdout.replace('"', " ").split()
    assert "live" in ran.stdout, "the region's state is shown beside its name"


def test_nothing_is_offered_where_no_control_plane_answers(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_bytes(b"")
    for context in ("/none", str(tmp_path / "ca.crt")):
        assert _completed(run, tmp_path, "describe", "", GEOFED_CONTEXT=context) == []
