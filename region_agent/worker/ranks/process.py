"""The process of a rank above 0: it computes gradients, and holds model and data, but no state of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from geofed_pb.errors import GeofedError
from geofed_pb.linux import die_with_parent
from geofed_pb.user_code.recording import Recorder, recording
from region_agent.worker import handler
from region_agent.worker.compiling import compile_calls
from region_agent.worker.data.loading import Loading
from region_agent.worker.invocation import Invocation, read_invocation
from region_agent.worker.ranks.empty_model import shell_of
from region_agent.worker.ranks.group import join, mesh_on
from region_agent.worker.ranks.messages import (
    Begin,
    Evaluate,
    Fault,
    Gather,
    Load,
    Made,
    RankStep,
    Ready,
    Request,
    Restore,
    Scatter,
    Update,
)
from region_agent.worker.ranks.passes import Passes, RankPasses, described
from region_agent.worker.ranks.steps import part_of
from region_agent.worker.task import TaskModule
from region_agent.worker.training.loss_scale import LossScale
from region_agent.worker.training.usage import peak_bytes
from sync.channel_clients import open_channel
from sync.device import finish
from sync.seeding import seed_all

if TYPE_CHECKING:
    from region_agent.worker.ranks.part import RankPart

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve rank 0 until it closes the connection."""
    # Where the system cannot do so, the end of the connection ends this process.
    with contextlib.suppress(OSError):
        die_with_parent(os.getppid())
    # Platforms send these to all processes of a container, whose calls then finish; rank 0 ends this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection, rank = Connection(descriptor), _Rank()
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            fault = _served(rank, request, connection)
            if fault is not None:
                # Told before this process ends, so that rank 0 knows why an exchange with it has failed.
                connection.send(fault)
                break
    sys.stderr.flush()
    # The process group's threads would be waited for.
    os._exit(0)


def _served(rank: _Rank, request: Request, connection: Connection) -> Fault | None:
    """Answer a request, and return None; or return why that has failed."""
    try:
        if isinstance(request, Load):
            rank.load(request)
            connection.send(Ready())
            join(request.rank, request.ranks, rank.device, request.meeting)
        elif isinstance(request, Begin):
            rank.create(request)
            connection.send(Ready())
            rank.begin(request)
        elif isinstance(request, RankStep):
            connection.send(rank.step(request))
        elif isinstance(request, Gather | Scatter):
            rank.part.exchange(request)
        else:
            rank.follow(request)
            connection.send(Ready())
    except GeofedError as error:
        return Fault(error.code, error.message, error.hint)
    except torch.OutOfMemoryError:
        return Fault("GPU_MEMORY", "the GPU of a rank ran out of memory", None)
    except MemoryError:
        return Fault("FUNCTION_OUT_OF_MEMORY", "a rank of the worker ran out of memory", None)
    except Exception as error:  # noqa: BLE001 - every failure must be answered with its code
        fault = handler.fault_of(error, rank.folder.parent)
        return Fault(fault.code, fault.message, fault.hint)
    return None


class _Rank:
    """What the process holds."""

    device: torch.device
    _mesh: Any = None
    folder = Path("/")
    """The task folder."""
    _task: TaskModule
    _data: dict[str, Any]
    _loading: Loading
    _module: torch.nn.Module
    _scale: LossScale | None
    _passes: Passes
    part: RankPart
    """With `function.sharding: fsdp`: what this rank holds of the model and of the optimiser's state."""

    def load(self, request: Load) -> None:
        """Load the task and the data."""
        call, self.folder = read_invocation(request.body.encode()), request.folder
        handler.prepare_process(request.ranks)
        self._rank, self.device = request.rank, torch.device(request.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        channel = open_channel(call.channel, call.channel_address)
        self._task, self._data = handler.loaded_from(request.folder, request.fetched, channel, call)

    def create(self, request: Begin) -> None:
        """Create the model of an invocation."""
        call = read_invocation(request.body.encode())
        handler.renew(self._data, call)
        self._task = task = replace(self._task, precision=call.precision)
        if hasattr(self, "_loading"):
            self._loading.close()
            self.__dict__.pop("part", None)
            del self._passes, self._module
        self._loading = Loading(task, self._data)
        seed_all(call.seed)
        self._call, self._module = call, self._created(call, request)
        if described(self._module) != request.model:
            text = "model(config) makes another model in each process"
            raise GeofedError("TASK_INVALID", text, hint="make it from the configuration and torch's seed alone")
        with task.calling("model"):
            if call.sharding == "none":
                self._module.to(self.device)
            if call.compile:
                compile_calls(self._module)
        self._scale = LossScale(self._module) if call.precision == "fp16" else None

    def _created(self, call: Invocation, request: Begin) -> torch.nn.Module:
        if call.sharding != "none" and (shell := shell_of(self._task, call.seed, request.model)) is not None:
            return shell
        seed_all(call.seed)
        return self._task.model(call.seed)

    def begin(self, request: Begin) -> None:
        """Receive rank 0's model, or a part of it."""
        if self._call.sharding == "none":
            self._passes = RankPasses(self._task, self._module, self._scale, request.base)
        else:
            # Imported here: ranks that hold the whole model start without it.
            from region_agent.worker.ranks.part import RankPart

            self._mesh = mesh_on(self.device) if self._mesh is None else self._mesh
            self.part = RankPart(self._call, self._task, self._module, self.device, self._mesh, request.base)
            self._passes = self.part.passes

    def follow(self, request: Update | Restore | Evaluate) -> None:
        """Do this rank's part of what rank 0 does."""
        if isinstance(request, Update):
            self.part.update(request)
        elif isinstance(request, Restore):
            self.part.restore(request)
        else:
            self.part.evaluate(request, self._data["test"], self._loading)
        finish(self.device)

    def step(self, step: RankStep) -> Made:
        """Compute this rank's part of a step."""
        recorder = Recorder()
        recorder.round = 1
        with recording(recorder):
            if self._scale is not None:
                self._scale.restore(step.scale)
            parts, samples = part_of(step, self._rank, self._loading, self._passes, self.device)
            with self._task.calling("the model's train()"):
                self._module.train()
                self._module.zero_grad(set_to_none=True)
            self._passes.share()
            value = self._passes.run(parts, samples, lambda _: None)
            finish(self.device)
        return Made(
            value,
            # A batch that is another rank's, for want of an own one, is logged by that one.
            recorder.up_to(1).get(1, {}) if any(size for size, _ in parts) else {},
            time.process_time() + self._loading.cpu_seconds,
            peak_bytes() + self._loading.memory_bytes,
        )
