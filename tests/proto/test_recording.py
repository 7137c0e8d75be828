"""Values that a task logs, in a process with a recorder and in one without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import geofed
from geofed_pb.bounds import LOGGED_NAME_BYTES, MOST_LOGGED
from geofed_pb.user_code.recording import Recorder, log_losses, recording

ROOT = Path(__file__).resolve().parents[2]


def test_values_are_summed_by_round_and_name() -> None:
    recorder = Recorder()
    with recording(recorder):
        geofed.log("before any round", 1)
        for recorder.round in (3, 4):
            geofed.log("norm", recorder.round)
            geofed.log("norm", 1)
    geofed.log("norm", 100)  # no invocation runs any more
    assert recorder.up_to(3) == {3: {"norm": (4.0, 2)}}
    assert recorder.up_to(4) == {3: {"norm": (4.0, 2)}, 4: {"norm": (5.0, 2)}}
    again = Recorder()
    again.restore({"step": 7.0, **recorder.facts()})
    assert again.up_to(4) == recorder.up_to(4)
    recorder.round = 5
    recorder.add("norm", 1)
    assert set(recorder.up_to(5)) == {4, 5}, "what no report can need any more is dropped"


def test_names_and_values_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    recorder.round = 1
    for number in range(MOST_LOGGED + 5):
        recorder.add(f"n{number}", number)
    recorder.add("n0", float("inf"))
    recorder.add("n0", float("nan"))
    sums = recorder.up_to(1)[1]
    assert list(sums) == [f"n{number}" for number in range(MOST_LOGGED)]
    assert sums["n0"] == (0.0, 1)
    assert len(capsys.readouterr().err.splitlines()) == 2, "each is said once"


def test_parts_of_a_loss_are_logged_apart_from_what_the_task_logs() -> None:
    recorder = Recorder()
    log_losses({"fit": 1.0})  # no invocation runs
    with recording(recorder):
        recorder.round = 2
        geofed.log("fit", 8.0)
        for value in (1.0, 2.0):
            log_losses({"fit": value, "step": 4.0, "a\nb": 1.0, "x" * LOGGED_NAME_BYTES: 1.0, "odd": float("nan")})
    assert recorder.up_to(2) == {2: {"fit": (8.0, 1), "train/fit": (3.0, 2), "train/step": (8.0, 2)}}


@pytest.mark.parametrize("name", ["", "x" * (LOGGED_NAME_BYTES + 1), "a\nb", "a\x00", "loss", "system/cpu_cores", 3])
def test_a_name_that_cannot_be_shown_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="log: "):
        Recorder().add(name, 1)


@pytest.mark.processes
def test_a_task_module_runs_in_a_plain_process_without_what_the_client_needs() -> None:
    code = "import sys, geofed; geofed.log('a', 1); print(sorted({'torch', 'grpc', 'pydantic'} & set(sys.modules)))"
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=path, check=True)
    assert done.stdout.strip() == "[]"
