"""The worker function in its profile mode: what it measures, and that nothing else goes out."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.jobs import LINEAR_TASK, pack, write_samples

from region_agent.worker.handler import handle
from region_agent.worker.invocation import ClientRounds, Outcome, ShardFile
from region_agent.worker.profile_call import ProfileCall, Profiled
from sync.channel_clients import FileChannel

CANARY = 31337.4375


def call_of(folder: Path, task: str = LINEAR_TASK, samples: int = 200, **changed: Any) -> ProfileCall:
    """A call of the function, whose code and data are in a folder."""
    bundle = pack({"task.py": task})
    key = f"bundle/{hashlib.sha256(bundle).hexdigest()}"
    FileChannel(str(folder / "channel")).put(key, [bundle])
    data = write_samples(folder / "data.npz", samples)
    files = (ShardFile(name=data.name, path=str(data)),)
    fields: dict[str, Any] = {
        "job": "profile-1", "region": "east", "channel": "file", "channel_address": str(folder / "channel"),
        "bundle_key": key, "module": "task.py", "config": {}, "splits": {"train": files, "test": files}, "batch": 16,
        "seed": 5, "limit_seconds": 20.0, **changed,
    }  # fmt: skip
    return ProfileCall(**fields)


def profiled(folder: Path, task: str = LINEAR_TASK, samples: int = 200, **changed: Any) -> tuple[Profiled, str]:
    """What the function answers, and the body as it went out."""
    call = call_of(folder, task, samples, **changed)
    answer = handle(SimpleNamespace(body=call.model_dump_json().encode()), None)
    assert answer["statusCode"] == 200
    body = str(answer["body"])
    return Profiled.model_validate_json(body), body


def test_a_profile_tells_sizes_seconds_memory_and_noise(tmp_path: Path) -> None:
    told, _ = profiled(tmp_path)
    assert told.status == "done"
    assert (told.parameters, told.model_bytes, told.samples) == (10, 40, 200)
    assert [step.batch for step in told.steps] == [4, 8, 16, 32]
    assert all(step.seconds > 0 and step.peak_mb > 1 for step in told.steps)
    assert told.update_seconds > 0
    assert told.norms
    assert all(pair.small_batch * 2 <= pair.large_batch <= 200 for pair in told.norms)
    assert all(pair.large_norm2 > 0 for pair in told.norms)
    assert told.evaluation_peak_mb > 1
    # One linear layer is no chain of layers, and it says so.
    assert not told.layers
    assert "nn.Sequential" in told.layers_note


@pytest.mark.parametrize("measure", ["pace", "all"])
def test_a_task_is_measured_that_diverges_without_the_batch_and_schedule_of_its_job(
    tmp_path: Path, measure: str
) -> None:
    told, _ = profiled(tmp_path, config={"lr": 50.0}, measure=measure)
    assert (told.status, told.message) == ("done", "")
    assert told.steps
    assert all(math.isfinite(pair.large_norm2 + pair.small_norm2) for pair in told.norms)


@pytest.mark.parametrize(
    ("changed", "measured"),
    [
        # BatchNorm cannot be trained with one sample.
        (
            ("nn.Linear(4, 2)", "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))"),
            {"pace": [6, 2], "all": [2, 3, 6, 12]},
        ),
        # Neither can what wants pairs with an odd number.
        (("x, y = batch", "x, y = batch\n    assert not len(x) % 2"), {"pace": [6, 2], "all": [2, 6, 12]}),
        (("x, y = batch", "x, y = batch\n    assert not len(x) % 3"), {"pace": [6], "all": [3, 6, 12]}),
        (("x, y = batch", "x, y = batch\n    assert len(x) == 6"), {"pace": [6], "all": [6]}),
    ],
)
def test_only_the_jobs_batch_must_be_one_that_the_task_can_train(
    tmp_path: Path, changed: tuple[str, str], measured: dict[str, list[int]]
) -> None:
    task = LINEAR_TASK.replace(*changed)
    for measure, batches in measured.items():
        told, _ = profiled(tmp_path, task, batch=6, measure=measure)
        assert (told.status, told.message) == ("done", "")
        assert [step.batch for step in told.steps] == batches
    told, _ = profiled(tmp_path, task, batch=5, measure="pace")
    assert told.status == ("done" if "BatchNorm" in changed[1] else "failed")


@pytest.mark.parametrize("measure", ["pace", "all"])
def test_data_that_are_not_finite_are_found_before_the_plan(tmp_path: Path, measure: str) -> None:
    begin = LINEAR_TASK.index("\n", LINEAR_TASK.index("def loss")) + 1
    task = LINEAR_TASK[:begin] + "    batch = (batch[0] * float('nan'), *batch[1:])\n" + LINEAR_TASK[begin:]
    told, _ = profiled(tmp_path, task, measure=measure)
    assert (told.status, told.code) == ("failed", "TASK_FAILED")
    assert "the loss is nan before anything is trained" in told.message
    assert "not finite" in told.hint


def test_a_profile_runs_with_the_variables_of_the_task(tmp_path: Path) -> None:
    task = "import os\n" + LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(4, int(os.environ['WIDTH']))")
    told, _ = profiled(tmp_path, task, measure="size", env={"WIDTH": "3"})
    assert (told.status, told.parameters) == ("done", 15)


@pytest.mark.slow
def test_steps_are_measured_in_the_parts_and_the_precision_of_the_job(tmp_path: Path) -> None:
    told, _ = profiled(tmp_path, at_once=3, precision="bf16")
    assert told.status == "done"
    checked = "    assert model(batch[0]).dtype is torch.bfloat16 and len(batch[0]) <= 3\n"
    begin = LINEAR_TASK.index("\n", LINEAR_TASK.index("def loss")) + 1
    task = LINEAR_TASK[:begin] + checked + LINEAR_TASK[begin:]
    told, _ = profiled(tmp_path, task, at_once=3, precision="bf16")
    assert (told.status, [step.batch for step in told.steps]) == ("done", [4, 8, 16, 32])
    assert [profiled(tmp_path, task, **other)[0].code for other in ({"at_once": 3}, {"precision": "bf16"})] == [
        "TASK_FAILED", "TASK_FAILED",
    ]  # fmt: skip


CLIENTS_TASK = (
    LINEAR_TASK.replace("import torch\n", "import time\n\nimport torch\n", 1)
    + """

