"""What one invocation does with the answers that it gets."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import LINEAR_TASK, call, invocation, write_samples
from support.pki import Authority
from support.server_process import Server

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import worker_pb2
from region_agent.worker import handler, loop
from region_agent.worker.invocation import Invocation, Outcome
from region_agent.worker.ps_client import SliceOver
from region_agent.worker.training import trainer
from region_agent.worker.training.merging import FencedChannel
from sync import framing
from sync.channel_clients import FileChannel, fence_key
from sync.collective import Settings
from sync.flat import FlatModel
from sync.merging import Member, open_collective


class Script:
    """Stands where the line to the parameter server stands; says what a test wants it to."""

    def __init__(self, channel: FileChannel) -> None:
        self.channel = channel
        self.start = worker_pb2.AttachReply(round=0, step=0, model_key="model/0", until_step=2)
        self.ends: list[worker_pb2.BoundaryRequest] = []
        self.evaluations: list[worker_pb2.EvaluatedRequest] = []
        self.wait_at: str = ""
        self.last_round = 1
        self.handed_over: list[np.ndarray[Any, Any]] = []

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None: ...

    def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachReply:
        if self.wait_at == "attach":
            raise SliceOver
        return self.start

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        self.ends.append(request)
        if request.model_key:
            value = self.channel.get(request.model_key)
            assert value is not None
            self.handed_over.append(np.array(framing.decode(value).tensors["model"]))
        if self.wait_at == "boundary":
            raise SliceOver
        return worker_pb2.BoundaryReply(
            round=request.round, model_key="model/1", finished=request.round >= self.last_round, until_step=4
        )

    def evaluated(self, request: worker_pb2.EvaluatedRequest) -> None:
        self.evaluations.append(request)


@pytest.fixture
def place(tmp_path: Path) -> Server:
    return Server(tmp_path / "east", Authority(), "east", ("east",), rounds=2, steps_per_round=2)


@pytest.fixture
def script(place: Server, monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script(FileChannel(place.channel_folder))
    monkeypatch.setattr(loop, "PsClient", lambda *_: made)
    for sequence in range(3):
        model = np.full(10, float(sequence), np.float32)
        made.channel.put(f"model/{sequence}", framing.encode({"model": model}))
    return made


def _invocation(place: Server, task: str = LINEAR_TASK, **changed: Any) -> Invocation:
    data = place.folder / "data.npz"
    return invocation(place, task, data if data.exists() else write_samples(data, 20), **changed)


def _again(body: Invocation, outcome: Outcome) -> Invocation:
    return body.model_copy(update={"resume_key": outcome.resume_key})


def test_a_slice_that_ends_in_the_wait_for_a_round_hands_over_the_same_model(place: Server, script: Script) -> None:
    body = _invocation(place)
    script.wait_at = "boundary"
    outcome = call(body)
    assert (outcome.status, outcome.steps, outcome.waits_for) == ("continue", 2, 1)
    outcome = call(_again(body, outcome))
    assert (outcome.status, outcome.steps, outcome.waits_for) == ("continue", 0, 1)
    assert len({request.digest for request in script.ends}) == 1
    assert [request.samples for request in script.ends] == [16.0, 16.0]


def test_a_round_that_ended_meanwhile_is_taken_over(place: Server, script: Script) -> None:
    """The model left behind is older than the federation's: it must not be continued from."""
    body = _invocation(place, config={"lr": 0.0})
    script.wait_at = "boundary"
    outcome = call(body)
    script.start = worker_pb2.AttachReply(round=1, step=2, model_key="model/1", until_step=4)
    call(_again(body, outcome))
    assert script.handed_over[0].tolist() == [0.0] * 10
    assert script.handed_over[1].tolist() == [1.0] * 10
    assert script.ends[1].round == 2


def test_a_round_whose_update_is_on_its_way_is_only_waited_for(place: Server, script: Script) -> None:
    script.start.boundary = True
    outcome = call(_invocation(place))
    assert (outcome.status, outcome.steps) == ("done", 0)
    assert script.ends[0].digest == ""
    assert script.handed_over == []


