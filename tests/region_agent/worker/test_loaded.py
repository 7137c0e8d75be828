"""A task's module and its data sets are one thing: made in one order, kept together, dropped together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import LINEAR_TASK, invocation, write_samples
from support.pki import Authority
from support.server_process import Server

from geofed_pb.errors import GeofedError
from region_agent.worker import handler
from region_agent.worker.invocation import ShardFile
from region_agent.worker.task import TaskModule
from sync.channel_clients import FileChannel

TASK = LINEAR_TASK.replace("def model(config):\n", "def model(config):\n    assert SEEN\n") + (
    "\nSEEN = []\n_plain = dataset\n\n\ndef dataset(uri, split, config):\n    SEEN.append(split)\n"
    "    return _plain(uri, split, config)\n"
)
LAYERS = (
    "\n\ndef layers(config):\n    assert SEEN\n    return [lambda: nn.Linear(4, 4)] * 2 + [lambda: nn.Linear(4, 2)]\n"
)


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., TaskModule]:
    """The task of an invocation as the worker function has it, after the data."""
    server = Server(tmp_path / "server", Authority(), "east", ("east",), workers=3)
    data = write_samples(tmp_path / "data.npz", 20)

    def load(task: str = TASK, worker: int = 0, **changed: Any) -> TaskModule:
        channel, call = FileChannel(server.channel_folder), invocation(server, task, data, worker, **changed)
        handler._trainer(call, channel, time.monotonic()).close()
        assert handler._loaded is not None
        return handler._loaded.task

    return load


def _seen(task: TaskModule) -> list[str]:
    return list(task.functions["loss"].__globals__["SEEN"])


def test_what_dataset_sets_is_there_in_every_invocation(loaded: Callable[..., TaskModule]) -> None:
    first = loaded()
    assert _seen(first) == ["train", "test"]
    for changed in ({"slice_seconds": 1.0}, {"attempt": 2}, {"worker": 1}, {"resume_key": "w/1/0/3"}):
        assert loaded(**changed) is first
    assert _seen(first) == ["train", "test"]


def test_variables_are_set_before_the_module_is_loaded_and_for_this_task_alone(
    loaded: Callable[..., TaskModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "before")
    monkeypatch.delenv("MODE", raising=False)
    task = "import os\nFOUND = os.environ.get('MODE'), os.environ.get('GIVEN')\n" + TASK
    found = [
        loaded(task, env=env).functions["loss"].__globals__["FOUND"]
        for env in ({"MODE": "fast", "GIVEN": "now"}, {"MODE": "slow"}, {})
    ]
    assert found == [("fast", "now"), ("slow", "before"), (None, "before")]


def test_a_task_folder_that_was_changed_in_the_channel_is_not_loaded(
    loaded: Callable[..., TaskModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = FileChannel.get
    monkeypatch.setattr(
        FileChannel, "get", lambda channel, key: found(channel, key)[:-1] if "bundle" in key else found(channel, key)
    )
    with pytest.raises(GeofedError, match="is not the one that was submitted") as raised:
        loaded()
    assert raised.value.code == "DIGEST_MISMATCH"


@pytest.mark.parametrize("changed", [{"config": {"lr": 0.2}}, {"job": "another"}, {"task": TASK + "\n"}, {"seed": 6}])
def test_of_another_job_code_or_configuration_all_is_made_again(
    loaded: Callable[..., TaskModule], changed: dict[str, Any]
) -> None:
    first = loaded()
    other = loaded(**changed)
    assert _seen(other) == ["train", "test"]
    assert not first.folder.exists()
    again = loaded()
    assert _seen(again) == ["train", "test"]
    assert again.folder != first.folder


def test_the_training_split_comes_first_whatever_the_order(loaded: Callable[..., TaskModule], tmp_path: Path) -> None:
    files = (ShardFile(name="data.npz", path=str(tmp_path / "data.npz")),)
    splits = {"more": files, "test": files, "train": files}
    assert _seen(loaded(splits=splits)) == ["train", "more", "test"]


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_every_stage_of_a_pipeline_calls_dataset_first(loaded: Callable[..., TaskModule], worker: int) -> None:
    pipeline: dict[str, Any] = {"stages": ((0, 0), (1, 1), (2, 2)), "micro_batch": 4}
    first = loaded(TASK + LAYERS, worker, **pipeline)
    assert _seen(first) == ["train", "test"]
    assert loaded(TASK + LAYERS, worker, **pipeline) is first
    assert handler._loaded is not None
    # A stage in the middle looks at no sample, and holds none.
    assert (handler._loaded.data is None) == (worker == 1)
    assert _seen(loaded(TASK + LAYERS, 2, **pipeline)) == ["train", "test"]


def test_a_split_that_cannot_be_made_leaves_nothing_of_the_task(loaded: Callable[..., TaskModule]) -> None:
    fails = (
        TASK
        + "\n_made = dataset\ndef dataset(uri, split, config):\n"
        + (
            "    found = _made(uri, split, config)\n    if split == 'test' and not config.get('well'):\n"
            "        raise OSError('no disk')\n    return found\n"
        )
    )
    with pytest.raises(GeofedError, match="no disk"):
        loaded(fails)
    assert handler._loaded is None
    assert _seen(loaded(fails, config={"well": True})) == ["train", "test"]


def test_what_dataset_draws_does_not_depend_on_the_process(loaded: Callable[..., TaskModule]) -> None:
    drawn = "\nimport random\nDRAWN = [random.random()]\n_made = dataset\ndef dataset(uri, split, config):\n" + (
        "    DRAWN.extend([float(torch.rand(())), np.random.rand()])\n    return _made(uri, split, config)\n"
    )
    found = []
    for job in ("one", "two"):
        # Another job stands for another replica.
        found.append(loaded(TASK + drawn, job=job).functions["loss"].__globals__["DRAWN"])
    assert found[0] == found[1]
    assert len(set(found[0])) == 5
