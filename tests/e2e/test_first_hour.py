"""The first hour of a new user, by the README's commands alone, at a terminal of 80 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from support.shell import END, PROLOGUE, at_terminal, blocks, environment, own_network

import geofed.cli
from tests.control_plane.cli.test_contract import commands

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(260)]

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
COLUMNS = 80
SECONDS = 240
"""Half a minute on an idle machine: each of three dozen commands is a process of its own."""
PAUSES = (
    "within geofed list",
    "",
    "within sh -c '[ $(geofed region list -o json | grep -c live) -ge 2 ]'",
    "",
    "",
    "wait",
)
"""What has come to be, one after the other, by the time that a reader has read on to the next block."""
INIT = re.compile(r"^`(geofed init \w+)` asks five questions", re.MULTILINE)
ONLY_PARSED = {
    "approve": "no job waits for approval here; it is given in test_approval.py",
    "join": "in the README itself",
    "run": "in the README itself",
}
"""Examples of `geofed agent COMMAND --help` that are not run after the README's commands."""
EXAMPLES = "the examples of geofed agent"


def _agent_examples() -> list[str]:
    """What the help of each command of `geofed agent` shows."""
    found = commands(typer.main.get_command(geofed.cli.app).commands["agent"])  # type: ignore[attr-defined]
    shown = {name: command.epilog.removeprefix("Example: ") for name, command in found.items()}
    assert all(shown[name] in README for name in ("join", "run"))
    return [example for name, example in shown.items() if name not in ONLY_PARSED]


def _hour() -> str:
    """All blocks in their order, and what is told in the text, in the same folder."""
    found = blocks(README, "sh")
    assert len(found) == len(PAUSES), "a block was added: say what a reader has before the next one"
    ask = INIT.search(README)
    assert ask is not None
    *begin, end = [block + pause + "\n" for block, pause in zip(found, PAUSES, strict=True)]
    # The job that `init` writes is for regions of the names that it proposes, which are the README's.
    init = [ask[1], "geofed explain first/job/job.yaml"]
    agent = [f"echo {EXAMPLES}", "geofed audit export audit.jsonl", *_agent_examples(), "echo"]
    return PROLOGUE + END + "".join([*begin, "\n".join([*init, *agent]), "\n", end])


def test_the_first_hour_goes_as_the_readme_tells(tmp_path: Path) -> None:
    (region,) = blocks(README, "yaml")
    (tmp_path / "home.yaml").write_text(region)
    argv = [*own_network(), "bash", "-c", _hour()]
    shown = at_terminal(argv, tmp_path, environment(), columns=COLUMNS, seconds=SECONDS)
    assert shown.status == 0, shown.text[-4000:]
    end = shown.lines.index(EXAMPLES)
    assert [line for line in shown.lines[:end] if len(line) > COLUMNS] == []
    _check_hour("\n".join(shown.lines[:end]), tmp_path)
    _check_examples("\n".join(shown.lines[end:]), tmp_path)


def _check_hour(told: str, folder: Path) -> None:
    for what in ("Submit this job? [y/N] ", "succeeded; the model is sha256:", "home > office", "job.submitted"):
        assert what in told, what
    assert re.search(r"^accuracy  0\.9\d+$", told, re.MULTILINE)
    assert re.search(r"^ok +region office +live", told, re.MULTILINE)
    assert not re.search(r"^FAIL", told, re.MULTILINE)
    assert "What to train [image-classification]: " in told
    assert (folder / "model.safetensors").stat().st_size > 10_000
    assert "<svg" in (folder / "plan.svg").read_text()


def _check_examples(told: str, folder: Path) -> None:
    """All but those in `ONLY_PARSED` have run: one that failed would have ended the hour."""
    assert "nothing waits for approval" in told
    assert re.search(r"^region home: \d+ entries, [1-9]\d* heads", told, re.MULTILINE)
    assert (folder / "region.schema.json").stat().st_size > 1000
