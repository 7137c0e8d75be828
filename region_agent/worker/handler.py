"""Entry point of the worker function, called by the OpenFaaS python3-http template or by the embedded gateway."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from geofed_pb.errors import GeofedError
from geofed_pb.linux import keep_freed_memory
from geofed_pb.user_code.modules import drop_task_modules
from geofed_pb.user_code.secrets import set_secret_variables
from region_agent.tasks.folder import pieces_of
from region_agent.worker.clients.model import ClientsModel
from region_agent.worker.compiling import check_compiler
from region_agent.worker.data.index import BlockIndex, index_key
from region_agent.worker.data.scratch import scratch_folder
from region_agent.worker.data.shard import fetch_split, joined
from region_agent.worker.data.spec import Stream
from region_agent.worker.data.streamed import Rows, Streamed
from region_agent.worker.evaluation import load_evaluated
from region_agent.worker.invocation import Invocation, Outcome, ShardFile, read_invocation
from region_agent.worker.loop import WorkerLoop
from region_agent.worker.profile_call import ProfileCall, Profiled, is_profile_call, read_profile_call
from region_agent.worker.profiling import probe, profile
from region_agent.worker.ranks.devices import devices_of, devices_seen, own_device, per_device
from region_agent.worker.ranks.group import Ranks
from region_agent.worker.task import TaskModule, load_task, task_fault, unpack
from region_agent.worker.training.stage import ModelStage, pipeline_of
from region_agent.worker.training.trainer import Trainer, WholeModel
from sync.channel import Channel
from sync.channel_clients import open_channel
from sync.pipeline import measure_messages
from sync.seeding import seed_all

__all__ = ["fault_of", "handle", "loaded_from", "prepare_process", "renew"]

# The first optimiser imports a large part of torch, which takes most of a second. Created here, it costs the warm
# parent that time once, instead of every worker that is forked from it. It computes nothing, so it starts no thread.
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


class Event(Protocol):
    """A request, as the OpenFaaS python3-http template passes it."""

    body: bytes


def handle(event: Event, context: object) -> dict[str, object]:
    """Run one invocation.

    A failure is returned in the body, with its error code. The status is always 200, so any other status comes from
    the platform.
    """
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
    except torch.OutOfMemoryError:
        outcome = answer(status="failed", code="GPU_MEMORY", message="the GPU ran out of memory")
    except MemoryError:
        text = "the worker ran out of memory"
        outcome = answer(status="failed", code="FUNCTION_OUT_OF_MEMORY", message=text)
    except Exception as error:  # noqa: BLE001 - every failure must be answered with its code
        fault = fault_of(error)
        outcome = answer(status="failed", code=fault.code, message=fault.message)
    return {"statusCode": 200, "body": outcome.model_dump_json(), "headers": {"Content-Type": "application/json"}}


def fault_of(error: Exception, bundles: Path | None = None) -> GeofedError:
    """Return TASK_FAILED if the traceback contains the task's files, and INTERNAL otherwise.

    ``bundles``: folder with the unpacked task folders; None: that of this process.
    """
    bundles = _scratch() / "bundles" if bundles is None else bundles
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(bundles):
            return task_fault(error, bundles / Path(frame.filename).relative_to(bundles).parts[0], "the task")
    traceback.print_exc(file=sys.stderr)
    return GeofedError("INTERNAL", f"{type(error).__name__}: {error}")


def _profile(call: ProfileCall, begun: float) -> Profiled:
    devices, batch = devices_seen(call.gpus, billed=call.billed_gpus), call.batch
    prepare_process()
    if len(devices) > 1:
        each = {"batch": per_device(call.batch, devices), "at_once": per_device(call.at_once, devices)}
        call = call.model_copy(update=each)
    channel = open_channel(call.channel, call.channel_address)
    task, data = _task_and_data(channel, call)
    if call.compile:
        check_compiler(_scratch() / "compiled", devices[0])
    profiled = probe(call, task) if call.measure == "size" else _measured(call, task, data, begun)
    if len(devices) > 1:
        # What the others compute at the same time.
        batches = [min(one.batch * len(devices), batch) for one in profiled.steps]
        steps = tuple(one.model_copy(update={"batch": size}) for one, size in zip(profiled.steps, batches, strict=True))
        profiled = profiled.model_copy(update={"steps": steps})
    if profiled.layers:
        profiled = profiled.model_copy(update=_messages(channel))
    return profiled.model_copy(update={"seconds": time.monotonic() - begun, "channel": asdict(channel.usage)})


def _measured(call: ProfileCall, task: TaskModule, data: dict[str, Any], begun: float) -> Profiled:
    """Profile the task. A model that is to be divided among devices may be too large for one: no step is timed then."""
    try:
        return profile(call, task, data, begun)
    except (torch.OutOfMemoryError, GeofedError) as error:
        lacks = isinstance(error, torch.OutOfMemoryError) or error.code == "GPU_MEMORY"
        if call.sharding == "none" or call.measure != "pace" or not lacks:
            raise
    print("one GPU is too small for the whole model, so that no step was timed", file=sys.stderr, flush=True)
    return Profiled(status="done", samples=len(data["train"]))


def _messages(channel: Channel) -> dict[str, float]:
    """Measure messages between stages; empty if that fails, since the rest of the profile is still useful."""
    try:
        one = measure_messages(channel, "probe/messages")
    except GeofedError as error:
        print(f"messages between stages were not measured: {error}", file=sys.stderr, flush=True)
        return {}
    return {"message_seconds": one.seconds, "message_core_seconds": one.core_seconds}


def prepare_process(ranks: int = 1) -> None:
    """Prepare a process that computes. ``ranks``: processes of the worker, which share its cores."""
    set_secret_variables()
    keep_freed_memory()
    torch.set_num_threads(max(1, int(os.environ.get("GEOFED_WORKER_THREADS", "1")) // ranks))


def _run(invocation: Invocation, begun: float) -> Outcome:
    devices = devices_of(invocation)
    prepare_process(len(devices))
    own_device(invocation)
    for one in devices:
        if one.type == "cuda":
            print(f"computing on {one}, {torch.cuda.get_device_name(one)}", flush=True)
    if invocation.compile:
        check_compiler(_scratch() / "compiled", devices[0])
    channel = open_channel(invocation.channel, invocation.channel_address)
    return WorkerLoop(invocation, _trainer(invocation, channel, begun), channel, begun).run()


def _trainer(invocation: Invocation, channel: Channel, begun: float) -> Trainer:
    if invocation.clients is not None:
        return ClientsModel(invocation.clients, invocation, *_task_and_data(channel, invocation), channel, begun)
    if not invocation.stages:
        task, data = _task_and_data(channel, invocation)
        ranks = _ranks(invocation, begun)
        if invocation.sharding == "fsdp" and ranks is not None:
            # Imported here: workers that hold the whole model start without it.
            from region_agent.worker.ranks.model import ShardedModel

            return ShardedModel(invocation, task, data, channel, begun, ranks)
        return WholeModel(invocation, task, data, channel, begun, ranks)
    stage = pipeline_of(invocation).position(invocation.worker).stage
    # Only the first stage of a pipeline needs samples, for their inputs, and the last one, for their labels.
    reads = stage in (0, len(invocation.stages) - 1)
    return ModelStage(invocation, *_task_and_data(channel, invocation, keep=reads), channel)


def _ranks(invocation: Invocation, begun: float) -> Ranks | None:
    """Return the further processes of a worker with several devices, which are kept with its task; None: it has one."""
    devices = devices_of(invocation)
    if len(devices) == 1:
        return None
    assert _loaded is not None
    if _loaded.ranks is not None and (not _loaded.ranks.alive or _loaded.ranks.devices != devices):
        _loaded.ranks.close()
        _loaded.ranks = None
    if _loaded.ranks is None:
        _loaded.ranks = Ranks(devices, _scratch())
        _loaded.ranks.load(invocation, _loaded.task.folder, _loaded.fetched, begun)
    return _loaded.ranks


@dataclass
class _Loaded:
    """A task's module with the datasets that its `dataset` has returned.

    They are kept and dropped together, since `dataset` may set variables of the module that the data depend on.
    """

    mark: str
    """Identifies job, code, configuration, files and seed; JSON."""
    task: TaskModule
    samples: int
    """Samples of the training split."""
    data: dict[str, Any] | None
    """Datasets by split; None: not kept, since this worker does not read samples."""
    fetched: Path
    """Folder with the files that were downloaded."""
    ranks: Ranks | None = None
    """Processes that compute with this task on the worker's further devices."""


