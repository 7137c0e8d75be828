"""What a task module may state about data with a format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats import FORMATS
from region_agent.worker.data.shard import BatchStream
from region_agent.worker.data.sources import Sources
from region_agent.worker.data.spec import FormatSpec
from region_agent.worker.data.streamed import Rows
from region_agent.worker.invocation import ShardFile
from region_agent.worker.task import TaskModule, load_task

PLAIN = "def model(config): ...\ndef loss(model, batch): ...\n"
HALVES = """
class Halves:
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows) + extra

    def __getitem__(self, index):
        return self.rows[index]["input_ids"] / 2 if index % 4 else None


def dataset(rows, split, config):
    return Halves(rows)
"""


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[Rows]:
    (tmp_path / "a.txt").write_text("abcdefgh" * 40)
    files = [ShardFile(name="a.txt", path=str(tmp_path / "a.txt"))]
    spec = FormatSpec(kind="text", sequence=8)
    made = Rows(spec, files, FORMATS["text"].index(spec, Sources(files)))
    yield made
    made.close()


def _task(folder: Path, text: str) -> TaskModule:
    (folder / "task").mkdir()
    (folder / "task" / "task.py").write_text(PLAIN + text)
    return load_task(folder / "task", "task.py", {})


def test_a_task_needs_no_dataset_for_data_with_a_format(tmp_path: Path, rows: Rows) -> None:
    task = _task(tmp_path, "prefetch = 5\n")
    data = task.streamed(rows, "train")
    assert (len(data), data.prefetch) == (41, 5)
    assert BatchStream(data, 1, "east", 0, 1, 4).batch(1)["input_ids"].shape == (4, 8)
    with pytest.raises(GeofedError, match="the region states no format of its data") as refused:
        task.dataset("a.txt", "train")
    assert refused.value.code == "TASK_INVALID"


def test_a_dataset_makes_samples_of_rows_and_leaves_some_out(tmp_path: Path, rows: Rows) -> None:
    data = _task(tmp_path, "extra = 0" + HALVES).streamed(rows, "train")
    stream = BatchStream(data, 1, "east", 0, 1, 41)
    batch: Any = stream.batch(1)
    assert (batch.shape, batch.dtype, stream.skipped) == ((30, 8), torch.float32, 11)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extra = 1" + HALVES, r"dataset\(\.\.\.\) returned 42 samples for 41 rows"),
        ("prefetch = -1", "prefetch is -1, not a number of steps up to 64"),
        ("prefetch = 'many'", "prefetch is 'many'"),
        ("tokenizer = '../a.txt'", r"there is no file \.\./a\.txt in the task folder"),
        ("tokenizer = 'task.py'", r"task\.py is no file of a tokenizer"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, rows: Rows, text: str, says: str) -> None:
    pytest.importorskip("tokenizers", reason="needs geofed[data]")
    with pytest.raises(GeofedError, match=says) as refused:
        _task(tmp_path, text).streamed(rows, "train")
    assert refused.value.code == "TASK_INVALID"
