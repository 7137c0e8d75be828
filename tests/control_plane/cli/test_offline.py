"""What needs no control plane: templates, validation, tables, the live display."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from control_plane._view import bytes_text, seconds_text, usd_text
from control_plane.cli._live import LiveDisplay
from control_plane.cli._output import columns
from control_plane.cli._plan import diff_text, plan_diff
from control_plane.cli._report import money_table, partition_table, result_text, rounds_text, wan_table
from control_plane.cli.commands.jobs import _slack_cell
from control_plane.cli.commands.views.compare import _compared_text
from control_plane.cli.commands.views.history import _rounds_table
from region_agent.config import load_config
from tests.control_plane.cli.conftest import Run


@pytest.mark.parametrize(
    "template",
    [
        "federated-evaluation", "image-classification", "llm-lora", "matrix-factorisation", "pipeline",
        "sparse-logistic-regression", "tabular", "text",
    ],
)  # fmt: skip
def test_a_template_is_valid_as_written(run: Run, tmp_path: Path, template: str) -> None:
    folder = tmp_path / "mine"
    made = run("new", template, str(folder), "--name", "my-job")
    assert made.status == 0
    assert set(made.out.split()) == {str(file) for file in folder.iterdir()}
    assert f"geofed submit {folder / 'job.yaml'} --watch" in made.err
    named = ("--set", "train.initialModel.job=my-trained") if template == "federated-evaluation" else ()
    checked = run("validate", str(folder / "job.yaml"), "-o", "name", *named)
    assert (checked.out, checked.err) == ("my-job\n", "")
    if named:
        without = run("validate", str(folder / "job.yaml"))
        assert without.status == 3
        assert "`train.initialModel`: give exactly one of `job`, `file` and `uri`" in without.err
    assert run("new", template, str(folder)).status == 8


def test_init_says_which_templates_have_no_example_data(run: Run, tmp_path: Path) -> None:
    told = run("init", str(tmp_path / "mine"), "--template", "federated-evaluation", "--no-input").err
    assert "template federated-evaluation has no example data" in told
    assert "`geofed new federated-evaluation DIR`" in told


MAKERS = (
    (
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'numpy'",
        ("UNAVAILABLE", "no example data: ModuleNotFoundError: No module named 'numpy'"),
        "in a clone of geofed: pip install '.[demo]'",
    ),
    (
        "error[UNAVAILABLE]: scikit-learn is not installed\nhint: install it",
        ("UNAVAILABLE", "no example data: scikit-learn is not installed"),
        "install it",
    ),
    (
        "error[DISK_FULL]: cannot write a: no space",
        ("DISK_FULL", "no example data: cannot write a: no space"),
        "free space in the state directory; nothing was lost",
    ),
    (
        "Traceback (most recent call last):\nValueError: three regions at least",
        ("UNAVAILABLE", "no example data: ValueError: three regions at least"),
        "all that it said is above; `geofed new TEMPLATE DIR` writes a job without data",
    ),
)


@pytest.mark.processes
@pytest.mark.parametrize(("said", "told", "hint"), MAKERS, ids=["package", "own error", "disk", "other"])
def test_init_tells_why_there_is_no_example_data_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, told: tuple[str, str], hint: str
) -> None:
    maker = tmp_path / "python"
    maker.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\nexit 1\n")
    maker.chmod(0o755)
    monkeypatch.setattr("control_plane.cli.commands.start.init.sys", SimpleNamespace(executable=str(maker)))
    error = run("init", str(tmp_path / "mine"), "--no-input", "-o", "json").error
    assert ((error["code"], error["message"]), error["hint"]) == (told, hint)
    assert not [*(tmp_path / "mine").iterdir()], "it can be given again"


def test_the_help_of_init_tells_what_is_taken_without_an_answer(run: Run) -> None:
    told = " ".join(re.sub("[│\n]", " ", run("init", "--help").out).split())
    for default in ("image-classification", "home,office", "2", "cost", "none"):
        assert f"default: {default}." in told


@pytest.mark.processes
def test_init_asks_until_five_answers_are_valid(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.cli.commands.start.init.can_ask", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("nothing\ntext\nnorth, south\n0\n3\ntime\n\n"))
    made = run("init", str(tmp_path / "mine"))
    assert made.status == 0, made.err
    assert made.err.count("]: ") == 5 + 2
    assert "one of image-classification" in made.err
    checked = run("validate", str(tmp_path / "mine" / "job" / "job.yaml"), "-o", "json")
    assert not checked.err
    job = checked.data["spec"]
    assert (job["data"]["dataset"], job["objective"]["minimise"]) == ("letters", "time")
    for name in ("north", "south"):
        region = load_config(tmp_path / "mine" / f"{name}.yaml")
        assert (region.name, region.capacity.workers) == (name, 3)
        assert Path(region.datasets["letters"].splits["train"].uri).is_file()
    assert run("init", str(tmp_path / "mine"), "--no-input").status == 8
    bounded = ("init", str(tmp_path / "other"), "--template", "sparse-logistic-regression", "--budget", "1234567.89")
    assert run(*bounded, "--workers", "1", "--minimise", "cost", "--regions", "a", "--own-machines").status == 0
    assert load_config(tmp_path / "other" / "a.yaml").advertise == "a"
    assert "budget: 1234567.89\n" in (tmp_path / "other" / "job" / "job.yaml").read_text()
    for template, dataset, kind in (("tabular", "customers", "csv"), ("pipeline", "documents", "text")):
        made = run("init", str(tmp_path / template), "--template", template, "--no-input")
        assert made.status == 0, made.err
        held = load_config(tmp_path / template / "home.yaml").datasets[dataset]
        assert held.format is not None
        assert (held.format.kind, held.splits["train"].samples) == (kind, None)
        assert Path(held.splits["train"].uri).is_file()
    assert run("validate", str(tmp_path / "other" / "job" / "job.yaml")).status == 0


def test_what_is_wrong_with_a_job_file_is_told_with_its_line(run: Run, job_file: str) -> None:
    Path(job_file).write_text(Path(job_file).read_text().replace("batch:", "bacth:"))
    ran = run("validate", job_file, "-o", "json")
    assert (ran.status, ran.error["code"]) == (3, "SPEC_INVALID")
    assert f"{job_file}:6:9: unknown key `bacth` in train; did you mean `batch`?" in ran.err
    assert run("validate", "missing.yaml").status == 3
    assert run("submit", job_file, "--set", "train").status == 3


def test_a_key_at_its_old_place_is_read_with_one_warning(run: Run, job_file: str) -> None:
    Path(job_file).write_text(
        Path(job_file).read_text().replace("advanced: {wan: {interval: 2}}", "wan: {interval: 2}")
    )
    line = Path(job_file).read_text().splitlines().index("wan: {interval: 2}") + 1
    ran = run("validate", job_file, "-o", "json")
    assert ran.status == 0
    assert ran.err == f"warning: {job_file}:{line}:1: `wan` is `advanced.wan` now; move it there\n"
    assert ran.data["spec"]["advanced"]["wan"]["interval"] == 2
    assert "wan" not in ran.data["spec"]
    assert not run("validate", job_file).err, "said once in a process"


def test_a_comparison_of_plans_has_values_as_in_files_and_ends_with_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("control_plane.cli._plan._facts", lambda plan: plan)
    before = {"objective": {"budget": 1.0}, "regions": {"use": ["a", "b"]}, "train": {"x": True, "y": 1e-5}}
    after = {"objective": {"budget": 0.25}, "regions": {"use": ["a"]}, "train": {"x": False, "y": 2}}
    rows = plan_diff(before, after, {}, {})
    assert [(row["what"], row["before"], row["after"]) for row in rows] == [
        ("objective.budget", "1", "0.25"), ("regions.use", "[a, b]", "[a]"), ("train.x", "true", "false"),
        ("train.y", "1e-05", "2"),
    ]  # fmt: skip
    told = {"before": "a.yaml", "after": "b.yaml", "changes": rows}
    text = diff_text({**told, "warnings": {"before": ["x", "y"], "after": ["y"]}})
    assert text.splitlines()[-3:] == ["", "warning            y", "warning of a.yaml  x"]
    assert diff_text({**told, "warnings": {"before": [], "after": []}}).splitlines()[-1].startswith("train.y")


def test_slack_is_a_duration() -> None:
    assert [_slack_cell(seconds) for seconds in (None, 3598.0, -7.0)] == ["-", "59 min 58 s", "-7.0 s"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("new nothing DIR", 4),
        ("new text DIR --name Bad_Name", 2),
        ("template show nothing", 4),
        ("wait JOB --for ever", 2),
        ("wait JOB --timeout soon", 2),
        ("region invite a --ttl soon", 2),
        ("status --watch", 2),
        ("list -o xml", 2),
        ("submit", 2),
        ("cancel JOB", 2),
        ("init DIR --template nothing", 4),
        ("init DIR --template llm-lora", 4),
        ("init DIR --regions A,B --no-input", 2),
        ("init DIR --workers 0 --no-input", 2),
        ("init DIR --minimise money --no-input", 2),
        ("init DIR --budget -1 --no-input", 2),
        ("user add bob --identity=", 2),
    ],
)
def test_wrong_use_has_its_exit_status(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*arguments.split())
    assert ran.status == status
    assert ran.err
    assert not ran.out
    assert "Traceback" not in ran.err


def test_a_bug_is_told_in_a_sentence_and_with_debug_in_full(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("control_plane.cli.commands.start.template.template_folders", broken)
    ran = run("template", "list")
    assert ran.status == 10
    assert ran.err.startswith("error[INTERNAL]: ZeroDivisionError: oops\nhint: ")
    assert "Traceback" in run("--debug", "template", "list").err


def test_a_context_that_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "context.json").write_text("{}")
    assert run("list", "--context", str(tmp_path / "context.json")).status == 2
    assert run("list", "--context", str(tmp_path / "none.json")).status == 6


@pytest.mark.processes
def test_a_terminal_gets_bold_heads_and_its_own_width_and_a_pipe_plain_text() -> None:
    program = [sys.executable, "-c", "from control_plane.cli.main import main; main()", "template", "list"]
    piped = subprocess.run(program, capture_output=True, check=True, timeout=60).stdout.decode()
    assert "\x1b" not in piped
    styled = _on_a_terminal(program, columns=60, TERM="xterm")
    assert "\x1b[1m" in styled
    plain = re.sub(r"\x1b\[[0-9;]*m", "", styled)
    assert max(map(len, plain.splitlines())) <= 60
    assert len(plain.splitlines()) > len(piped.splitlines()), "long cells are wrapped"
    assert "".join(plain.split()).startswith("TEMPLATEDESCRIPTION")
    assert _on_a_terminal(program, columns=60, TERM="dumb").replace("\r", "") == piped


def _on_a_terminal(program: list[str], *, columns: int, **environment: str) -> str:
    """What a program writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(program, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=kept | environment)
    os.close(theirs)
    written = b""
    # Reading fails once nobody has the terminal open any more.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            written += piece
    os.close(ours)
    assert process.wait(60) == 0
    return written.decode()