_loaded: _Loaded | None = None
"""Task of the last invocation; kept while the replica serves the same job with the same files."""
_replaced: dict[str, str | None] = {}
"""Environment variables that the present task has set, with their values before; None: there was none."""


def _task_and_data(
    channel: Channel, invocation: Invocation | ProfileCall, *, keep: bool = True
) -> tuple[TaskModule, dict[str, Any]]:
    """Return the task, after a call of its `dataset` for every split, and the datasets by split.

    ``keep``: the caller needs the datasets; otherwise they may be empty.
    """
    global _loaded
    files = {
        split: [(file.name, file.path, file.size, file.shard) for file in of_split]
        for split, of_split in invocation.splits.items()
    }
    made_of = [invocation.job, invocation.bundle_key, invocation.module, invocation.config, files, invocation.seed]
    made_of += [{split: one.model_dump() for split, one in invocation.streams.items()}] if invocation.streams else []
    made_of += [invocation.env] if invocation.env else []
    made_of += ["evaluates only"] if invocation.evaluates_only else []
    made_of += [invocation.packages] if invocation.packages else []
    mark = json.dumps(made_of, sort_keys=True)
    if _loaded is None or _loaded.mark != mark or (keep and _loaded.data is None):
        _drop_loaded()
        _loaded = _load(channel, invocation, mark, keep=keep)
    renew(_loaded.data or {}, invocation)
    if not _needs_data(invocation):
        return replace(_loaded.task, precision=invocation.precision), {}
    _check_samples(invocation, _loaded.samples)
    return replace(_loaded.task, precision=invocation.precision), _loaded.data or {}