_dataset = dataset


class Owned(torch.utils.data.Dataset):
    def __init__(self, inner):
        self.inner, self.clients = inner, [at // 5 for at in range(len(inner))]

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, at):
        return self.inner[at]


def dataset(uri, split, config):
    return Owned(_dataset(uri, split, config))


def optimizer(parameters, config):
    time.sleep(config.get("seconds", 0.0))
    return torch.optim.SGD(parameters, lr=config.get("lr", 0.01))
"""
)
ROUNDS = ClientRounds(fraction=0.5, epochs=2, batch=4)


def test_rounds_of_clients_are_measured_with_what_a_client_costs(tmp_path: Path) -> None:
    """A client has 5 samples, and processes them twice, in steps of at most 4 or 2."""
    config, per_sample = {"seconds": 0.1}, 0.1 / 10
    told, _ = profiled(
        tmp_path, CLIENTS_TASK, batch=4, clients=ROUNDS, config=config, measure="pace", limit_seconds=1.0
    )
    assert told.status == "done", told.message
    assert [step.batch for step in told.steps] == [4]
    assert 0.9 * per_sample * 4 < told.steps[0].seconds < 2.5 * per_sample * 4
    told, _ = profiled(tmp_path, CLIENTS_TASK, batch=4, clients=ROUNDS, config=config, limit_seconds=4.0)
    assert told.status == "done", told.message
    assert [step.batch for step in told.steps] == [2, 4, 8]
    for step in told.steps:
        assert 0.9 * per_sample * step.batch < step.seconds < 2.5 * per_sample * step.batch
        assert step.peak_mb > 1
    assert (told.update_seconds, told.layers) == (0.0, ())


@pytest.mark.parametrize("seed", range(4))
def test_few_clients_tell_the_time_of_others_with_other_samples(tmp_path: Path, seed: int) -> None:
    """Each client costs 0.1 s and next to nothing for its samples, of which it has 1 or 39; some three are trained."""
    task = CLIENTS_TASK.replace("at // 5 for", "at // 40 * 2 + (at % 40 > 0) for")
    told, _ = profiled(
        tmp_path, task, 800, seed=seed, clients=ROUNDS, config={"seconds": 0.1}, measure="pace", limit_seconds=0.5
    )
    assert told.status == "done", told.message
    assert 0.9 * 0.1 < told.steps[0].seconds / told.steps[0].batch * 40 < 2.5 * 0.1


def test_clients_are_measured_that_diverge_without_the_schedule_and_clipping_of_their_job(tmp_path: Path) -> None:
    rounds = ROUNDS.model_copy(update={"epochs": 100})
    told, _ = profiled(tmp_path, CLIENTS_TASK, batch=4, clients=rounds, config={"lr": 50.0}, measure="pace")
    assert (told.status, told.message) == ("done", "")
    assert told.steps


def test_a_client_that_takes_longer_than_the_time_is_measured_in_part(tmp_path: Path) -> None:
    """A client makes 100 local steps of 0.1 s."""
    begin = CLIENTS_TASK.index("\n", CLIENTS_TASK.index("def loss")) + 1
    task = CLIENTS_TASK[:begin] + "    time.sleep(0.1)\n" + CLIENTS_TASK[begin:]
    rounds = ROUNDS.model_copy(update={"epochs": 50})
    told, _ = profiled(tmp_path, task, batch=4, clients=rounds, measure="pace", limit_seconds=2.0)
    assert told.status == "done", told.message
    # Half of the local steps of 4 samples have one, as a client has 5.
    assert told.steps[0].batch == 4
    assert 0.1 < told.steps[0].seconds < 0.5
    assert told.seconds - told.loaded_seconds < 8.0, "a whole client takes 10 s"


def test_the_memory_of_rounds_of_clients_is_told(tmp_path: Path) -> None:
    plain, _ = profiled(tmp_path, CLIENTS_TASK, measure="size")
    told, _ = profiled(tmp_path, CLIENTS_TASK, measure="size", clients=ROUNDS)
    assert told.held_bytes == plain.held_bytes + 16 * 10
    # The bias stays in the region, but clients' changes to it are averaged there as well.
    local, _ = profiled(tmp_path, CLIENTS_TASK, measure="size", clients=ROUNDS, local=("bias",))
    assert (local.model_bytes, local.held_bytes) == (32, told.held_bytes)


@pytest.mark.processes
def test_the_memory_of_rounds_of_clients_is_what_they_take(tmp_path: Path) -> None:
    """A model of 8 million parameters; the peak of a step without clients is that of its tensors and gradients."""
    layers = "nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 4000), nn.Linear(4000, 2))"
    task = CLIENTS_TASK.replace("nn.Linear(4, 2)", layers)
    told, _ = profiled(tmp_path, task, batch=4, clients=ROUNDS, measure="size")
    with_clients = _in_a_process(tmp_path, task, clients=ROUNDS)
    without = _in_a_process(tmp_path, task)
    more = 16 * told.parameters / 2**20
    # Whether the gradient of the largest layer, a quarter of it, is there twice for a moment differs between runs.
    assert with_clients - without == pytest.approx(more, rel=0.3)


def _in_a_process(folder: Path, task: str, **changed: Any) -> float:
    """Return the peak in MB of a profile's first step in a process of its own, as a process keeps what it has had."""
    body = call_of(folder, task, batch=4, limit_seconds=0.1, config={"lr": 1e-9}, **changed).model_dump_json()
    code = (
        "import sys, types; from region_agent.worker.handler import handle; "
        "print(handle(types.SimpleNamespace(body=sys.argv[1].encode()), None)['body'])"
    )
    ran = subprocess.run([sys.executable, "-c", code, body], capture_output=True, text=True, timeout=120, check=True)
    told = Profiled.model_validate_json(ran.stdout.splitlines()[-1])
    assert told.status == "done", told.message
    return told.steps[0].peak_mb


