"""Federated averaging over many clients in this process: the worker's own loop, with a server that is an object.

No daemon, no port and no sandbox: one region, one worker, for experiments with the methods.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from control_plane.spec import load
from geofed_pb.errors import GeofedError
from geofed_pb.user_code.modules import drop_task_modules
from geofed_pb.v1 import worker_pb2
from region_agent.worker.clients.model import ClientsModel
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.invocation import ClientRounds, Invocation, Schedule
from region_agent.worker.loop import WorkerLoop
from region_agent.worker.task import TaskModule, load_task
from sync import framing
from sync.channel_clients import FileChannel
from sync.codec import codec_named
from sync.histograms import Histogram, from_messages
from sync.layout import Layout
from sync.policy import Contribution, policy_named
from sync.ps.execution.export import to_safetensors
from sync.ps.execution.replica import Replica, ReplicaState
from sync.seeding import seed_all
from sync.wan import ExchangeSettings, policy_of

if TYPE_CHECKING:
    from control_plane.spec import JobSpec

__all__ = ["TrainedModel", "train_clients"]

_REGION = "here"
_OF_LINKS = (
    "robust", "byzantine", "codec", "topology", "fragments", "quorum", "grace", "lead", "staleness", "significance",
    "guard",
)  # fmt: skip
"""Keys of `wan` that need several regions."""
_WITHOUT_EFFECT = ("goal", "patience", "time")
"""Keys of `train.end` that a control plane looks after."""


@dataclass
class TrainedModel:
    """What came of a training."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    """A row for each round, as of a job's: round, region, step, samples so far, loss, and metrics."""
    model: bytes = b""
    """A safetensors file."""
    clients: int = 0
    clients_per_round: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    """Of the last evaluation."""


def train_clients(job_file: Path, splits: dict[str, Path], clients: Sequence[int]) -> TrainedModel:
    """Train the job of a file, which has `clients`, over the data of files by split; ``clients``: of each sample of
    `train`, in the order of the task's dataset.

    Raises ``GeofedError``, as the worker of a job would, and SPEC_INVALID for settings that only daemons can keep.
    """
    spec = load(job_file).spec
    _check(spec)
    with tempfile.TemporaryDirectory(prefix="geofed-clients-") as folder, ExitStack() as undo:
        undo.callback(drop_task_modules)
        # As workers have it: a few samples are computed sooner by one thread than divided among several.
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        seed_all(spec.train.seed)
        task = load_task(job_file.parent.resolve(), spec.task.module, dict(spec.task.config))
        data = {
            split: task.dataset(str(splits[split]), split) for split in sorted(splits, key=lambda one: one != "train")
        }
        data["train"] = _owned(data["train"], clients)
        return _train(spec, task, data, FileChannel(Path(folder)))


def _check(spec: JobSpec) -> None:
    given = [f"train.end.{key}" for key in _WITHOUT_EFFECT if getattr(spec.train.end, key) is not None]
    given += ["train.initialModel"] if spec.train.initial_model is not None else []
    given += ["train.keep"] if spec.train.keep != "last" else []
    given += [f"wan.policy: {spec.wan.policy}"] if spec.wan.traits.normalises else []
    given += [f"wan.{key}" for key in _OF_LINKS if key in spec.wan.model_fields_set]
    if given:
        text = f"{given[0]} has no effect on clients in one process"
        raise GeofedError("SPEC_INVALID", text, hint="leave it out, or train over regions: `clients` of a job file")


def _owned(data: Any, clients: Sequence[int]) -> Any:
    try:
        data.clients = list(clients)
    except AttributeError:
        return _Owned(data, clients)
    return data


class _Owned:
    """A dataset that takes no attributes, such as a list."""

    def __init__(self, data: Any, clients: Sequence[int]) -> None:
        self._data, self.clients = data, list(clients)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index]


def _train(spec: JobSpec, task: TaskModule, data: dict[str, Any], channel: FileChannel) -> TrainedModel:
    train, wanted = spec.train, spec.clients
    assert wanted is not None
    rounds = ClientRounds(
        fraction=wanted.fraction, least=wanted.min, epochs=0 if wanted.steps else wanted.epochs or 1,
        steps=wanted.steps or 0, batch=train.probed_batch,
    )  # fmt: skip
    known = ClientSampler(data["train"], train.seed, _REGION, rounds)
    each = spec.wan.interval if isinstance(spec.wan.interval, int) else 1
    exchanges = max(1, math.ceil(_steps(spec, known, len(data["train"])) / each))
    call = _invocation(spec, rounds, exchanges, each)
    server = _Server(spec, call, channel)
    begun = time.monotonic()
    trainer = ClientsModel(rounds, call, task, data, channel, begun)
    WorkerLoop(call, trainer, channel, begun, server=lambda *_: server).run()
    server.found.clients, server.found.clients_per_round = known.total, known.of_round
    return server.finished()


