"""The pages about the command and the job file name all there is, and their example is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from control_plane.spec import JobSpec, load
from geofed_pb.errors import Exit
from tests.control_plane.cli.test_contract import CONTRACTS

DOCS = Path(__file__).parents[3] / "docs"


def keys_of(model: type[BaseModel], path: str = "") -> set[str]:
    found = set()
    for field in model.model_fields.values():
        dotted = f"{path}{field.alias}"
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= keys_of(kind, f"{dotted}.")
        else:
            found.add(dotted)
    return found


def test_the_job_file_page_names_every_key() -> None:
    told = set(re.findall(r"`([a-zA-Z.]+)`", (DOCS / "job-file.md").read_text()))
    assert keys_of(JobSpec) <= told


def test_the_example_is_a_job_file(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", (DOCS / "job-file.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "job.yaml").write_text(example.group(1))
    assert load(tmp_path / "job.yaml").spec.metadata.name == "digits"


@pytest.mark.parametrize("command", sorted(CONTRACTS))
def test_the_command_page_names_every_command(command: str) -> None:
    assert re.search(rf"`{command}\b", (DOCS / "cli.md").read_text()) or command == "completion"


def test_the_command_page_names_every_exit_status() -> None:
    told = {int(status) for status in re.findall(r"^\| (\d+) \|", (DOCS / "cli.md").read_text(), re.MULTILINE)}
    assert told == {int(status) for status in Exit}
