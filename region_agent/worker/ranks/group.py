"""The other ranks of a worker, as its own process, which is rank 0, sees them: processes that it starts and ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.recording import log_sums
from region_agent.worker.invocation import CALL_GRACE, Invocation
from region_agent.worker.ranks.messages import Begin, Fault, Load, Made, RankStep, Ready, Request

__all__ = ["COLLECTIVE_SECONDS", "Ranks", "join", "mesh_on"]

COLLECTIVE_SECONDS = 120.0
"""Longest wait of a rank for another one in a step; it is then considered lost. As between workers."""
_CAUSE_SECONDS = 1.0
"""How long a rank's own error is waited for after an exchange with it has failed."""
_END_SECONDS = 5.0
"""How long the end of a process that was killed is waited for."""
_STORE_SECONDS = 20.0
"""Time that an invocation needs at its end."""
_KILLED_HINT = "give the function more memory (`function.memoryMb`): it holds a process for each of `function.gpus`"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from region_agent.worker.ranks.process import main; main(int(sys.argv[1]))"
)
"""Program of a rank. It has the worker's own folders of modules, none by the working directory or the environment."""


def join(rank: int, ranks: int, device: torch.device, meeting: Path) -> None:
    """Join the default process group of a worker's ranks: NCCL between GPUs, gloo between CPUs.

    It connects through the loopback device, which every sandbox has, and which no other machine reaches.
    """
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store: Any = dist.FileStore(str(meeting), ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store, rank=rank, world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )  # fmt: skip


def mesh_on(device: torch.device) -> Any:
    """Return the ranks as a mesh of devices, over which tensors are divided."""
    # Imported here: workers that hold the whole model start without it.
    from torch.distributed.device_mesh import DeviceMesh

    group: Any = dist.group.WORLD
    return DeviceMesh.from_group(group, device.type)


class Ranks:
    """Processes of the ranks above 0. Must be used by one thread at a time, and closed.

    After an error in `begin` or `step` it is closed.
    """

    def __init__(self, devices: Sequence[torch.device], scratch: Path) -> None:
        """Start the processes, which takes some seconds: it is waited for in `load`. ``scratch``: folder for files.

        Raises ``GeofedError``: TASK_INVALID if the task has a process group of its own; FUNCTION_FAILED if the system
        starts no more processes.
        """
        if dist.is_initialized():
            text = "`function.gpus` cannot be used with a task that initialises torch.distributed"
            raise GeofedError("TASK_INVALID", text)
        self.devices, self._owner = tuple(devices), os.getpid()
        scratch.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=scratch))
        self._each: list[_Rank] = []
        self._joined, self.closed = False, False
        self._mesh: Any = None
        self.cpu_seconds = 0.0
        """CPU time of the processes, as of their last answers; of those that have ended, too."""
        self.memory_bytes = 0
        """Sum of the peaks of their memory."""
        try:
            for _ in devices[1:]:
                self._each.append(_Rank())
        except OSError as error:
            self.close()
            text = f"a process for each of {len(devices)} devices cannot be started: {error.strerror}"
            raise GeofedError("FUNCTION_FAILED", text) from None

    def load(self, call: Invocation, folder: Path, fetched: Path, begun: float) -> None:
        """Have them load the task and the data, and join them. ``begun``: begin of the invocation, in seconds of the
        monotonic clock."""
        until = begun + call.slice_seconds + CALL_GRACE.total_seconds() - _STORE_SECONDS
        with self._closed_on_error():
            for number, rank in enumerate(self._each, 1):
                body, device = call.model_dump_json(), str(self.devices[number])
                place = number, len(self.devices)
                rank.tell(Load(body, folder, fetched, device, *place, self._folder / "meeting"))
            for rank in self._each:
                rank.answer(Ready, until)
            join(0, len(self.devices), self.devices[0], self._folder / "meeting")
            self._joined = True

    @contextmanager
    def beginning(self, begin: Begin) -> Iterator[None]:
        """Have them create the model of an invocation; in the context, rank 0 makes its side of it."""
        until = time.monotonic() + COLLECTIVE_SECONDS
        with self._closed_on_error():
            for rank in self._each:
                rank.tell(begin)
            for rank in self._each:
                rank.answer(Ready, until)
            yield

    @contextmanager
    def ordering(self, request: Request, *, answered: bool = True) -> Iterator[None]:
        """Have them do their part of what rank 0 does in the context. ``answered``: they say when it is done."""
        with self._closed_on_error():
            for rank in self._each:
                rank.tell(request)
            yield
            until = time.monotonic() + COLLECTIVE_SECONDS
            for rank in self._each if answered else ():
                rank.answer(Ready, until)

    @contextmanager
    def computing(self, steps: Sequence[RankStep]) -> Iterator[list[Made]]:
        """Have each compute its part of a step; in the context, rank 0 computes its own. What they have made is in the
        list afterwards.

        Raises ``GeofedError``: what a rank has raised; FUNCTION_OUT_OF_MEMORY if it was killed; TASK_FAILED if it has
        ended otherwise, or does not answer.
        """
        made: list[Made] = []
        with self._closed_on_error():
            for rank, step in zip(self._each, steps, strict=True):
                rank.tell(step)
            yield made
            until = time.monotonic() + COLLECTIVE_SECONDS
            made += [rank.answer(Made, until) for rank in self._each]
        for one in made:
            log_sums(one.sums)
        self.cpu_seconds = sum(one.cpu_seconds for one in made)
        self.memory_bytes = max(self.memory_bytes, sum(one.memory_bytes for one in made))

    @property
    def mesh(self) -> Any:
        """The ranks as a mesh of devices."""
        if self._mesh is None:
            self._mesh = mesh_on(self.devices[0])
        return self._mesh

    @property
    def alive(self) -> bool:
        """Whether all of them run. They end with the thread that has started them, as that of a call may be."""
        return not self.closed and all(rank.alive for rank in self._each)

    def close(self) -> None:
        """End the processes, and leave the group."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        for rank in self._each:
            rank.close()
        # An error that one of them has keeps the frames of the calls that it has ended.
        self._each.clear()
        if self._mesh is not None:
            # torch keeps meshes in caches, and with them the group and its sockets.
            self._mesh._pg_registry.clear()
        if self._joined:
            # NCCL would wait for the others to leave the group, too.
            with contextlib.suppress(Exception):
                if self.devices[0].type == "cuda":
                    dist.distributed_c10d._abort_process_group()
                else:
                    dist.destroy_process_group()
            # Modules and their hooks refer to each other, and to the group with its sockets.
            gc.collect()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Close the ranks after an error, since they are at different places of the step then.

        The error of another rank is raised in place of the failed exchange that it has led to.
        """
        try:
            yield
        except BaseException as error:
            cause = self._cause(error) if isinstance(error, Exception) else None
            self.close()
            if cause is not None:
                raise cause from None
            raise

    def _cause(self, error: Exception) -> GeofedError | None:
        """Return the error of a rank that has failed; None: the error is this process's own."""
        own = isinstance(error, MemoryError) or (isinstance(error, GeofedError) and error.code != "TASK_FAILED")
        until = time.monotonic() + (0.0 if own else _CAUSE_SECONDS)
        while True:
            faults = [fault for rank in self._each if (fault := rank.fault()) is not None]
            if faults:
                return faults[0]
            if time.monotonic() > until:
                return None
            time.sleep(0.01)


