"""The pages about the command and the job file name all there is, and their example is taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from control_plane.spec import load
from control_plane.spec.sections import Wan
from geofed_pb.errors import Exit
from sync.policy import policies
from tests.control_plane.cli.test_contract import CONTRACTS

DOCS = Path(__file__).parents[3] / "docs"


def test_every_policy_has_a_page_that_the_index_names() -> None:
    index = (DOCS / "wan.md").read_text()
    for policy in policies():
        (page,) = re.findall(rf"^\| \[`{policy}`\]\(([^)]+)\)", index, re.MULTILINE)
        text = (DOCS / page).read_text()
        assert f"`{policy}`" in text
        for part in ("What it does", "When to use it", "What it guarantees", "Under which assumptions", "settings"):
            assert part in text, (page, part)


def test_the_index_tells_of_every_setting_of_the_exchange() -> None:
    pages = "".join(path.read_text() for path in [DOCS / "wan.md", *(DOCS / "wan").glob("*.md")])
    assert {f"wan.{field.alias}" for field in Wan.model_fields.values()} <= set(re.findall(r"\bwan\.[a-zA-Z]+", pages))


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