@pytest.mark.slow
def test_a_model_that_is_a_chain_is_measured_layer_by_layer(tmp_path: Path) -> None:
    task = LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))")
    told, _ = profiled(tmp_path, task)
    assert [layer.kind for layer in told.layers] == ["Linear", "ReLU", "Linear"]
    assert told.layers[0].parameter_bytes == 4 * 40


@pytest.mark.slow
def test_nothing_of_the_data_is_in_the_answer(tmp_path: Path) -> None:
    task = LINEAR_TASK.replace('torch.from_numpy(held["x"])', f'torch.from_numpy(held["x"]) * 0 + {CANARY}')
    told, body = profiled(tmp_path, task, config={"lr": 1e-12})
    assert told.status == "done"
    assert str(CANARY) not in body
    numbers = _numbers(json.loads(body))
    assert not any(np.isclose(value, CANARY) for value in numbers)
    # Whatever the number of samples, the answer has as many numbers.
    assert len(numbers) < 100


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for held in value.values() for number in _numbers(held)]
    if isinstance(value, list):
        return [number for held in value for number in _numbers(held)]
    return [float(value)] if isinstance(value, int | float) else []


LABELLED_TASK = LINEAR_TASK.replace('torch.from_numpy(held["y"]))', "torch.arange(len(held['x'])) % 2)").replace(
    "mse_loss", "cross_entropy"
)