@pytest.mark.parametrize("declared", [19, 200])
def test_another_number_of_samples_than_the_region_states_ends_it_before_the_first_step(
    place: Server, script: Script, declared: int
) -> None:
    outcome = call(_invocation(place, declared_samples=declared))
    assert (outcome.status, outcome.code, outcome.steps) == ("failed", "SAMPLES_MISMATCH", 0)
    assert outcome.message == f"the file of region east states {declared} training samples, the task's dataset has 20"
    assert "samples: 20 in the file of region east" in outcome.hint
    assert call(_invocation(place, declared_samples=20)).status == "done"


def test_a_slice_that_ends_before_the_first_model_leaves_nothing(place: Server, script: Script) -> None:
    """Else its own fresh model would be taken for the federation's."""
    body = _invocation(place, config={"lr": 0.0})
    script.wait_at = "attach"
    outcome = call(body)
    assert (outcome.status, outcome.resume_key) == ("continue", "")
    script.wait_at = ""
    call(_again(body, outcome))
    assert script.handed_over[0].tolist() == [0.0] * 10


@pytest.mark.parametrize(("rounds", "slice_seconds", "steady"), [(2, 30.0, [2]), (1, 0.001, [0, 0])])
def test_steps_after_something_else_do_not_tell_how_long_a_step_takes(
    place: Server, script: Script, rounds: int, slice_seconds: float, steady: list[int]
) -> None:
    """Rounds of two steps: the second of each counts, unless another invocation makes it."""
    script.last_round = rounds
    body, told = _invocation(place, slice_seconds=slice_seconds), list[Outcome]()
    while not told or told[-1].status == "continue":
        told.append(call(_again(body, told[-1]) if told else body))
    assert sum(one.steps for one in told) == 2 * rounds
    assert [one.steady_steps for one in told if one.steps] == steady
    assert all((one.steady_seconds > 0) == (one.steady_steps > 0) for one in told)


def test_what_the_last_slice_left_is_forgotten_when_the_job_is_done(place: Server, script: Script) -> None:
    body = _invocation(place, slice_seconds=0.001)
    outcome = call(body)
    assert script.channel.has(outcome.resume_key)
    while outcome.status == "continue":
        outcome = call(_again(body, outcome))
    assert not list(place.channel_folder.glob("w/**/*.*"))
    assert not [path for path in place.channel_folder.glob("w/**/*") if path.is_file()]


# Job code that fails


def _failing(function: str, line: str) -> str:
    """The linear task with one line more at the beginning of a function."""
    head = next(text for text in LINEAR_TASK.splitlines() if text.startswith(f"def {function}("))
    return LINEAR_TASK.replace(head, f"{head}\n    {line}")


def _changed(old: str, new: str) -> str:
    assert old in LINEAR_TASK
    return LINEAR_TASK.replace(old, new)


_BAD_ITEMS = """class Bad(TensorDataset):
        def __getitem__(self, index):
            raise KeyError(index)
    return Bad("""


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (_failing("model", "1 / 0"), "model raised ZeroDivisionError: division by zero at task.py:9"),
        (_failing("dataset", "raise OSError('no disk')"), "dataset raised OSError: no disk at task.py:13"),
        (_failing("loss", "import sys; sys.exit(3)"), "loss raised SystemExit: 3 at task.py:18"),
        (_failing("optimizer", "nothing"), "optimizer raised NameError: name 'nothing' is not defined at task.py:23"),
        (_changed("nn.functional.mse_loss(model(x), y)", "x.sum()"), "the backward pass raised RuntimeError"),
        (_changed("return TensorDataset(", _BAD_ITEMS), "dataset raised KeyError"),
    ],
)
def test_what_job_code_raises_is_told_with_its_place(place: Server, script: Script, task: str, says: str) -> None:
    outcome = call(_invocation(place, task))
    assert (outcome.status, outcome.code) == ("failed", "TASK_FAILED")
    assert outcome.message.startswith(says)


