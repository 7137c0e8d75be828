"""The worker function: what an OpenFaaS python3-http template or the embedded gateway calls."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from region_agent.worker.data import fetch_split, joined
from region_agent.worker.heap import keep_pages
from region_agent.worker.holding import Holding, WholeModel
from region_agent.worker.invocation import Invocation, Outcome, read_invocation
from region_agent.worker.loop import WorkerLoop
from region_agent.worker.profile_call import ProfileCall, Profiled, is_profile_call, read_profile_call
from region_agent.worker.profiling import profile, weigh
from region_agent.worker.scratch import scratch_folder
from region_agent.worker.stage import ModelStage, pipeline_of
from region_agent.worker.task import Task, load_task, unpack
from sync.channel import Channel, open_channel
from sync.device import device
from sync.pipeline import measure_messages

__all__ = ["handle"]

# The first optimiser imports a good part of torch, most of a second. Here the warm parent pays for it once, instead
# of every worker that is forked from it. No kernel runs, so no thread is started.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


_TOO_SMALL = "raise function.memoryMb, or run `control-plane profile`: plans then cut the model into stages that fit"


class Event(Protocol):
    """A request, as the OpenFaaS python3-http template hands it over."""

    body: bytes


def handle(event: Event, context: object) -> dict[str, object]:
    """Run one invocation. Failures come back in the body, so that the agent sees their code; status 200 always
    means that the function itself has answered."""
    begun = time.monotonic()
    answer = Profiled if is_profile_call(event.body) else Outcome
    outcome: Outcome | Profiled
    try:
        if answer is Profiled:
            outcome = _profile(read_profile_call(event.body), begun)
        else:
            outcome = _run(read_invocation(event.body), begun)
    except GeofedError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr, flush=True)
        outcome = answer(status="failed", code=error.code, message=error.message, hint=error.hint)
    except MemoryError:
        text = "the worker ran out of memory"
        outcome = answer(status="failed", code="FUNCTION_OUT_OF_MEMORY", message=text, hint=_TOO_SMALL)
    except Exception as error:  # noqa: BLE001 - the edge of the function: the agent must be told, not the platform
        traceback.print_exc(file=sys.stderr)
        outcome = answer(status="failed", code="INTERNAL", message=clean(f"{type(error).__name__}: {error}"))
    return {"statusCode": 200, "body": outcome.model_dump_json(), "headers": {"Content-Type": "application/json"}}


def _profile(call: ProfileCall, begun: float) -> Profiled:
    _make_ready()
    channel = open_channel(call.channel, call.channel_address)
    task = _task(channel, call)
    told = weigh(call, task) if call.measure == "size" else profile(call, task, _data(call, task), begun)
    if told.layers:
        told = told.model_copy(update=_messages(channel))
    return told.model_copy(update={"seconds": time.monotonic() - begun, "channel": asdict(channel.usage)})


def _messages(channel: Channel) -> dict[str, float]:
    """Nothing where they cannot be measured: the rest of the profile is worth having."""
    try:
        one = measure_messages(channel, "probe/messages")
    except GeofedError as error:
        print(f"messages between stages were not measured: {error}", file=sys.stderr, flush=True)
        return {}
    return {"message_seconds": one.seconds, "message_core_seconds": one.core_seconds}


def _make_ready() -> None:
    keep_pages()
    torch.set_num_threads(max(1, int(os.environ.get("GEOFED_WORKER_THREADS", "1"))))


def _run(invocation: Invocation, begun: float) -> Outcome:
    _make_ready()
    where = device(invocation.worker)
    if where.type == "cuda":
        print(f"computing on {where}, {torch.cuda.get_device_name(where)}", flush=True)
    channel = open_channel(invocation.channel, invocation.channel_address)
    task = _task(channel, invocation)
    return WorkerLoop(invocation, _holding(invocation, task, channel, begun), channel, begun).run()


def _holding(invocation: Invocation, task: Task, channel: Channel, begun: float) -> Holding:
    if not invocation.stages:
        return WholeModel(invocation, task, _data(invocation, task), channel, begun)
    stage = pipeline_of(invocation).position(invocation.worker).stage
    # Only the ends of a pipeline look at samples: the first stage at inputs, the last at labels.
    reads = stage in (0, len(invocation.stages) - 1)
    return ModelStage(invocation, task, _data(invocation, task) if reads else {}, channel)


def _task(channel: Channel, invocation: Invocation | ProfileCall) -> Task:
    bundle = channel.get(invocation.bundle_key)
    if bundle is None:
        raise GeofedError("TASK_INVALID", f"the task folder {invocation.bundle_key} is not in the channel")
    return load_task(unpack(bundle, _scratch() / "bundles"), invocation.module, dict(invocation.config))


_loaded: dict[str, tuple[Any, Any]] = {}
"""Datasets by split, kept while the replica serves the same job with the same files."""


def _data(invocation: Invocation | ProfileCall, task: Task) -> dict[str, Any]:
    data = {}
    for split, files in invocation.splits.items():
        mark = (invocation.job, invocation.bundle_key, [(file.name, file.path, file.size) for file in files])
        if _loaded.get(split, (None, None))[0] != mark:
            shards = [
                task.dataset(fetch_split(tuple(of_one), _scratch() / "data" / split / shard), split)
                for shard, of_one in itertools.groupby(files, lambda file: file.shard)
            ]
            _loaded[split] = (mark, joined(shards))
        data[split] = _loaded[split][1]
    if "train" not in data:
        raise GeofedError("SHARD_UNREADABLE", "the region holds no training split")
    _check_samples(invocation, len(data["train"]))
    return data


def _check_samples(invocation: Invocation | ProfileCall, found: int) -> None:
    """Epochs, shares of the merge and forecasts are all made from what the region's file says."""
    declared = invocation.declared_samples
    if declared is None or found in (0, declared):  # that there are none has an error of its own
        return
    text = f"the file of region {invocation.region} states {declared} training samples, the task's dataset has {found}"
    hint = (
        f"state samples: {found} in the file of region {invocation.region} and start its agent again; a task that cuts "
        "the same files into other samples needs a dataset of another name there"
    )
    raise GeofedError("SAMPLES_MISMATCH", text, hint=hint)


@lru_cache(maxsize=1)
def _scratch() -> Path:
    return scratch_folder(Path(tempfile.gettempdir()))