@pytest.mark.slow
def test_labels_are_counted_where_asked_for(tmp_path: Path) -> None:
    assert profiled(tmp_path, LABELLED_TASK, labels=True)[0].labels == {0: 100, 1: 100}
    assert not profiled(tmp_path, LABELLED_TASK)[0].labels
    paced, alone = (profiled(tmp_path, LABELLED_TASK, labels=True, measure=one)[0] for one in ("pace", "labels"))
    assert (paced.labels, bool(paced.steps)) == ({0: 100, 1: 100}, True)
    assert (alone.labels, alone.samples, alone.steps, alone.parameters) == ({0: 100, 1: 100}, 200, (), 0)
    assert not profiled(tmp_path, labels=True)[0].labels, "numbers are no labels"


def test_making_ready_measures_nothing(tmp_path: Path) -> None:
    told, _ = profiled(tmp_path, measure="nothing")
    assert told.status == "done"
    assert told.model_bytes == 40
    assert not told.steps
    assert not told.norms


def test_a_model_is_probed_without_looking_at_data(tmp_path: Path) -> None:
    told, _ = profiled(tmp_path, measure="size", splits={})
    assert (told.status, told.parameters, told.model_bytes, told.samples, told.steps) == ("done", 10, 40, 0, ())
    # The rest of the state travels too.
    normed = LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))")
    told, _ = profiled(tmp_path, normed, measure="size", splits={})
    assert (told.parameters, told.model_bytes) == (18, 4 * (18 + 4 + 4 + 3))


@pytest.mark.slow
@pytest.mark.parametrize("width", ["8", "8 + int(torch.ones(1).item() > 9)"])
def test_what_is_not_trained_does_not_count(tmp_path: Path, width: str) -> None:
    """Whether only the model's shell is made, or the model, since that needs values."""
    whole_task = LINEAR_TASK.replace("nn.Linear(4, 2)", f"nn.Sequential(nn.Linear(4, {width}), nn.Linear(8, 2))")
    adapted = whole_task.replace(f"nn.Linear(4, {width})", f"nn.Linear(4, {width}).requires_grad_(False)")
    whole, _ = profiled(tmp_path, whole_task, measure="size", splits={})
    told, _ = profiled(tmp_path, adapted, measure="size", splits={})
    assert told.parameters == whole.parameters
    assert (told.model_bytes, whole.model_bytes) == (4 * 18, 4 * 58)
    assert (told.held_bytes, whole.held_bytes) == (4 * (58 + 18), 4 * (58 + 58)), "all tensors, and gradients"


@pytest.mark.slow
def test_a_model_is_probed_without_being_made(tmp_path: Path) -> None:
    """Of a chain and of what is none; one that needs its values to be made is made."""
    told, _ = profiled(tmp_path, DEEP, measure="size", splits={})
    deep, _ = profiled(tmp_path, DEEP, memory_mb=64)
    assert (told.parameters, told.model_bytes) == (deep.parameters, deep.model_bytes)
    huge = LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(1 << 20, 1 << 20)")
    told, _ = profiled(tmp_path, huge, measure="size", splits={})
    assert told.model_bytes == 4 * ((1 << 40) + (1 << 20))
    valued = LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(4, 2 + int(torch.ones(1).item() > 9))")
    told, _ = profiled(tmp_path, valued, measure="size", splits={})
    assert told.model_bytes == 40


@pytest.mark.parametrize(("samples", "sizes"), [(200, [16, 4]), (10, [10, 2]), (1, [1])])
def test_a_pace_is_of_the_jobs_batch_and_a_smaller_one(tmp_path: Path, samples: int, sizes: list[int]) -> None:
    told, body = profiled(tmp_path, samples=samples, measure="pace", limit_seconds=5.0)
    assert [step.batch for step in told.steps] == sizes
    assert all(step.seconds > 0 for step in told.steps)
    assert told.loaded_seconds > 0
    assert len(_numbers(json.loads(body))) < 100


