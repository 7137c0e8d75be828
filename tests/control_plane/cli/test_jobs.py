"""Jobs by the command line: exit statuses, watching over a restart, detaching, models."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import select
import signal
import stat
import subprocess
import tarfile
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from control_plane.cli._connect import ask_control_plane
from control_plane.cli._settings import settings
from tests.control_plane.cli.conftest import HOLD, Federation, Run, running_federation
from tests.control_plane.cli.scripted_agents import MODEL

pytestmark = pytest.mark.processes

FAIL = ("--set", "task.config.play=fail")


def test_submit_answers_at_once_and_once_for_each_request(live: Federation, run: Run, job_file: str) -> None:
    took = []
    for name in ("one", "another", "a third"):  # a busy machine may hold one up
        begun = time.monotonic()
        assert run("submit", job_file, "--request-id", name, "-o", "json").data["created"]
        took.append(time.monotonic() - begun)
    assert min(took) < 1
    first = run("submit", job_file, "--request-id", "once", "-o", "json")
    assert first.data["created"]
    again = run("submit", job_file, "--request-id", "once", "-o", "json")
    assert (again.data["id"], again.data["created"]) == (first.data["id"], False)
    other = run("submit", job_file, "--request-id", "once", "--name", "other", "-o", "json")
    assert (other.status, other.error["code"]) == (8, "REQUEST_CONFLICT")


def test_a_watched_job_ends_with_its_account(live: Federation, run: Run, job_file: str) -> None:
    ran = run("submit", job_file, "--watch")
    assert ran.status == 0
    assert "planned over a, b" in ran.err
    for part in ("succeeded", "accuracy  0.9000", "a > b", "egress", "$0.50", "PREDICTED", "MEASURED", "sha256:"):
        assert part in ran.out
    assert "planned over" not in ran.out


def test_a_support_bundle_has_what_a_report_needs_and_no_secret(
    live: Federation, run: Run, job_file: str, tmp_path: Path
) -> None:
    secret = "task.env.HF_TOKEN=hf-abcdefgh12345678"
    job = run("submit", job_file, "--wait", "--set", secret, "-o", "json").data["id"]
    file = tmp_path / "report.tar.gz"
    shown = run("support-bundle", str(file), job, "-o", "json").data
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as archive:
        held = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]
    assert sorted(held) == shown["documents"]
    assert {f"{job}/job.json", f"{job}/events.json", f"{job}/log.json", "regions.json", "versions.json"} <= set(held)
    assert json.loads(held[f"{job}/events.json"])[-1]["kind"] == "job.succeeded"
    assert json.loads(held["versions.json"])["packages"]["grpcio"]
    assert "HF_TOKEN" in held[f"{job}/job.json"]
    assert not [name for name, text in held.items() if "hf-abcdefgh12345678" in text]


def test_a_watched_job_is_a_stream_of_events_in_jsonl(live: Federation, run: Run, job_file: str) -> None:
    ran = run("submit", job_file, "--watch", "-o", "jsonl")
    *events, last = [json.loads(line)["data"] for line in ran.out.splitlines()]
    assert [event["cursor"] for event in events] == sorted({event["cursor"] for event in events})
    assert [event["terminal"] for event in events] == [False] * (len(events) - 1) + [True]
    assert last["state"] == "succeeded"
    assert last["result"]["metrics"]["accuracy"] == pytest.approx(0.9)


@pytest.mark.parametrize("command", ["--watch", "--wait"])
def test_a_job_that_fails_ends_with_1(live: Federation, run: Run, job_file: str, command: str) -> None:
    ran = run("submit", job_file, command, *FAIL, "-o", "json")
    assert (ran.status, ran.error["code"]) == (1, "JOB_FAILED")
    assert "TASK_FAILED" in ran.error["message"]
    assert "loss raised ValueError" in ran.error["message"]


def test_waiting_can_be_given_up(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "-o", "name", *HOLD).out.strip()
    assert run("wait", job, "--for", "running", "-o", "json").data["state"] == "running"
    ran = run("wait", job, "--timeout", "300ms")
    assert ran.status == 7
    assert "error[WAIT_TIMEOUT]" in ran.err
    assert run("cancel", job).status == 2
    assert run("cancel", job, "--yes", "--reason", "enough").status == 0
    assert run("wait", job).status == 1
    assert run("cancel", run("submit", job_file, "--wait", "-o", "name").out.strip(), "--yes").status == 8


def test_watching_outlasts_the_control_plane(
    tmp_path: Path, run: Run, job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "federation").mkdir()
    with running_federation(tmp_path / "federation") as stage:
        monkeypatch.setenv("GEOFED_CONTEXT", str(stage.context))
        job = run("submit", job_file, "-o", "name", *HOLD).out.strip()
        assert run("wait", job, "--for", "running").status == 0
        watcher = stage.command("status", job, "--watch")
        read_until(watcher, "training has begun")
        stage.kill()
        said = read_until(watcher, "control plane unreachable; retrying")
        stage.start()
        assert run("cancel", job, "--yes").status == 0
        said += read_until(watcher, "control plane reachable again")
        out, err = watcher.communicate(timeout=20)
        said += err.decode()
    assert watcher.returncode == 1
    assert said.count("retrying") == 1
    assert "JOB_CANCELLED" in said
    assert "cancelled" in out.decode()


def test_interrupting_a_watch_leaves_the_job(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "-o", "name", *HOLD).out.strip()
    watcher = live.command("status", job, "--watch")
    read_until(watcher, "submitted")
    watcher.send_signal(signal.SIGINT)
    out, err = watcher.communicate(timeout=10)
    assert watcher.returncode == 130
    assert f"geofed status {job} --watch" in err.decode()
    assert not out
    assert run("status", job, "-o", "json").data["state"] in ("starting", "running")
    assert run("cancel", job, "--yes").status == 0
    assert run("wait", job).status == 1


def test_an_interruption_is_not_lost_where_it_is_overheard_at_first(live: Federation) -> None:
    heard = []

    async def deaf(client: object) -> None:
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
            heard.append("once")
        await asyncio.sleep(30)

    pressed = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pressed.start()
        with pytest.raises(SystemExit) as ended:
            ask_control_plane(live.context, deaf)
        pressed.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert len(heard) == 3


def test_a_plan_is_shown_without_running_it(live: Federation, run: Run, job_file: str) -> None:
    before = [job["id"] for job in run("list", "--all", "-o", "json").data]
    shown = run("submit", job_file, "--dry-run")
    assert shown.status == 0
    for part in ("stays in a", "WAN bytes", "cost", "egress to b", "a > b"):
        assert part in shown.out
    assert [job["id"] for job in run("list", "--all", "-o", "json").data] == before
    ran = run("submit", job_file, "--dry-run", "--set", "data.dataset=cats", "-o", "json")
    assert (ran.status, ran.error["code"]) == (9, "DATASET_UNKNOWN")


@pytest.mark.parametrize(("answer", "status", "more"), [("n", 2, 0), ("", 2, 0), ("y", 0, 1)])
def test_on_a_terminal_the_plan_is_shown_and_confirmed(
    live: Federation, run: Run, job_file: str, monkeypatch: pytest.MonkeyPatch, answer: str, status: int, more: int
) -> None:
    before = len(run("list", "--all", "-o", "json").data)
    for module in ("_connect", "commands.submit"):
        monkeypatch.setattr(f"control_plane.cli.{module}.can_ask", lambda: settings.ask)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    asked = run("submit", job_file, "--set", "objective.budget=9")
    assert asked.status == status
    for part in ("REGION  SAMPLES  WORKERS", "WAN bytes", "cost", "$9.00 is kept", "Submit this job? [y/N]"):
        assert part in asked.err
    assert len(run("list", "--all", "-o", "json").data) == before + more
    for never in (["--yes"], ["--no-input"]):
        ran = run("submit", job_file, *never, "-o", "name")
        assert (ran.status, "Submit this job?" in ran.err) == (0, False)
    refused = run("submit", job_file, "--set", "objective.deadline=1s")
    assert (refused.status, "Submit this job?" in refused.err) == (9, False)


def test_two_job_files_are_compared_by_their_plans(live: Federation, run: Run, job_file: str) -> None:
    other = Path(job_file).with_name("other.yaml")
    other.write_text(Path(job_file).read_text().replace("batch: 10", "batch: 20").replace("interval: 2", "interval: 1"))
    told = run("explain", "--diff", job_file, str(other), "-o", "json").data
    rows = {row["what"]: (row["before"], row["after"]) for row in told["changes"]}
    assert rows["train.batch"] == ("10", "20")
    assert rows["advanced.wan.interval"] == ("2", "1")
    assert rows["a"][0].endswith("batch 10")
    assert rows["a"][1].endswith("batch 20")
    assert {"time", "WAN bytes", "cost"} <= set(rows)
    assert ("warnings" in rows, set(told["warnings"])) == (False, {"before", "after"})
    assert not {"exchange", "task.module"} & set(rows)
    assert "train.batch" in run("explain", str(other), "--diff", job_file).out
    wrong = run("explain", "--diff", job_file, str(other), "--set", "data.dataset=cats")
    assert (wrong.status, f"{job_file}: " in wrong.err) == (9, True)


def test_a_published_rule_chooses_the_workers(live: Federation, run: Run, job_file: str) -> None:
    for told in (
        run("explain", job_file, "--method", "greedy", "-o", "json"),
        run("submit", job_file, "--method", "greedy", "--dry-run", "-o", "json"),
        run("explain", job_file, "--set", "objective.method=greedy", "-o", "json"),
    ):
        assert told.status == 0
        assert told.data["codec"] == "fp32"
        assert told.data["alternatives"][0]["decision"] == "method greedy"
        assert told.data["alternatives"][0]["text"].startswith("auto: ")
    assert "the job asks for greedy" in run("explain", job_file, "--method", "greedy").out
    without = run("explain", job_file, "--method", "fasdl")
    assert (without.status, "geofed profile" in without.err) == (9, True)
    cut = run("explain", job_file, "--method", "greedy", "--set", "parallelism={pipeline: {stages: 2}}")
    assert (cut.status, "knows neither pipelines" in cut.err) == (3, True)
    tuned = ("train.scaling=tuned", "train.end.goal={metric: loss, atMost: 0.1}", "train.evaluateEvery=1")
    scaled = run("explain", job_file, "--method", "greedy", *(part for one in tuned for part in ("--set", one)))
    assert (scaled.status, "give only one" in scaled.err) == (3, True)
    wrong = run("submit", job_file, "--method", "best", "--dry-run")
    assert (wrong.status, "objective.method" in wrong.err) == (3, True)


def test_a_batch_is_chosen_and_explained(live: Federation, run: Run, job_file: str) -> None:
    auto = [part for one in ("train.batch=auto", "train.end={epochs: 20}") for part in ("--set", one)]
    assert run("validate", job_file, *auto).status == 0
    told = run("explain", job_file, *auto, "-o", "json").data
    (batch,) = {part["batch"] for part in told["partitions"]}
    assert batch in told["batches"]
    assert f"batch {batch}" in {other["decision"] for other in told["alternatives"]}
    assert re.search(
        rf"^batch +{batch} samples of a worker in a step", run("explain", job_file, *auto).out, re.MULTILINE
    )
    hurried = run("explain", job_file, *auto, "--set", "objective.deadline=1s")
    assert (hurried.status, "could be promised" in hurried.err) == (9, True)
    refused = run("validate", job_file, *auto, "--set", "train.accumulate=2")
    assert (refused.status, "`train.batch: auto` cannot be used with `train.accumulate`" in refused.err) == (3, True)


def test_a_plan_is_explained_and_drawn(live: Federation, run: Run, job_file: str, tmp_path: Path) -> None:
    before = [job["id"] for job in run("list", "--all", "-o", "json").data]
    plot = tmp_path / "plan.svg"
    told = run("explain", job_file, "--plot", str(plot), "-o", "json")
    assert told.status == 0
    assert told.data["residency"] == {"a": "stays in a (rule: region)", "b": "stays in b (rule: region)"}
    assert {"a>b", "b>a"} == set(told.data["estimate"]["link_bytes"])
    drawn = ElementTree.fromstring(plot.read_text())
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a", "b"} < texts
    assert any("a → b: " in text for text in texts if text)
    for part in ("DATA OF", "DECISION", "ALTERNATIVE", "egress to b"):
        assert part in run("explain", job_file).out
    assert [job["id"] for job in run("list", "--all", "-o", "json").data] == before
    bounded = run("explain", job_file, "--set", "objective.deadline=2h", "--set", "objective.budget=9").out
    assert re.search(r"^deadline +\d{4}-\S+Z is promised; training takes .+ at most$", bounded, re.MULTILINE)
    assert re.search(r"^budget +\$9\.00 is kept: \$\S+ at most is expected", bounded, re.MULTILINE)
    hurried = run("explain", job_file, "--set", "objective.deadline=1s")
    assert hurried.status == 9
    assert "could be promised" in hurried.err
    assert run("explain", job_file, "--plot", str(tmp_path)).status == 2


def test_a_model_is_exported_with_its_manifest(live: Federation, run: Run, job_file: str, tmp_path: Path) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    target = tmp_path / "model.safetensors"
    told = run("export", job, "--output-file", str(target), "-o", "json").data
    assert target.read_bytes() == MODEL
    assert told["digest"] == f"sha256:{hashlib.sha256(MODEL).hexdigest()}"
    manifest = json.loads(Path(told["manifest"]).read_text())
    assert (manifest["job"], manifest["digest"]) == (job, told["digest"])
    assert manifest["data"]["residency"] == {"a": "stays in a (rule: region)", "b": "stays in b (rule: region)"}
    assert run("export", job, "--output-file", str(target)).status == 0  # the same bytes: nothing to lose
    target.write_text("something else")
    assert run("export", job, "--output-file", str(target)).status == 2
    assert target.read_text() == "something else"
    assert run("export", job, "--output-file", str(target), "--yes").status == 0
    assert sorted(os.listdir(tmp_path)) == ["job", "model.safetensors", "model.safetensors.manifest.json"]


def test_a_file_that_finds_no_space_is_told(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "--wait", "-o", "json").data["id"]
    ran = run("export", job, "--output-file", "/dev/full", "-o", "json")
    assert (ran.status, ran.error["code"]) == (6, "DISK_FULL")
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    ran = run("explain", job_file, "--plot", "/dev/full", "-o", "jsonl")
    assert ran.status == 6
    assert "DISK_FULL" in ran.err


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ("objective.deadline=3650d", True),
        ("objective.deadline=99999999d", False),
        (f"objective.deadline={'9' * 400}h", False),
        ("objective.deadline=0.01ms", False),
        ("objective.deadline=-2h", False),
        ("objective.deadline=2199-12-31T23:59:59+14:00", True),
        ("objective.deadline=9999-12-31T23:59:59-12:00", False),
        ("objective.deadline=275760-09-13T00:00:00Z", False),
        ("objective.deadline=0001-01-01T00:00:00+14:00", False),
        ("objective={deadline: 1h, soft: [{deadline: 3650d}]}", True),
        ("objective={deadline: 1h, soft: [{deadline: 99999999d}]}", False),
        ("limits.lostRegion=99999999d", False),
        ("limits.lostRegion=3650d", True),
        ("function.slice=99999999d", False),
        ("objective.budget=.inf", False),
        ("train.end.steps=99999999999999999999", False),
        ("train.end={epochs: .inf}", False),
        ("train.batch=4294967296", False),
        ("train.evaluateEvery=99999999999", False),
    ],
)
def test_what_validate_takes_submit_takes(live: Federation, run: Run, job_file: str, setting: str, taken: bool) -> None:
    valid = run("validate", job_file, "--set", setting, "-o", "json")
    asked = run("submit", job_file, "--set", setting, "-o", "json")
    if taken:
        assert (valid.status, asked.status) == (0, 0), asked.err
        run("cancel", asked.data["id"], "--yes")
    else:
        assert (valid.status, valid.error["code"]) == (3, "SPEC_INVALID")
        assert (asked.status, asked.error["code"]) == (3, "SPEC_INVALID")


def test_a_deadline_that_is_over_cannot_be_kept(live: Federation, run: Run, job_file: str) -> None:
    ran = run("submit", job_file, "--set", "objective.deadline=2001-01-01T00:00:00Z", "-o", "json")
    assert (ran.status, ran.error["code"]) == (9, "INADMISSIBLE")


def test_what_has_ended_is_not_planned_again(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    told = run("replan", job, "-o", "json")
    assert (told.status, told.error["code"]) == (8, "ILLEGAL_STATE")
    assert told.error["hint"] == f"a new job with `train.initialModel: {{job: {job}}}` starts from its model"
    failed = run("submit", job_file, "--wait", "-o", "name", *FAIL).out.strip()
    error = run("replan", failed, "-o", "json").error
    assert (error["code"], "initialModel" in error["hint"]) == ("ILLEGAL_STATE", False)


def test_what_has_no_model_is_not_exported(live: Federation, run: Run, job_file: str) -> None:
    failed = run("submit", job_file, "--wait", "-o", "name", *FAIL).out.strip()
    told = run("export", failed, "-o", "json")
    assert (told.status, told.error["code"]) == (4, "MODEL_NOT_FOUND")
    assert told.error["message"] == f"job {failed} has failed; it has no model"
    assert told.error["hint"] == f"`geofed events {failed}` shows what happened"
    going = run("submit", job_file, "-o", "name", *HOLD).out.strip()
    assert run("export", going, "-o", "json").error["hint"] == "wait for its first evaluation"
    assert run("cancel", going, "--yes").status == 0


def test_history_can_be_taken_up_where_it_was_left(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    cursors = run("events", job, "-o", "name").out.split()
    rest = run("events", job, "--after", cursors[2], "-o", "name").out.split()
    assert rest == cursors[3:]
    assert run("events", job, "--follow", "-o", "name").out.split() == cursors
    assert run("logs", job, "--region", "b", "-o", "jsonl").out.count("hello from b") == 1
    assert "hello from a" in run("logs", job).out
    late = run("logs", job, "--since", "10m")
    assert (late.out, late.err) == ("", "no lines\n"), "they are from 1970"
    assert "hello from a" in run("logs", job, "--since", "1970-01-01T00:00:00Z").out
    assert run("logs", job, "--since", "1970-01-01T00:00:02+00:00").out == ""
    for wrong, says in (("soon", "is neither a duration like 10m"), ("2026-11-27", "has no time zone")):
        told = run("logs", job, "--since", wrong, "-o", "json")
        assert (told.status, told.error["code"]) == (2, "USAGE")
        assert says in told.error["message"]
    assert run("events", job, "--follow", "-o", "json").status == 2


def test_describe_tells_all(live: Federation, run: Run, job_file: str) -> None:
    job = run("submit", job_file, "--wait", "-o", "name").out.strip()
    shown = run("describe", job).out
    for part in (
        "PLAN",
        "RESULT",
        "stays in a",
        "within a region by the fastest collective there; between regions by ma, in ",
        "a > b",
        "total",
    ):
        assert part in shown
    data = run("describe", job, "-o", "json").data
    assert data["spec"]["metadata"]["name"] == "digits"
    assert data["spec"]["advanced"]["wan"]["interval"] == 2
    assert data["links"][0] == {
        "source": "a", "destination": "b", "state": "closed", "rtt_ms": 220.5, "goodput_mbps": 80.0, "streams": 4,
        "codec": "int8", "interval_steps": 16, "sent_bytes": 2000, "received_bytes": 1800, "staleness_rounds": 1.5,
        "refused_updates": 0,
    }  # fmt: skip
    row = next(line.split() for line in shown.splitlines() if line.startswith("a > b") and "closed" in line)
    assert row == "a > b closed 220.5 80.0 4 int8 16 2.0 kB 1.8 kB 1.5 0".split()  # noqa: SIM905


def read_until(process: subprocess.Popen[bytes], text: str) -> str:
    """What it says on stderr, up to a text."""
    assert process.stderr is not None
    said, deadline = b"", time.monotonic() + 20
    poll = select.poll()
    poll.register(process.stderr, select.POLLIN)
    while text.encode() not in said:
        assert time.monotonic() < deadline, said.decode()
        if poll.poll(500):
            piece = os.read(process.stderr.fileno(), 65536)
            assert piece, said.decode()
            said += piece
    return said.decode()


def test_jobs_are_compared_by_what_came_of_them_and_what_they_were_given(
    live: Federation, run: Run, job_file: str
) -> None:
    jobs = [
        run("submit", job_file, "--wait", "-o", "name", "--set", f"train.seed={seed}", *more).out.strip()
        for seed, more in ((1, ()), (2, FAIL))
    ]
    told = run("compare", *jobs, "-o", "json").data
    first, second = told["jobs"]
    assert (first["job"], first["state"], second["state"]) == (jobs[0], "succeeded", "failed")
    assert first["metrics"] == {"accuracy": pytest.approx(0.9)}
    assert (first["rounds"], first["samples"], first["wan_bytes"], first["usd"]) == (2, 80, 4000, 0.5)
    assert told["differing"] == [
        {"key": "task.config.play", "values": ["finish", "fail"]}, {"key": "train.seed", "values": [1, 2]}
    ]  # fmt: skip
    lines = run("compare", *jobs).out.splitlines()
    assert lines[0].split() == jobs
    assert [line.split() for line in lines if line.startswith(("state", "cost", "train.seed"))] == [
        ["state", "succeeded", "failed"], ["cost", "$0.5000", "$0.5000"], ["train.seed", "1", "2"]
    ]  # fmt: skip
    assert run("compare", *jobs, "-o", "name").out.split() == jobs
    assert run("compare", jobs[0]).status == 2
    assert run("compare", jobs[0], "nobody").status == 4