def test_a_model_that_cannot_be_measured_is_trained_nevertheless(place: Server, script: Script) -> None:
    script.start.evaluate = True
    outcome = call(_invocation(place, LINEAR_TASK + "\ndef metrics(model, batches):\n    return {'a': None}\n"))
    assert outcome.status != "failed"
    told = script.evaluations[-1]
    assert (told.samples, dict(told.metrics)) == (0, {})
    assert told.error.startswith("metrics raised TypeError")


def test_a_loss_that_is_not_finite_is_told_with_its_step(place: Server, script: Script) -> None:
    task = LINEAR_TASK.replace("nn.functional.mse_loss(model(x), y)", "model(x).sum() * float('nan')")
    outcome = call(_invocation(place, task))
    assert (outcome.code, outcome.message) == ("TASK_FAILED", "the loss is nan at step 1")
    assert "lower the learning rate" in outcome.hint


def test_a_gpu_without_memory_is_told_as_such(place: Server, script: Script) -> None:
    """The error that torch raises then; a GPU is not needed for it."""
    task = LINEAR_TASK.replace("    x, y = batch\n", "    raise torch.OutOfMemoryError('CUDA out of memory')\n", 1)
    outcome = call(_invocation(place, task))
    assert (outcome.code, outcome.message) == (
        "GPU_MEMORY", "the GPU ran out of memory in loss at "
        f"task.py:{_line_of(task, 'OutOfMemoryError')} (raise torch.OutOfMemoryError('CUDA out of memory'))",
    )  # fmt: skip
    assert "train.accumulate" in outcome.hint


def _line_of(text: str, word: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if word in line)