def _execute(link: int, paths: list[str]) -> subprocess.Popen[bytes]:
    """Start a rank, which takes a descriptor of this process and the folders of its modules."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, str(link), json.dumps(paths)], pass_fds=[link], stdin=subprocess.DEVNULL
    )


class _Rank:
    """One process."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        try:
            self._process = _execute(theirs.fileno(), [path for path in sys.path if path])
        except OSError:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._fault: GeofedError | None = None

    def tell(self, request: Request) -> None:
        try:
            self._connection.send(request)
        except OSError:
            raise self._lost() from None

    def answer(self, kind: type[Any], until: float) -> Any:
        """Return its next answer. Raises what it has failed with."""
        found = self._received(until)
        if found is None:
            raise GeofedError("TASK_FAILED", "a rank of the worker has not answered in time")
        if not isinstance(found, kind):
            raise GeofedError("INTERNAL", f"a rank of the worker answered {type(found).__name__}")
        return found

    def fault(self) -> GeofedError | None:
        """Return what it has failed with; None: nothing, so far."""
        try:
            while self._fault is None and self._received(0.0) is not None:
                # Answers to what is given up.
                pass
        except GeofedError as error:
            return error
        return self._fault

    def _received(self, until: float) -> Any:
        """Return its next message; None: there is none until then. Raises what it has failed with."""
        if self._fault is not None:
            raise self._fault
        try:
            if not self._connection.poll(max(0.0, until - time.monotonic())):
                return None
            found = self._connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(found, Fault):
            self._fault = GeofedError(found.code, found.message, hint=found.hint)
            raise self._fault
        return found

    def _lost(self) -> GeofedError:
        """Return the error of a rank whose connection is closed: what it has told before, or how it has ended."""
        if self._fault is None:
            with contextlib.suppress(EOFError, OSError):
                while self._fault is None and self._connection.poll(0.0):
                    if isinstance(found := self._connection.recv(), Fault):
                        self._fault = GeofedError(found.code, found.message, hint=found.hint)
        if self._fault is None:
            self._fault = self._ended()
        return self._fault

    def _ended(self) -> GeofedError:
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return GeofedError("TASK_FAILED", "a rank of the worker answers no more")
        if status == -signal.SIGKILL:
            text = "a rank of the worker was killed, as the system does for lack of memory"
            return GeofedError("FUNCTION_OUT_OF_MEMORY", text, hint=_KILLED_HINT)
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return GeofedError("TASK_FAILED", f"a rank of the worker ended ({how})")

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._connection.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None
