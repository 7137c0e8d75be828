"""Processes that make batches for a worker: forked from it, so that they have the task's datasets as they are.

As with ``num_workers`` of a ``DataLoader``, Python code of a dataset computes on further cores. Requests and answers go
through a socket for each process, as pickles of this worker's own memory: both ends are one job's code in one sandbox.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from geofed_pb.linux import die_with_parent
from geofed_pb.user_code.recording import Recorder, Sums, log_sums, recording

__all__ = ["Loaders"]

_MEASURED_EVERY = 64
"""Answers between two measurements of a process's memory, which takes milliseconds; the first ones are measured more
often."""
_END_SECONDS = 5.0
"""How long the end of a process is waited for whose connection is closed, or that was killed."""
_KILLED_HINT = "give the function more memory (`function.memoryMb`), or state fewer `num_workers`"


class Loaders:
    """Processes that compute a function ahead, in turn. Must be used from one thread, which the processes end with."""

    def __init__(self, make: Callable[[Any], Any], number: int) -> None:
        """Fork ``number`` processes. ``make``: called in them with a request; its result must be one for pickle.

        Raises ``GeofedError("FUNCTION_FAILED")`` if the system starts no more processes.
        """
        self._each: list[_Loader] = []
        try:
            for _ in range(number):
                self._each.append(_Loader(make, self._each))
        except OSError as error:
            self.close()
            text = f"{number} processes that make samples cannot be started: {error.strerror}"
            raise GeofedError("FUNCTION_FAILED", text, hint="state fewer `num_workers`") from None
        self._ahead: list[tuple[Any, Future[Any]]] = []
        self._given = 0

    def take(self, requests: Sequence[Any], told: Callable[[Any], Any] = lambda request: request) -> Any:
        """Return the result for the first of some requests, and have the others made, which are taken next.

        ``told``: returns what ``make`` is called with for a request.
        Raises what ``make`` has raised for it, and ``GeofedError``: FUNCTION_OUT_OF_MEMORY if its process was killed;
        TASK_FAILED if it ended; TASK_INVALID for a result that pickle cannot hold. These are `broken` after the first
        two.
        """
        known = [request for request, _ in self._ahead]
        if known != list(requests[: len(known)]):
            # What is being made for others is thrown away when it comes.
            for _, future in self._ahead:
                future.cancel()
            self._ahead, known = [], []
        for request in requests[len(known) :]:
            loader = self._each[self._given % len(self._each)]
            self._ahead.append((request, loader.made(told(request))))
            self._given += 1
        _, future = self._ahead.pop(0)
        result, sums = future.result()
        log_sums(sums)
        return result

    @property
    def broken(self) -> bool:
        """Whether a process has ended, so that others must be forked."""
        return any(one.failure is not None for one in self._each)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the processes, as of their last answers."""
        return sum(one.cpu_seconds for one in self._each)

    @property
    def memory_bytes(self) -> int:
        """Most memory that they have had and do not share with the worker, as far as it was measured."""
        return sum(one.memory_bytes for one in self._each)

    def close(self) -> None:
        """End the processes."""
        for one in self._each:
            one.close()