@pytest.mark.parametrize(
    ("error", "code"), [(MemoryError(), "FUNCTION_OUT_OF_MEMORY"), (RuntimeError("a bug"), "INTERNAL")]
)
def test_whatever_breaks_is_answered(
    place: Server, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    def fenced(*_: object) -> None:
        raise error

    monkeypatch.setattr(handler, "_run", fenced)
    assert call(_invocation(place)).code == code


def test_a_body_that_is_no_invocation_is_refused() -> None:
    answer = handler.handle(type("E", (), {"body": b'{"job": 1}'})(), None)
    assert Outcome.model_validate_json(str(answer["body"])).code == "CONFIG_INVALID"


def test_a_region_without_training_data_is_told(place: Server, script: Script) -> None:
    body = _invocation(place)
    outcome = call(body.model_copy(update={"splits": {"test": body.splits["test"]}}))
    assert outcome.code == "SHARD_UNREADABLE"


def test_what_is_being_sent_has_left_the_worker_before_it_leaves(
    place: Server, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For stages that upload beside their steps: what the others wait for would be lost with the slice."""
    order: list[str] = []
    store_state = loop.WorkerLoop._store_state
    monkeypatch.setattr(trainer.WholeModel, "drain", lambda self: order.append("drain"))
    monkeypatch.setattr(
        loop.WorkerLoop, "_store_state", lambda self, over: order.append("store_state") or store_state(self, over)
    )
    script.wait_at = "boundary"
    assert call(_invocation(place)).status == "continue"
    assert order == ["drain", "store_state"]


COUNTED = """
_loss = loss


def loss(model, batch):
    if len(batch[0]) > 3:
        raise RuntimeError(f"{len(batch[0])} samples at once")
    return _loss(model, batch)
"""


def test_samples_beyond_the_batch_go_through_the_model_in_parts_with_the_same_gradient(
    place: Server, script: Script
) -> None:
    assert call(_invocation(place, region_batch=8)).status == "done"
    in_parts = call(_invocation(place, LINEAR_TASK + COUNTED, region_batch=8, batch=3))
    assert (in_parts.status, in_parts.samples) == ("done", 2 * 8)
    whole, parts = script.handed_over
    assert not np.array_equal(whole, np.zeros_like(whole))
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-6)
    assert script.ends[1].loss == pytest.approx(script.ends[0].loss, rel=1e-5)
    assert call(_invocation(place, LINEAR_TASK + COUNTED, region_batch=8, batch=4)).status == "failed"


# Hooks of the task module

LOADED = LINEAR_TASK.replace("np.load(uri)", "dict(np.load(uri))")
"""Whose file is closed when `dataset` returns."""


@pytest.mark.parametrize("slice_seconds", [30.0, 1e-9])
def test_the_tasks_own_schedule_sets_the_rate_of_each_step(place: Server, script: Script, slice_seconds: float) -> None:
    """Also where a slice ends before the step."""
    later_none = "return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)"
    task = f"{LINEAR_TASK}\ndef schedule(optimizer, config):\n    {later_none}\n"
    both = []
    for steps in (1, 2):
        script.start, script.ends, script.handed_over = _start(steps), [], []
        body = _invocation(place, task, config={"lr": 0.1}, steps_per_round=steps, slice_seconds=slice_seconds)
        outcome = call(body)
        while outcome.status == "continue" and not script.ends:
            outcome = call(_again(body, outcome))
        both.append(script.handed_over[0].tolist())
    assert both[0] == both[1] != [0.0] * 10


def _start(until: int) -> worker_pb2.AttachReply:
    return worker_pb2.AttachReply(round=0, step=0, model_key="model/0", until_step=until)


def test_gradients_are_clipped_after_the_merge(place: Server, script: Script) -> None:
    call(_invocation(place, config={"lr": 1.0}, clip_norm=1e-3))
    assert 0 < np.linalg.norm(script.handed_over[0]) <= (1 + 1.9) * 1e-3 * (1 + 1e-5), (
        "two steps with a momentum of 0.9"
    )


def test_samples_that_are_none_are_left_out_and_counted(
    place: Server, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    hole = "    return [pair if n % 4 else None for n, pair in enumerate(zip(held['x'], held['y'], strict=True))]"
    task = re.sub(r"    return TensorDataset\(.*", hole, LOADED)
    assert hole in task
    script.start.evaluate = True
    outcome = call(_invocation(place, task))
    drawn = 2 * 8
    left_out = int(capfd.readouterr().err.split(" samples of this invocation were None")[0].split()[-1])
    assert 0 < left_out < drawn
    assert outcome.samples == drawn - left_out == script.ends[0].samples
    assert script.evaluations[0].samples == 15, "of 20"
    nothing = re.sub(r"    return TensorDataset\(.*", "    return [None] * 20", LINEAR_TASK)
    outcome = call(_invocation(place, nothing))
    assert (outcome.code, outcome.message) == (
        "TASK_INVALID", "all 8 samples that dataset gives for step 1 are None",
    )  # fmt: skip


def test_several_losses_are_measured_by_name_and_their_sum_is_minimised(place: Server, script: Script) -> None:
    script.start.evaluate = True
    parts = "{'fit': nn.functional.mse_loss(model(x), y), 'size': model.weight.square().sum() + 1.0}"
    task = LINEAR_TASK.replace("nn.functional.mse_loss(model(x), y)", parts)
    call(_invocation(place, task))
    told = dict(script.evaluations[0].metrics)
    assert set(told) == {"fit", "size", "loss"}
    assert told["loss"] == pytest.approx(told["fit"] + told["size"])
    assert told["size"] == pytest.approx(1.0)
    one = LINEAR_TASK.replace("nn.functional.mse_loss(model(x), y)", "{'a': 1.0}")
    outcome = call(_invocation(place, one))
    assert outcome.message == "loss(model, batch) returned a float as a, not a tensor of one element"


def test_collate_on_round_and_an_iterable_dataset(
    place: Server, script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    stream = """class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for x, y in zip(held['x'], held['y'], strict=True):
                yield {'in': {'x': x}, 'out': (y, [y.sum()])}
    return Stream()
"""
    task = re.sub(r"return TensorDataset\(.*\n", lambda _: stream, LOADED) + (
        "\ndef collate(samples):\n"
        "    return torch.stack([torch.as_tensor(one['in']['x']) for one in samples]), "
        "torch.stack([torch.as_tensor(one['out'][0]) for one in samples])\n"
        "def on_round(model, completed):\n"
        "    print('completed', completed, float(model.weight.sum()), torch.is_grad_enabled())\n"
    )
    plain = call(_invocation(place))
    before = script.handed_over[0].tolist()
    script.ends, script.handed_over = [], []
    outcome = call(_invocation(place, task))
    assert (outcome.status, outcome.samples) == (plain.status, plain.samples)
    assert script.handed_over[0].tolist() == before, "the same samples in the same order"
    assert "completed 1 8.0 False" in capfd.readouterr().out
    broken = call(_invocation(place, task.replace("return torch.stack", "return nothing + torch.stack")))
    assert broken.message.startswith("collate raised NameError: name 'nothing' is not defined at task.py:")


class _Other:
    """The region's other worker: its merges of one attempt, in a thread, with a gradient that the step alone says."""

    def __init__(self, place: Server, attempt: int, steps: range, collective: str) -> None:
        self._channel, self._fence = _Unbroken(place.channel_folder), fence_key(attempt)
        channel: Any = FencedChannel(self._channel, attempt)
        layout = FlatModel(torch.nn.Linear(4, 2)).layout
        settings = Settings(collective, significance=0.0, timeout_seconds=60.0)
        self._steps, size = steps, layout.size if collective == "isp" else layout.gradient_size
        self._one: Any = open_collective(settings, Member(1, 2, attempt), channel, "c", size)
        self._size, self._model, self._thread = size, np.ones(size, np.float32), threading.Thread(target=self._work)

    def _work(self) -> None:
        with contextlib.suppress(GeofedError):
            for step in self._steps:
                self._one.merge(step, np.linspace(-step, step, self._size, dtype=np.float32), 8.0, self._model)
            self._one.settle(2, self._model)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        # It waits no longer for a worker that has left.
        self._channel.put(self._fence, [b"over"])
        self._thread.join(60)
        self._one.close()


class _Unbroken(FileChannel):
    """A channel that the test's faults leave alone."""

    wait = FileChannel.wait
    wait_ranged = FileChannel.wait_ranged


@pytest.mark.parametrize("code", ["FENCED", "CHANNEL_UNAVAILABLE"])
@pytest.mark.parametrize("collective", ["scatter-reduce", "isp"])
def test_a_step_whose_merge_breaks_in_the_middle_is_made_again_from_the_model_before_it(
    place: Server, script: Script, monkeypatch: pytest.MonkeyPatch, code: str, collective: str
) -> None:
    """The gradients are half merged then, in their memory; with `isp` the worker's own step is made."""
    merging = {"k": 0.0, "significance": 0.0} if collective == "isp" else {}
    body = _invocation(place, workers=2, region_batch=16, collective=collective, merging=merging)
    with _Other(place, 1, range(1, 3), collective):
        assert call(body).steps == 2
    broken: list[str] = []

    def wait(self: FileChannel, keys: Collection[str], seconds: float) -> Iterator[tuple[str, memoryview]]:
        for key, value in _Unbroken.wait(self, keys, seconds):
            # This worker's chunk is merged and stored, and the other's is there.
            half = "/2/g2/m/" in key or collective == "isp"
            if "/2/g2/" in key and half and not broken:
                if collective != "isp":
                    list(_Unbroken.wait(self, [f"c/2/g2/m/{1 - int(key[-1])}"], 60.0))
                broken.append(key)
                raise GeofedError(code, "broken by the test")
            yield key, value

    monkeypatch.setattr(FileChannel, "wait", wait)
    second = body.model_copy(update={"attempt": 2})
    with _Other(place, 2, range(1, 3), collective):
        outcome = call(second)
    assert broken
    assert (outcome.status, outcome.code) == ("left" if code == "FENCED" else "failed", code)
    assert len(script.handed_over) == 1, "nothing that is half merged"
    step = outcome.step if outcome.resume_key else 0
    assert step == (1 if code == "FENCED" and collective != "isp" else 0)
    third = body.model_copy(update={"attempt": 3, "resume_key": outcome.resume_key})
    with _Other(place, 3, range(step + 1, 3), collective):
        assert call(third).steps == 2 - step
    assert script.handed_over[1].tobytes() == script.handed_over[0].tobytes()