def renew(data: Mapping[str, Any], invocation: Invocation | ProfileCall) -> None:
    """Give data that is read block by block the present addresses of its files."""
    for split, one in data.items():
        if isinstance(one, Streamed):
            one.rows.sources.renew(invocation.splits[split])


def _needs_data(invocation: Invocation | ProfileCall) -> bool:
    return isinstance(invocation, Invocation) or invocation.measure != "size"


def _drop_loaded() -> None:
    global _loaded
    if _loaded is None:
        return
    folder, data, ranks, _loaded = _loaded.task.folder, _loaded.data, _loaded.ranks, None
    if ranks is not None:
        ranks.close()
    for one in (data or {}).values():
        if isinstance(one, Streamed):
            one.rows.close()
    del data
    drop_task_modules()
    # Modules and their objects refer to each other, and may hold data.
    gc.collect()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(_scratch() / "data", ignore_errors=True)


def _set_environment(variables: Mapping[str, str]) -> None:
    """Set the task's environment variables, in place of those of the task before."""
    for name, before in _replaced.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    _replaced.clear()
    _replaced.update({name: os.environ.get(name) for name in variables})
    os.environ.update(variables)


def _load(channel: Channel, invocation: Invocation | ProfileCall, mark: str, *, keep: bool) -> _Loaded:
    if _needs_data(invocation) and "train" not in invocation.splits:
        raise GeofedError("SHARD_UNREADABLE", "the region holds no training split")
    bundle = channel.get(invocation.bundle_key)
    if bundle is None:
        raise GeofedError("TASK_INVALID", f"the task folder {invocation.bundle_key} is not in the channel")
    if hashlib.sha256(bundle).hexdigest() != invocation.bundle_key.rpartition("/")[2]:
        text = f"the task folder {invocation.bundle_key} in the channel is not the one that was submitted"
        raise GeofedError("DIGEST_MISMATCH", text)
    folder = unpack(bundle, _scratch() / "bundles", partial(pieces_of, channel))
    # Named by the mark, so that a repeated attempt finds files that were downloaded before.
    fetched = _scratch() / "data" / hashlib.sha256(mark.encode()).hexdigest()[:16]
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        undo.callback(drop_task_modules)
        task, data = loaded_from(folder, fetched, channel, invocation, keep=keep)
        undo.pop_all()
    return _Loaded(mark, task, len(data.get("train", ())), data if keep else None, fetched)


