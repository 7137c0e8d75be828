"""Samples that processes make ahead: the same ones, in order, and errors that are the task's."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.recording import Recorder, recording
from region_agent.worker.data.loaders import Loaders, _packed, _unpacked
from region_agent.worker.data.loading import DrawnSamples, Loading
from region_agent.worker.task import TaskModule, load_task

pytestmark = pytest.mark.processes

TASK = """
import os
import random
import signal
import time

import numpy as np
import torch
from geofed import log

num_workers = {workers}


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        {line}
        log("index", index)
        noise = torch.rand(2) + random.random() + np.random.rand()
        even = torch.tensor(index % 2 == 0)
        return {{"x": noise + index, "half": noise.bfloat16(), "name": f"s{{index}}", "flag": even}}


def dataset(uri, split, config):
    return Noisy()


def model(config):
    return torch.nn.Linear(2, 1)


def loss(model, batch):
    return model(batch["x"]).mean()
"""


@contextmanager
def loading(folder: Path, workers: Any, line: str = "pass") -> Iterator[Loading]:
    folder.mkdir(exist_ok=True)
    (folder / "task.py").write_text(TASK.format(workers=workers, line=line))
    task = load_task(folder, "task.py", {})
    made = Loading(task, {"train": task.dataset("", "train")})
    try:
        yield made
    finally:
        made.close()


def drawn(step: int, batch: int = 3) -> DrawnSamples:
    first = step * batch
    return DrawnSamples("train", (tuple(range(first, first + batch)), (first,)), (5, step))


def taken(made: Loading, steps: list[int]) -> list[Any]:
    last = max(steps)
    return [made.take([drawn(one) for one in range(step, min(step + made.ahead, last) + 1)]) for step in steps]


def test_processes_make_the_same_samples_whoever_makes_which_and_in_any_order(tmp_path: Path) -> None:
    """Also of a step that is made again, as an invocation does that continues another one."""
    told, steps = [], [1, 2, 3, 4, 5, 6, 2, 3, 9]
    for workers in (0, 1, 3):
        recorder = Recorder()
        recorder.round = 4
        with recording(recorder), loading(tmp_path / str(workers), workers) as made:
            told.append(taken(made, steps))
        (sums,) = recorder.up_to(4).values()
        assert sums["index"][1] == 4 * len(steps)
    reference = told[0]
    assert not torch.equal(reference[0][0][1]["x"], reference[1][0][1]["x"])
    for others in told[1:]:
        for one, other in zip(reference, others, strict=True):
            for (count, batch), (found, same) in zip(one, other, strict=True):
                assert count == found
                assert batch["name"] == same["name"]
                for name in ("x", "half", "flag"):
                    assert (batch[name].dtype, batch[name].shape) == (same[name].dtype, same[name].shape)
                    assert torch.equal(batch[name], same[name])


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("assert index != 4, 'bad sample'", "TASK_FAILED", "dataset raised AssertionError: bad sample at task.py:19"),
        ("return lambda: 0 if index != 4 else [] + ''", "TASK_FAILED", "dataset raised TypeError"),
        ("index == 4 and os.kill(os.getpid(), signal.SIGKILL)", "FUNCTION_OUT_OF_MEMORY", "was killed"),
        ("index == 4 and os._exit(3)", "TASK_FAILED", "a process that makes samples ended (exit status 3)"),
        ("if index == 4: raise MemoryError", "FUNCTION_OUT_OF_MEMORY", "ran out of memory"),
    ],
)
def test_what_fails_in_a_process_is_told_at_its_step(tmp_path: Path, line: str, code: str, says: str) -> None:
    with loading(tmp_path / "task", 2, line) as made:
        if "lambda" not in line:
            # The second step's error does not come with the first one.
            assert made.take([drawn(0), drawn(1)])[0][0] == 3
        with pytest.raises(GeofedError) as caught:
            made.take([drawn(1)])
    assert caught.value.code == code
    assert says in caught.value.message


@pytest.mark.parametrize("line", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_after_a_process_has_ended_others_make_what_comes(tmp_path: Path, line: str) -> None:
    """As where an evaluation failed, which ends no job."""
    with loading(tmp_path / "task", 2, f"index == 4 and {line}") as made:
        before = made.take([drawn(0), drawn(1)])[0][0]
        for _ in range(2):
            with pytest.raises(GeofedError):
                made.take([drawn(1)])
        assert made.take([drawn(0)])[0][0] == before
        assert made.cpu_seconds > 0


def test_signals_to_all_processes_of_a_container_end_no_process_that_makes_samples() -> None:
    loaders = Loaders(lambda number: (number, os.getpid()), 1)
    _, pid = loaders.take([1])
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert loaders.take([2]) == (2, pid)
    loaders.close()


def test_samples_do_not_depend_on_where_they_are_made(tmp_path: Path) -> None:
    """In an evaluation under autocast without gradients as in a step."""
    line = "return {'x': torch.ones(2, 2) @ torch.ones(2, 2), 'grad': torch.is_grad_enabled()}"
    for number in (0, 2):
        with loading(tmp_path / str(number), number, line) as made, torch.no_grad(), torch.autocast("cpu"):
            batches = [batch for _, batch in made.take([drawn(0)])]
        assert {batch["x"].dtype for batch in batches} == {torch.float32}
        assert all(batch["grad"].all() for batch in batches)


class _Unreadable:
    def __reduce__(self) -> Any:
        return open, ("/no/such/file",)


def test_what_cannot_be_read_again_is_told_and_others_follow() -> None:
    loaders = Loaders(lambda number: _Unreadable() if number == 1 else number, 1)
    with pytest.raises(GeofedError, match="FileNotFoundError") as caught:
        loaders.take([1])
    assert (caught.value.code, loaders.broken) == ("TASK_INVALID", False)
    assert loaders.take([2]) == 2
    loaders.close()


def test_of_a_view_only_its_own_values_are_sent() -> None:
    whole = torch.arange(4_000_000.0).reshape(2000, 2000)
    for view in (whole[:, 3], whole[3], whole[:5, :5]):
        assert sum(part.nbytes for part in _packed(view)) < 100_000
        assert torch.equal(_unpacked([np.frombuffer(part, np.uint8) for part in _packed(view)]), view)


def test_a_batch_that_cannot_be_sent_is_told_and_others_follow() -> None:
    loaders = Loaders(lambda number: (lambda: 0) if number == 1 else torch.arange(number), 1)
    with pytest.raises(GeofedError, match="a batch must be one for pickle") as caught:
        loaders.take([1, 2])
    assert caught.value.code == "TASK_INVALID"
    assert loaders.take([2]).tolist() == [0, 1]
    assert loaders.cpu_seconds > 0
    assert loaders.memory_bytes > 0
    loaders.close()


def test_any_value_arrives_as_it_was() -> None:
    values = [
        torch.arange(6).reshape(2, 3).T, torch.zeros(0, 3), torch.tensor(2.5, dtype=torch.float64),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(), torch.tensor([True, False]), np.arange(5)[::2], np.array("text"),
        {"a": (1, [2])},
    ]  # fmt: skip
    loaders = Loaders(lambda number: values[number], 2)
    found = [loaders.take([place]) for place in range(len(values))]
    loaders.close()
    for value, same in zip(values, found, strict=True):
        assert type(same) is type(value)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.to_dense(), same.to_dense())
            assert value.is_sparse or value.stride() == same.stride()
        else:
            assert str(value) == str(same)
    # What arrives may be changed in place.
    found[2].add_(1)


def test_no_more_than_what_is_wanted_is_made_and_no_process_stays() -> None:
    loaders = Loaders(lambda number: (number, os.getpid()), 2)
    pids = {loaders.take(list(range(step, step + 3)))[1] for step in range(4)}
    assert len(pids) == 2
    loaders.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_end_with_their_worker() -> None:
    """Even one that is in the middle of a sample."""
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        loaders = Loaders(lambda _: os.write(writing, f"{os.getpid()} ".encode()) and time.sleep(600), 2)
        for one in loaders._each:
            one.made(None)
        time.sleep(600)
    os.close(writing)
    text = b""
    while text.count(b" ") < 2:
        text += os.read(reading, 100)
    os.kill(worker, 9)
    os.waitpid(worker, 0)
    # The pipe ends once nobody can write to it any more.
    assert os.read(reading, 1) == b""
    os.close(reading)


@pytest.mark.parametrize("stated", ["-1", "33", "True", "'two'", "1.0"])
def test_a_number_of_processes_that_is_none_is_refused(tmp_path: Path, stated: str) -> None:
    says = r"num_workers is .*, not a number of processes up to 32"
    with pytest.raises(GeofedError, match=says) as caught, loading(tmp_path / "task", stated):
        pass
    assert caught.value.code == "TASK_INVALID"


def test_a_task_that_states_none_may_use_the_names_of_what_it_does_not_need() -> None:
    task = TaskModule(Path(), {}, {}, ahead=print)
    assert (task.num_workers, Loading(task, {"train": [1]}).ahead) == (0, 0)