def _steps(spec: JobSpec, known: ClientSampler, samples: int) -> float:
    """Return the rounds of clients that a job makes."""
    end = spec.train.end
    if end.steps is not None:
        return end.steps
    of_all = sum(known.trained_samples(client) for client in range(known.total))
    return (end.epochs or 1.0) * samples / (of_all * known.of_round / known.total) - 1e-9


def _invocation(spec: JobSpec, rounds: ClientRounds, exchanges: int, each: int) -> Invocation:
    # A job with clients states its batch.
    train, given = spec.train, spec.train.probed_batch
    rate = train.learning_rate
    schedule = rate and Schedule(shape=rate.schedule, warmup=rate.warmup, floor=rate.floor, begin=rate.begin)
    return Invocation(
        job="in-process", region=_REGION, worker=0, workers=1, attempt=1, token="", ps_address="", ps_name="",
        ca_pem="", channel="file", channel_address="", bundle_key="", module=spec.task.module,
        config=dict(spec.task.config), splits={}, region_batch=given,
        batch=-(-given // train.accumulate), evaluation_batch=train.eval_batch or 0, steps_per_round=each,
        rounds=exchanges, seed=train.seed, schedule=schedule or None, clip_norm=train.clip_norm or 0.0,
        precision=train.precision, compile=train.compile, local=tuple(train.local),
        proximal=_settings(spec).get(spec.wan.traits.proximal, 0.0), slice_seconds=math.inf, clients=rounds,
    )  # fmt: skip


def _settings(spec: JobSpec) -> dict[str, float]:
    return {**spec.wan.traits.settings, **(spec.wan.outer or {})}


class _Server:
    """The parameter server of one region and one worker."""

    def __init__(self, spec: JobSpec, call: Invocation, channel: FileChannel) -> None:
        self._spec, self._call, self._channel = spec, call, channel
        self._layout: Layout | None = None
        self._replica: Replica | None = None
        self._round, self._samples = 0, 0.0
        self.found = TrainedModel()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None: ...

    def attach(self, request: worker_pb2.AttachRequest) -> worker_pb2.AttachReply:
        """Take the first model."""
        model = self._taken(request.initial_key)
        self._layout = Layout.from_json(request.layout_json)
        name = policy_named(self._spec.wan.traits.name).name
        self._replica = Replica(
            policy_of(name, _settings(self._spec)), ExchangeSettings(), codec_named("fp32"),
            ReplicaState(model.copy(), model.copy()),
        )  # fmt: skip
        self._replica.trained, self._replica.alone = self._layout.trainable_size, True
        return worker_pb2.AttachReply(**self._present())

    def boundary(self, request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        """Merge what the round has changed."""
        assert self._replica is not None
        last = request.round == self._call.rounds
        made = self._replica.own_update(self._taken(request.model_key), request.round, last=last)
        self._replica.merge([Contribution(_REGION, 1.0, made.sent, whole=made.whole)], None, own=_REGION, rounds=1)
        self._replica.restart()
        self._channel.delete(f"model/{self._round}")
        self._round, self._samples = request.round, self._samples + request.samples
        row = {
            "round": self._round, "region": _REGION, "step": int(request.step), "samples": int(self._samples),
            "loss": request.loss,
        }  # fmt: skip
        for one in request.logged:
            if one.round == self._round:
                row |= {name: held.sum / held.count for name, held in one.values.items()}
        self.found.rounds.append(row)
        return worker_pb2.BoundaryReply(**self._present())

    def evaluated(self, request: worker_pb2.EvaluatedRequest) -> None:
        """Keep the metrics. Raises ``GeofedError("TASK_FAILED")`` for a failed evaluation."""
        if request.error:
            raise GeofedError("TASK_FAILED", request.error)
        self.found.metrics = dict(request.metrics)
        self.found.histograms = from_messages(request.histograms)[0]
        row = self.found.rounds[-1] if self.found.rounds else {}
        row |= {name: value for name, value in request.metrics.items() if name not in row}
        row["test_loss"] = request.metrics.get("loss")

    def stepped(self, request: worker_pb2.SteppedRequest) -> None:
        """Do nothing: nobody looks at single steps."""

    def finished(self) -> TrainedModel:
        """Return what came of the training, with the model."""
        assert self._replica is not None
        assert self._layout is not None
        self.found.model = b"".join(to_safetensors(self._layout, self._replica.model, {}))
        return self.found

    def _taken(self, key: str) -> Any:
        stored = self._channel.get(key)
        assert stored is not None, "the worker stores it before it calls"
        return np.array(framing.decode(stored).tensors["model"], np.float32)

    def _present(self) -> dict[str, Any]:
        assert self._replica is not None
        key = f"model/{self._round}"
        self._channel.put(key, framing.encode({"model": self._replica.model}))
        every, over = self._spec.train.evaluate_every, self._round >= self._call.rounds
        due = over or bool(self._round and every and self._round % every == 0)
        return {
            "round": self._round, "model_key": key, "until_step": (self._round + 1) * self._call.steps_per_round,
            "finished": over, "evaluate": due,
        }  # fmt: skip