def loaded_from(
    folder: Path, fetched: Path, channel: Channel, invocation: Invocation | ProfileCall, *, keep: bool = True
) -> tuple[TaskModule, dict[str, Any]]:
    """Load the task of an unpacked folder, and its datasets by split.

    Args:
        fetched: folder for downloaded files; those that are there are not downloaded again.
        keep: the caller needs the datasets; otherwise only their lengths are.
    """
    # Random numbers drawn while the module is loaded must be the same in every replica.
    seed_all(invocation.seed)
    _set_environment(invocation.env)
    if invocation.packages and invocation.packages not in sys.path:
        # After all that the workers have; a function serves one job, so it stays there.
        sys.path.append(invocation.packages)
    task = (load_evaluated if invocation.evaluates_only else load_task)(
        folder, invocation.module, dict(invocation.config)
    )
    data: dict[str, Any] = {}
    # The training split first, whatever the order in the region's file.
    for split in sorted(invocation.splits, key=lambda name: (name != "train", name)):
        seed_all(invocation.seed, zlib.crc32(invocation.region.encode()), zlib.crc32(split.encode()))
        files = invocation.splits[split]
        if (stream := invocation.streams.get(split)) is not None:
            data[split] = task.streamed(_rows(channel, stream, files), split)
            if not keep:
                data[split] = range(len(data[split]))
            continue
        shards = [
            task.dataset(fetch_split(tuple(of_one), fetched / split / shard), split)
            for shard, of_one in itertools.groupby(files, lambda file: file.shard)
        ]
        data[split] = joined(shards)
        if not keep:
            data[split] = range(len(data[split]))
    return task, data


def _rows(channel: Channel, stream: Stream, files: tuple[ShardFile, ...]) -> Rows:
    stored = channel.get(stream.index_key)
    if stored is None:
        raise GeofedError("SHARD_UNREADABLE", f"the index of a split, {stream.index_key}, is not in the channel")
    if index_key(data := bytes(stored)) != stream.index_key:
        text = f"the index of a split, {stream.index_key}, is not the one that was stored"
        raise GeofedError("DIGEST_MISMATCH", text)
    return Rows(stream.format, files, BlockIndex.from_bytes(data))


def _check_samples(invocation: Invocation | ProfileCall, found: int) -> None:
    """Raise SAMPLES_MISMATCH if the dataset has another length than the region's file states.

    Epochs, weights of the merge and predictions are all computed from the declared number.
    """
    declared = invocation.declared_samples
    if declared is None or found in (0, declared):  # an empty split has an error of its own
        return
    text = f"the file of region {invocation.region} states {declared} training samples, the task's dataset has {found}"
    hint = (
        f"set samples: {found} in the file of region {invocation.region} and restart its agent; a task that makes "
        "other samples of the same files needs a dataset of another name there"
    )
    raise GeofedError("SAMPLES_MISMATCH", text, hint=hint)


@lru_cache(maxsize=1)
def _scratch() -> Path:
    return scratch_folder(Path(tempfile.gettempdir()))
