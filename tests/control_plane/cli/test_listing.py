"""`list --label`, `rename`, `history` and `top`, as a user meets them."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from control_plane._view import round_rows
from control_plane.cli.commands.region import regions_table
from tests.control_plane.cli.conftest import HOLD, ROOT, Federation, Run

pytestmark = pytest.mark.processes


def test_jobs_are_selected_by_their_labels(live: Federation, run: Run, job_file: str) -> None:
    def submitted(name: str, labels: str) -> str:
        labelled = ("--name", name, "--set", f"metadata.labels={labels}")
        return run("submit", job_file, *labelled, *HOLD, "-o", "name").out.strip()

    cat = submitted("cat", "{team: vision, stage: test}")
    dog = submitted("dog", "{team: vision}")
    word = submitted("word", "{team: text}")
    try:

        def listed(*options: str) -> list[str]:
            return run("list", "-o", "name", *options).out.split()

        assert listed("-l", "team=vision") == [dog, cat]
        assert listed("-l", "team=vision", "-l", "stage=test") == [cat]
        assert listed("-l", "team=vision", "--limit", "1") == [dog]
        assert listed("--label", "team=text") == [word]
        none = run("list", "-l", "team=audio")
        assert (none.status, none.err.strip()) == (0, "no jobs with team=audio are running; --all shows ended ones")
        wrong = run("list", "-l", "vision")
        assert (wrong.status, "NAME=VALUE" in wrong.err) == (2, True)
        (view,) = run("list", "-l", "stage=test", "-o", "json").data
        assert view["labels"] == {"team": "vision", "stage": "test"}
    finally:
        for job in (cat, dog, word):
            run("cancel", job, "--yes")


def test_a_renamed_job_is_found_by_its_new_name(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "--name", "before", *HOLD, "-o", "name").out.strip()
    assert run("rename", "before", "after").status == 0
    assert run("describe", "after", "-o", "json").data["id"] == job
    assert run("describe", "before").status == 4
    assert run("rename", job, "after").status == 0, "again"
    events = [event for event in run("events", job, "-o", "json").data if event["kind"] == "job.renamed"]
    assert [event["data"] for event in events] == [{"before": "before", "name": "after", "by": "operator"}]
    wrong = run("rename", job, "Not A Name")
    assert (wrong.status, wrong.err.partition(":")[0]) == (3, "error[SPEC_INVALID]")
    assert run("cancel", "after", "--yes").status == 0
    assert run("rename", "after", "at-last", "-o", "json").data["name"] == "at-last", "an ended one, too"


def test_the_history_has_a_row_for_each_reported_round(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    rows = run("history", job, "-o", "json").data
    assert {row["region"] for row in rows} == {"a", "b"}
    assert all(row["accuracy"] == 0.9 for row in rows if "accuracy" in row)
    heads, *lines = run("history", job).out.splitlines()
    assert heads.split() == ["ROUND", "REGION", "TIME", "STEP", "SAMPLES", "LOSS", "TEST", "LOSS", "ACCURACY"]
    assert len(lines) == len(rows)


def test_rounds_are_joined_with_their_metrics() -> None:
    def event(kind: str, region: str, **data: object) -> dict[str, object]:
        return {"kind": kind, "region": region, "at": "t", "data": data}

    rows = round_rows(
        [
            event("partition.round", "b", round=2, step=4, samples=40, loss=0.5),
            event("job.running", ""),
            event("partition.round", "a", round=1, step=2, samples=20, loss=0.7),
            event("partition.evaluated", "a", round=1, metrics={"accuracy": 0.9, "loss": 0.6}, samples=5),
        ]
    )
    assert rows == [
        {
            "round": 1, "region": "a", "at": "t", "step": 2, "samples": 20, "loss": 0.7, "accuracy": 0.9,
            "test_loss": 0.6,
        },
        {"round": 2, "region": "b", "at": "t", "step": 4, "samples": 40, "loss": 0.5},
    ]  # fmt: skip


def test_top_is_redrawn_on_a_terminal_until_it_is_interrupted(live: Federation) -> None:
    master, terminal = pty.openpty()
    poll = select.poll()
    poll.register(master, select.POLLIN)
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    argv = [sys.executable, "-m", "geofed.cli", "top", "--interval", "0.2"]
    with subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown, deadline = b"", time.monotonic() + 30
        while shown.count(b"REGION") < 3:
            assert time.monotonic() < deadline, shown
            if poll.poll(1_000):
                shown += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        # What is still drawn must be read, or the process would not end.
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the process has closed it
                if poll.poll(200):
                    os.read(master, 65536)
        assert process.wait(10) == 130
    os.close(master)
    assert b"Ctrl-C ends the view" in shown


def test_devices_are_a_column_where_a_region_has_any() -> None:
    def shown(name: str, devices: dict[str, object] | None) -> dict[str, object]:
        return {
            "name": name, "cloud": "test", "state": "live", "capacity": {"workers": 4, "devices": devices},
            "datasets": [], "isolation": "", "last_contact": None, "agent_version": "", "condition": "",
        }  # fmt: skip

    plain = shown("east", None)
    with_devices = shown("west", {"kind": "NVIDIA H100", "count": 4, "memory_mb": 81920})
    never_connected = {**shown("north", None), "capacity": None}
    assert "DEVICES" not in regions_table([plain, never_connected])
    head, *rows = regions_table([plain, with_devices, never_connected]).splitlines()
    assert "DEVICES" in head
    assert [row.count("4 x NVIDIA H100") for row in rows] == [0, 1, 0]