class _Loader:
    """One process, and the thread that speaks with it."""

    def __init__(self, make: Callable[[Any], Any], others: Iterable[_Loader]) -> None:
        self.failure: GeofedError | None = None
        """Why the process answers no more."""
        self._reaped = False
        self._connection, theirs = Pipe()
        # What is buffered would be written twice.
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._pid = os.fork()
        except OSError:
            self._connection.close()
            theirs.close()
            raise
        if self._pid == 0:
            try:
                for one in (self._connection, *(other._connection for other in others)):
                    one.close()
                _serve(theirs, make)
            finally:
                # Neither the threads nor the clean-up of the worker exist here.
                os._exit(1)
        theirs.close()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self.cpu_seconds = 0.0
        self.memory_bytes = 0

    def made(self, request: Any) -> Future[Any]:
        """Have a request answered after those before it."""
        return self._pool.submit(self._answer, request)

    def _answer(self, request: Any) -> tuple[Any, Sums]:
        if self.failure is not None:
            raise self.failure
        try:
            _write(self._connection, _packed(request))
            parts = _read(self._connection)
        except (OSError, EOFError):
            self.failure = self._ended()
            raise self.failure from None
        except MemoryError:
            # The rest of the answer stays in the socket.
            self.failure = GeofedError("FUNCTION_OUT_OF_MEMORY", "a batch does not fit into memory", hint=_KILLED_HINT)
            raise self.failure from None
        try:
            kind, value, sums, self.cpu_seconds, memory_bytes = _unpacked(parts)
        except Exception as error:
            text = f"with num_workers a batch must be one for pickle: {type(error).__name__}: {error}"
            raise GeofedError("TASK_INVALID", text) from error
        self.memory_bytes = max(self.memory_bytes, memory_bytes)
        if kind == "fault":
            code, message, hint = value
            raise GeofedError(code, message, hint=hint)
        return value, sums

    def _ended(self) -> GeofedError:
        status = self._reap(_END_SECONDS)
        if status is None:
            return GeofedError("TASK_FAILED", "a process that makes samples answers no more")
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            text = "a process that makes samples was killed, as the system does for lack of memory"
            return GeofedError("FUNCTION_OUT_OF_MEMORY", text, hint=_KILLED_HINT)
        return GeofedError("TASK_FAILED", f"a process that makes samples ended ({_how(status)})")

    def _reap(self, seconds: float) -> int | None:
        """Return the process's status, or None where it has not ended in time."""
        deadline = time.monotonic() + seconds
        while not self._reaped:
            try:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
            except ChildProcessError:
                self._reaped = True
                break
            if pid:
                self._reaped = True
                return status
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return None

    def close(self) -> None:
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)
        self._reap(_END_SECONDS)
        self._connection.close()


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _serve(connection: Connection, make: Callable[[Any], Any]) -> None:
    """Answer requests until the worker ends."""
    # In a sandbox the worker is outside of this process's PID namespace, so that it has no number here. Where the
    # system cannot do so, the end of the connection ends this process after its present samples.
    with contextlib.suppress(OSError):
        die_with_parent(os.getppid())
    # Platforms send these to all processes of a container, whose calls then finish; the worker ends this process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Threads of OpenMP do not exist in a forked process.
    torch.set_num_threads(1)
    # Otherwise the collector would write to all of the worker's objects, and copy their pages.
    gc.freeze()
    answered, memory_bytes = 0, 0
    while True:
        try:
            request = _unpacked(_read(connection))
        except (EOFError, OSError):
            return
        answer = _answer_to(request, make)
        answered += 1
        if answered & (answered - 1) == 0 or answered % _MEASURED_EVERY == 0:
            memory_bytes = _own_memory_bytes()
        try:
            parts = _packed((*answer, time.process_time(), memory_bytes))
        except MemoryError:
            parts = _packed((*_OUT_OF_MEMORY, time.process_time(), memory_bytes))
        except Exception as error:  # noqa: BLE001 - whatever the task's objects raise
            text = f"with num_workers a batch must be one for pickle: {type(error).__name__}: {error}"
            parts = _packed(("fault", ("TASK_INVALID", text, None), {}, time.process_time(), memory_bytes))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            _write(connection, parts)
        except OSError:
            return


_OUT_OF_MEMORY: tuple[str, Any, Sums] = (
    "fault", ("FUNCTION_OUT_OF_MEMORY", "a process that makes samples ran out of memory", _KILLED_HINT), {},
)  # fmt: skip


def _answer_to(request: Any, make: Callable[[Any], Any]) -> tuple[str, Any, Sums]:
    recorder = Recorder()
    recorder.round = 1
    try:
        with recording(recorder):
            made = make(request)
    except GeofedError as error:
        return "fault", (error.code, error.message, error.hint), {}
    except MemoryError:
        return _OUT_OF_MEMORY
    return "made", made, recorder.up_to(1).get(1, {})


def _own_memory_bytes() -> int:
    """Return the memory that this process shares with no other; 0: the kernel does not tell."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            lines = [line.split() for line in file if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    except OSError:
        return 0
    return sum(int(words[1]) for words in lines) * 1024


class _Pickler(pickle.Pickler):
    """Leaves the contents of tensors and arrays out of the pickle, so that they are copied once."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not plain or value.requires_grad or value.is_quantized:
            return NotImplemented
        if not value.is_contiguous():
            if value.untyped_storage().nbytes() <= value.nbytes:
                return NotImplemented
            # Otherwise all that it is a view of would be sent.
            value = value.contiguous()
        if not value.numel() or value.is_conj() or value.is_neg():
            return NotImplemented
        content = value.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), value.dtype, tuple(value.shape))


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(content)).view(dtype).reshape(shape)


def _packed(value: Any) -> list[memoryview]:
    """Return a value's pickle, and the contents of its arrays."""
    body, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(value)
    return [body.getbuffer(), *(buffer.raw() for buffer in buffers)]


def _write(connection: Connection, parts: Sequence[memoryview]) -> None:
    """Send the lengths of the parts, and these."""
    connection.send_bytes(struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts)))
    for part in parts:
        connection.send_bytes(part)


def _read(connection: Connection) -> list[Any]:
    head = connection.recv_bytes()
    parts = [np.empty(length, np.uint8) for length in struct.unpack(f"<{len(head) // 8}Q", head)]
    for part in parts:
        connection.recv_bytes_into(part)
    return parts


def _unpacked(parts: Sequence[Any]) -> Any:
    return pickle.loads(parts[0].data, buffers=parts[1:])
