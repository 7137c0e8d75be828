"""What a task says is bounded on its way, and what cannot be said keeps nothing else from being told."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from support.failures import AT_WORK, PROBED, Told, failing_at_work, told
from support.running import TEMPLATES, UNHURRIED, Running, check_succeeded, eventually

from geofed_pb.bounds import MOST_METRICS, TEXT_BYTES, TRUNCATED
from geofed_pb.v1 import agent_pb2, common_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

_SHIPPED = (TEMPLATES / "image-classification" / "task.py").read_text()
TINY = ("train.end.epochs=1", "train.evaluateEvery=0", "wan.interval=10")
LONG_TEXT = "def loss(model, batch):\n    raise RuntimeError('unexpected keys: ' + 'größer, ' * 1_000_000)\n"
UNFIT_TEXT = "def loss(model, batch):\n    raise RuntimeError('cannot read caf\\udce9\\0.txt')\n"
NOISY = "def loss(model, batch):\n    for n in range(100_000):\n        print('line', n)\n    undefined_name()\n"
MANY_METRICS = (
    "def metrics(model, batches):\n"
    "    many = {f'recall of class number {n} of all the classes that there are': 0.5 for n in range(60_000)}\n"
    "    return {'n\\udce9' * 10_000: float('nan'), 7: float('inf'), **many}\n"
)


@pytest.fixture
def running(running_north: Running) -> Running:
    return running_north


def _job(running: Running, task: str) -> Path:
    """The shipped job, its task module changed at the end."""
    return running.job_folder(f"{_SHIPPED}\n\n{task}") / "job.yaml"


def _submit(running: Running, task: str) -> Told:
    """How the command says that such a job has failed."""
    job = str(running.job_folder(failing_at_work(_SHIPPED, task)) / "job.yaml")
    running.federation.control_plane("submit", job, "--set", PROBED, "--dry-run")
    chosen = [part for setting in (*TINY, AT_WORK) for part in ("--set", setting)]
    return told(running.federation.control_plane("submit", job, *chosen, "--wait", check=False))


def _newest(running: Running) -> str:
    return running.federation.control_plane("list", "--all", "-o", "name").stdout.split()[0]


def _next_job_succeeds(running: Running) -> None:
    check_succeeded(running.wait_end(running.submit(*TINY, task=_SHIPPED)), accuracy=0.0)


def test_an_error_text_of_megabytes_is_cut_and_the_next_job_succeeds(running: Running) -> None:
    failure = _submit(running, LONG_TEXT)
    assert (failure.code, failure.exit_status) == ("JOB_FAILED", 1)
    assert "TASK_FAILED: " in failure.text
    assert "loss raised RuntimeError: unexpected keys: größer, größer" in failure.text
    assert f"{TRUNCATED} at task.py:" in failure.text
    error = running.describe(_newest(running))["error"]
    assert error["code"] == "TASK_FAILED"
    assert len(error["message"].encode()) <= TEXT_BYTES
    _next_job_succeeds(running)


def test_an_error_text_that_is_no_utf_8_is_shown_escaped(running: Running) -> None:
    failure = _submit(running, UNFIT_TEXT)
    assert "TASK_FAILED: " in failure.text
    assert r"loss raised RuntimeError: cannot read caf\xe9\x00.txt at task.py:" in failure.text


def test_the_traceback_is_in_the_log_however_much_was_written_before(running: Running) -> None:
    failure = _submit(running, NOISY)
    assert "TASK_FAILED: " in failure.text
    assert "NameError" in failure.text
    logs = running.federation.control_plane("logs", _newest(running)).stdout
    assert "line 99999" in logs
    assert "Traceback" in logs
    assert "undefined_name()" in logs
    assert " lines dropped" in logs
    assert len(logs) < 20 << 20


def test_of_very_many_metrics_the_first_are_kept_and_it_is_said(running: Running) -> None:
    chosen = [part for setting in TINY for part in ("--set", setting)]
    job = str(_job(running, MANY_METRICS))
    name = running.federation.control_plane("submit", job, *chosen, "-o", "name").stdout.strip()
    described = running.wait_end(name)
    assert described["state"] == "succeeded", described["error"]
    assert len(described["result"]["metrics"]) == MOST_METRICS
    assert described["result"]["metrics"]["7"] is None
    events = [event for event in running.events(name) if event["kind"] == "partition.unmeasured"]
    assert "more than 1,000 metrics" in events[0]["text"]


def test_a_folder_with_a_name_that_is_no_utf_8_is_not_offered_and_says_which(running: Running) -> None:
    condition = running.federation.agent_status("oslo")["condition"]
    assert condition.startswith("dataset words is not offered: SHARD_UNREADABLE: ")
    assert r"words/caf\xe9.txt: the name is not UTF-8" in condition


def _stop(running: Running, region: str) -> Path:
    """End a region's agent in order; its state directory."""
    process = running.federation.processes[region]
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)
    return running.federation.region_state(region) / "state"


def _put_back(running: Running, region: str, copy: Path) -> None:
    state = _stop(running, region)
    shutil.rmtree(state)
    shutil.copytree(copy, state, symlinks=True)
    running.federation.start_agent(region)
    running.federation.wait_connected([region])


@pytest.mark.parametrize("exchange", ["synchronous", "background"])
def test_a_region_whose_state_is_put_back_from_a_copy_takes_part_again(
    running: Running, tmp_path: Path, exchange: str
) -> None:
    # In the background the regions don't wait for the one that is stopped, and must not reach the end meanwhile.
    epochs, task = (16, None) if exchange == "synchronous" else (400, UNHURRIED)
    long = (f"train.end.epochs={epochs}", "train.evaluateEvery=0", "wan.interval=10", f"wan.exchange={exchange}")
    job = running.submit(*long, task=task)
    running.wait_round(job, 2)
    shutil.copytree(_stop(running, "oslo"), tmp_path / "copy", symlinks=True)
    running.federation.start_agent("oslo")
    # The copy may hold a few rounds that were not reported; later ones make it older.
    running.wait_round(job, 10, "oslo")
    _put_back(running, "oslo", tmp_path / "copy")
    described = running.wait_end(job)
    if exchange == "synchronous":
        check_succeeded(described, accuracy=0.0)
        # Of a job that is over, as that of one that has failed.
        _put_back(running, "oslo", tmp_path / "copy")
    else:
        assert described["error"]["code"] == "STATE_INVALID", "as after the loss of a disk"
    _next_job_succeeds(running)


def test_a_message_that_an_earlier_version_has_left_is_cut_and_those_behind_it_go_on(running: Running) -> None:
    state = _stop(running, "oslo")
    text = "unexpected keys: " + "layer, " * 1_200_000
    error = common_pb2.Error(code="TASK_FAILED", message=text)
    report = agent_pb2.PartitionReport(job="gone", state="failed", error=error, condition=text)
    left = [agent_pb2.FromAgent(partition=report).SerializeToString(), b"\xff" * 100]
    with contextlib.closing(sqlite3.connect(state / "agent.db")) as database:
        database.executemany("insert into reports (message) values (?)", [(message,) for message in left])
        database.commit()
    running.federation.start_agent("oslo")
    running.federation.wait_connected(["oslo"])
    _next_job_succeeds(running)
    with contextlib.closing(sqlite3.connect(state / "agent.db")) as database:

        def delivered() -> bool:
            return database.execute("select count(*) from reports").fetchone() == (0,)

        eventually(delivered, "nothing waits", 20)
        assert database.execute("select kind, message from set_aside").fetchall() == [("report", b"\xff" * 100)]
