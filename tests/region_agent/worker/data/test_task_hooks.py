"""What a task module may state about data with a format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.formats import FORMATS
from region_agent.worker.data.loading import DrawnSamples, Loading
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


@pytest.mark.processes
def test_rows_are_read_once_and_sent_to_the_processes_that_make_samples(tmp_path: Path, rows: Rows) -> None:
    """Samples that are None are left out there, too."""
    found, read = [], []
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        task = _task(folder, f"extra = 0\nnum_workers = {workers}\n{HALVES}")
        spec = FormatSpec(kind="text", sequence=8)
        files = [ShardFile(name="a.txt", path=str(tmp_path / "a.txt"))]
        here = Rows(spec, files, rows.index)
        data = task.streamed(here, "train")
        stream, loading = BatchStream(data, 1, "east", 0, 1, 4), Loading(task, {"train": data})
        batches = []
        for step in range(1, 9):
            coming = [
                DrawnSamples("train", stream.groups(one, [2, 2]), (one,))
                for one in range(step, step + loading.ahead + 1)
            ]
            batches += stream.kept(step, [2, 2], loading.take(coming))
        found.append((batches, stream.skipped))
        read.append(here.sources.read_bytes)
        loading.close()
        here.close()
    (first, skipped), (second, also_skipped) = found
    assert 0 < skipped == also_skipped
    assert [count for count, _ in first] == [count for count, _ in second]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(first, second, strict=True))
    assert read[0] == read[1]


@pytest.mark.processes
def test_a_sample_made_of_another_row_is_refused_in_a_process(tmp_path: Path, rows: Rows) -> None:
    mixed = HALVES.replace("self.rows[index]", "self.rows[index - 1]")
    task = _task(tmp_path, f"extra = 0\nnum_workers = 1\n{mixed}")
    loading = Loading(task, {"train": task.streamed(rows, "train")})
    with pytest.raises(GeofedError, match="a sample is made of its own row alone; dataset asked for row 2") as refused:
        loading.take([DrawnSamples("train", ((3,),), (0,))])
    loading.close()
    assert refused.value.code == "TASK_INVALID"