def test_tables_are_aligned() -> None:
    assert columns(["A", "N"], [["x", "1"], ["long", "22"]]) == "A      N\nx      1\nlong  22"
    assert columns(["A"], []) == "A"


def test_figures_are_for_people() -> None:
    assert [bytes_text(n) for n in (5, 1234, 1_399_348, 114e6)] == ["5 B", "1.2 kB", "1.4 MB", "114 MB"]
    assert [seconds_text(n) for n in (3.81, 117, 7500)] == ["3.8 s", "1 min 57 s", "2 h 5 min"]
    assert [usd_text(n) for n in (0, 12.5, 0.0119, 0.00096)] == ["$0.00", "$12.50", "$0.0119", "$0.00096"]
    assert [usd_text(n) for n in (5.6e-6, 2e-7, 1e-12)] == ["$0.0000056", "$0.00000020", "$0.00"]


@pytest.mark.parametrize("colour", [True, False])
def test_the_live_display_shows_regions_and_events(monkeypatch: pytest.MonkeyPatch, colour: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, no_color=not colour, color_system="standard")
    part = {
        "region": "shanghai",
        "state": "training",
        "round": 3,
        "step": 60,
        "loss": 0.25,
        "samples_per_second": 512.0,
        "metrics": {"accuracy": 0.91},
        "logged": {},
        "sent_bytes": {"frankfurt": 1_200_000},
        "usd": 0.0042,
        "condition": "waiting: [1 of 2] regions",
    }
    view = {"id": "job-1", "state": "running", "condition": "", "rounds": 18, "partitions": [part]}
    with LiveDisplay(console) as display:
        display.event({"kind": "job.running", "at": "2026-01-01T00:00:00Z", "text": "training has begun"})
        display.note("control plane unreachable; retrying")
        display.job(view)
    for text in (
        "job-1",
        "3/18",
        "0.2500",
        "512",
        "accuracy 0.9100",
        "1.2 MB",
        "$0.0042",
        "[1 of 2]",
        "begun",
        "trying",
    ):
        assert text in out.getvalue()
    assert ("\x1b[33m" in out.getvalue()) == colour


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_terminal_with_one_line_for_each_row(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    view = _ended()
    out = io.StringIO()
    with LiveDisplay(Console(file=out, force_terminal=True, width=width, color_system=None)) as display:
        display.job({**view, "state": "running"})
    drawn = [line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).splitlines() if line.strip()]
    assert "…" not in out.getvalue()
    for region in ("frankfurt", "virginia"):
        (line,) = {line for line in drawn if line.startswith(region)}
        assert "18/20" in line
        assert ("accuracy 0.8278" in line, "157 kB" in line) == (width >= 80, width == 120)
    monkeypatch.setattr("control_plane.cli._output.stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    texts = [partition_table(view), wan_table(view["links"]), money_table(view["result"]["money"]), result_text(view)]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in texts]
    assert max(len(line) for text in plain for line in text.splitlines()) <= width
    assert [len(text.splitlines()) for text in plain[:3]] == [3, 3, 4]


REPORTED = [
    {
        "round": number, "region": region, "at": "2026-01-01T10:00:00.000Z", "step": 20 * number, "samples": 64_000,
        "loss": 0.5, "test_loss": 0.6,
        **dict.fromkeys(("accuracy", "calibration", "f1", "precision", "recall"), 0.125),
    }
    for number in (1, 2)
    for region in ("frankfurt", "virginia")
]  # fmt: skip
COMPARED = {
    "jobs": [
        {
            "job": f"digits-2026112910{number}", "state": "succeeded", "metrics": {"accuracy": 0.9}, "rounds": 4,
            "samples": 64_000, "training_seconds": 4.0, "wan_bytes": 1e6, "usd": 0.5,
        }
        for number in range(1000, 1004)
    ],
    "differing": [{"key": "advanced.wan.interval", "values": [1, 2, 4, None]}],
}  # fmt: skip


@pytest.mark.parametrize(("width", "hidden"), [(60, "F1, PRECISION, RECALL"), (80, "RECALL"), (120, "")])
def test_rounds_and_compared_jobs_fit_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, hidden: str
) -> None:
    for module in ("_output", "commands.views.history"):
        monkeypatch.setattr(f"control_plane.cli.{module}.stdout_is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    rounds, compared = [
        [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
        for text in (_rounds_table(REPORTED), _compared_text(COMPARED))
        if max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= width
    ]
    assert [line[:2] for line in rounds[1:]] == [[str(row["round"]), row["region"]] for row in REPORTED]
    assert "ACCURACY" in rounds[0]
    assert capsys.readouterr().err == (
        f"no room for {hidden}: a wider terminal shows them, and -o json\n" if hidden else ""
    )
    heads = [line for line in compared if line and line[0].startswith("digits-")]
    assert [job for line in heads for job in line] == [job["job"] for job in COMPARED["jobs"]], "no ID is broken"
    intervals = [value for line in compared if line[:1] == ["advanced.wan.interval"] for value in line[1:]]
    assert intervals == ["1", "2", "4", "-"]


def _ended() -> dict[str, Any]:
    """A job of two regions, with what every table shows of it."""
    names = ("frankfurt", "virginia")
    regions = [
        {
            "region": name, "name": name, "state": "finished", "round": 18, "rounds": 18, "step": 1058, "steps": 1058,
            "workers": 4, "preemptible": True, "loss": 0.25, "samples": 185_600, "samples_per_second": 5347.0,
            "logged": {}, "metrics": {"accuracy": 0.8278, "loss": 0.5341},
            "sent_bytes": {"other": 157_049}, "usd": 5.3e-05,
            "condition": "",
        }
        for name in names
    ]  # fmt: skip
    links = [
        {
            "source": one, "destination": other, "state": "closed", "rtt_ms": 92.3, "goodput_mbps": 115.4, "streams": 4,
            "codec": "ternary", "interval_steps": 20, "sent_bytes": 157_049, "received_bytes": 157_049,
            "staleness_rounds": 2.1, "refused_updates": 0,
        }
        for one, other in (names, names[::-1])
    ]  # fmt: skip
    money = [
        {"region": name, "item": f"egress to {other}", "quantity": 0.000157049, "unit": "GB", "usd": 1.4e-05}
        for name, other in (names, names[::-1])
    ]
    bounds = {"low": 1.2, "expected": 2.9, "high": 8.7}
    result = {
        "metrics": {"accuracy": 0.8524}, "regions": regions, "seconds": 2.2, "training_seconds": 1.4, "money": money,
        "model": {"digest": f"sha256:{'4cff68bf' * 8}", "bytes": 74_100, "format": "safetensors"},
        "wan_bytes": {"frankfurt>virginia": 157_049}, "measured": {"seconds": 2.2, "wan_bytes": 370_000, "usd": 0.0001},
        "predicted": {"seconds": bounds, "wan_bytes": bounds, "usd": bounds, "link_bytes": {}},
    }  # fmt: skip
    return {
        "id": "job-1", "state": "succeeded", "condition": "", "rounds": 20, "partitions": regions, "links": links,
        "result": result,
    }  # fmt: skip


@pytest.mark.processes
def test_a_reader_who_has_enough_is_no_failed_job() -> None:
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "control_plane.cli.main", "schema"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_rounds_are_told_as_a_range_where_regions_differ() -> None:
    assert [rounds_text(rounds) for rounds in ([], [7, 7], [30, 37, 33])] == ["0", "7", "30-37"]


@pytest.mark.parametrize(
    "command",
    [
        "control_plane.cli.main schema",
        "control_plane.cli.main --help",
        "control_plane.cli.main completion bash",
        "control_plane.cli.main template list -o yaml",
        "control_plane.cli.main version -o json",
        "region_agent.cli version",
        "deploy.emulator.cli profiles -o json",
    ],
)
@pytest.mark.processes
def test_output_that_finds_no_space_is_told(command: str) -> None:
    module, *arguments = command.split()
    words = [sys.executable, "-c", f"from {module} import main; main()", *arguments]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 6
    assert "DISK_FULL" in ran.stderr
    assert "standard output" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


@pytest.mark.processes
def test_an_error_is_told_although_its_envelope_finds_no_space() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "control_plane.cli.main", "validate", "nowhere.yaml", "-o", "json"],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert ran.returncode == 3
    assert ran.stderr.startswith("error[SPEC_NOT_FOUND]")