def test_what_the_first_step_loads_is_not_its_pace(tmp_path: Path) -> None:
    """However much of the time it takes."""
    loads = (
        "def loss(model, batch):\n    global begun\n    import time; time.sleep(0.0 if begun else 0.5); begun = True"
    )
    task = "begun = False\n" + LINEAR_TASK.replace("def loss(model, batch):", loads)
    told, _ = profiled(tmp_path, task, measure="pace", limit_seconds=0.2)
    assert told.steps[0].seconds < 0.4


def test_a_slow_step_is_timed_for_no_other_batch(tmp_path: Path) -> None:
    slow = LINEAR_TASK.replace("def loss(model, batch):", "def loss(model, batch):\n    import time; time.sleep(0.3)")
    told, _ = profiled(tmp_path, slow, measure="pace", limit_seconds=0.2)
    assert [step.batch for step in told.steps] == [16]
    assert told.steps[0].seconds >= 0.3


def test_batches_are_never_larger_than_the_data(tmp_path: Path) -> None:
    told, _ = profiled(tmp_path, samples=10)
    assert [step.batch for step in told.steps] == [4, 8, 10]


@pytest.mark.parametrize(
    ("task", "code", "message"),
    [
        (LINEAR_TASK.replace("nn.Linear(4, 2)", "nn.Linear(5, 2)"), "TASK_FAILED", "loss raised RuntimeError"),
        (LINEAR_TASK.replace("def loss", "def lost"), "TASK_INVALID", "task.py does not define loss"),
        (LINEAR_TASK + "\nraise ValueError('at import')\n", "TASK_FAILED", "import raised ValueError"),
    ],
)
def test_a_task_that_fails_says_how(tmp_path: Path, task: str, code: str, message: str) -> None:
    told, _ = profiled(tmp_path, task)
    assert (told.status, told.code) == ("failed", code)
    assert message in told.message


def test_a_body_that_is_no_call_is_refused_in_its_own_form() -> None:
    answer = handle(SimpleNamespace(body=b'{"kind":"profile","batch":0}'), None)
    assert Profiled.model_validate_json(str(answer["body"])).code == "CONFIG_INVALID"
    answer = handle(SimpleNamespace(body=b'{"kind":"other"}'), None)
    assert Outcome.model_validate_json(str(answer["body"])).code == "CONFIG_INVALID"


@pytest.mark.slow
def test_a_model_that_the_function_cannot_hold_is_measured_without_being_made_whole(tmp_path: Path) -> None:
    """Each layer may be made, all together not: the task counts its living parameters."""
    told, _ = profiled(tmp_path, DEEP, memory_mb=64)
    assert (told.status, told.message) == ("done", "")
    assert len(told.layers) == 6
    assert told.update_seconds == sum(layer.update_seconds for layer in told.layers) > 0
    assert told.model_bytes == sum(layer.parameter_bytes + layer.state_bytes for layer in told.layers)
    assert [step.batch for step in told.steps] == [4, 8, 16]
    assert all(step.seconds > 0 for step in told.steps)
    assert told.steps[0].peak_mb > 2 * told.model_bytes / 2**20
    again, _ = profiled(tmp_path, DEEP, memory_mb=64, measure="nothing")
    assert (again.status, again.steps) == ("done", ())
    whole, _ = profiled(tmp_path, DEEP)
    assert "together" in whole.message


DEEP = """
import weakref

import torch
from torch import nn
from torch.nn import functional as F

from numpy import load
from torch.utils.data import TensorDataset

living = weakref.WeakSet()


class Wide(nn.Linear):
    def __init__(self, a, b):
        super().__init__(a, b)
        if self.weight.device.type != "meta":
            living.add(self)
        if len(living) > 2:
            raise RuntimeError(f"{len(living)} layers live together")


def layers(config):
    return [lambda: Wide(4, 64), *[lambda: Wide(64, 64)] * 4, lambda: Wide(64, 2)]


def dataset(uri, split, config):
    held = load(uri)
    return TensorDataset(torch.from_numpy(held["x"]), torch.from_numpy(held["y"]))


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)
"""
