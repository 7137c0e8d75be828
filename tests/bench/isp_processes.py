"""Methods of the ISP benchmark as processes: a worker each, over a real Redis, and PyTorch DDP over gloo, in turn.

Every worker has a network namespace of its own, with a link to the one in which Redis runs; the links are as fast as
the kernel, or 1 Gbit/s in each direction (tbf). Bytes are those of the links' counters, headers and all; of files in
shared memory, those of the channel. All workers share the cores of the machine. It needs root, ip, tc and redis-server.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from isp_data import Flat, Task, batches
from isp_learning import Curve, Method

from geofed_pb.linux import CLONE_NEWNET, call
from sync.channel_clients import open_channel
from sync.layout import Vector
from sync.merging import ChangeCollective, MeanCollective, Member

__all__ = ["DDP", "Link", "possible", "run"]

DDP = "PyTorch DDP, gloo"
_CLONE_NEWUTS = 0x04000000
_BRIDGE, _STORE = "ispbench", "10.77.0.254"
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Link:
    """What each worker has."""

    name: str
    mbps: float | None
    channel: Literal["redis", "file"] = "redis"
    """Of ours; DDP goes over the link. Files lie in shared memory."""


@dataclass
class _Scene:
    """What a worker process is given."""

    task: Task
    method: Method | None
    """None: DDP."""
    workers: int
    seed: int
    lr: float
    significance: float
    steps: int
    every: int
    folder: Path
    channel: str
    port: int
    ready: Barrier
    begin: Barrier


def possible() -> str | None:
    """Why it cannot run here, or None."""
    if os.geteuid() != 0:
        return "it needs root for network namespaces"
    missing = [name for name in ("ip", "tc", "redis-server") if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


def run(
    task: Task, name: str, method: Method | None, workers: int, link: Link, seed: int, lr: float,
    significance: float, steps: int, every: int,
) -> Curve:  # fmt: skip
    """Train for some steps."""
    curve = Curve(task.kind.name, name, workers, seed, lr, significance)
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="isp-bench-", dir=_memory()) as scratch,
        _bridge(),
        _redis(Path(scratch)) as port,
    ):
        scene = _Scene(
            task, method, workers, seed, lr, significance, steps, every, Path(scratch), link.channel, port,
            context.Barrier(workers + 1), context.Barrier(workers + 1),
        )  # fmt: skip
        started = [context.Process(target=_worker, args=(scene, number)) for number in range(workers)]
        try:
            for process in started:
                process.start()
            scene.ready.wait(_PATIENCE_SECONDS)
            for number, process in enumerate(started):
                _connect(number, process.pid or 0, link)
            scene.begin.wait(_PATIENCE_SECONDS)  # they have links
            scene.begin.wait(_PATIENCE_SECONDS)  # they know each other
            before = _moved(workers)
            scene.begin.wait(_PATIENCE_SECONDS)
            scene.ready.wait(_PATIENCE_SECONDS * 3)
            written, read = (after - was for after, was in zip(_moved(workers), before, strict=True))
            for process in started:
                process.join(_PATIENCE_SECONDS)
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
            for number in range(workers):
                # A namespace goes some time after its last process, and the name is needed for the next run.
                subprocess.run(["ip", "link", "del", f"{_BRIDGE}{number}"], capture_output=True)
        shown = [np.load(Path(scratch) / f"{number}.npz") for number in range(workers)]
        if method is not None and link.channel == "file":
            written, read = (int(one) for one in np.sum([one["usage"] for one in shown], axis=0))
        times = np.max([one["seconds"] for one in shown], axis=0)
        flat = Flat(task.model(seed))
        for index, step in enumerate(range(0, steps + 1, every)):
            flat.vector[:] = np.mean([one["models"][min(index, len(one["models"]) - 1)] for one in shown], axis=0)
            curve.steps.append(step)
            curve.quality.append(task.quality(flat.model))
            curve.seconds.append(float(times[index]))
            curve.written.append(written * step / steps)
            curve.read.append(read * step / steps)
        curve.wall_seconds = float(times[-1])
    return curve


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# A worker


def _worker(scene: _Scene, number: int) -> None:
    try:
        torch.set_num_threads(1)
        call("unshare", CLONE_NEWNET | _CLONE_NEWUTS)
        # Gloo looks the machine's name up, which not every machine can do.
        socket.sethostname("localhost")
        scene.ready.wait(_PATIENCE_SECONDS)
        scene.begin.wait(_PATIENCE_SECONDS)
        torch.manual_seed(scene.seed)
        ahead = list(itertools.islice(batches(scene.task, number, scene.workers, scene.seed), scene.steps))
        models: list[Vector] = []
        flat, step_once, close = (_ddp if scene.method is None else _role)(scene, number)
        scene.begin.wait(_PATIENCE_SECONDS)
        scene.begin.wait(_PATIENCE_SECONDS)
        models, seconds, begun = [flat().copy()], [0.0], time.perf_counter()
        for step, batch in enumerate(ahead, 1):
            step_once(step, batch)
            if step % scene.every == 0:
                seconds.append(time.perf_counter() - begun)
                models.append(flat().copy())
        scene.ready.wait(_PATIENCE_SECONDS * 3)
        usage = np.array(close())
        np.savez(scene.folder / f"{number}.npz", models=np.array(models), seconds=np.array(seconds), usage=usage)
    except BaseException:  # at a process's edge
        traceback.print_exc()
        scene.ready.abort()
        scene.begin.abort()
        os._exit(1)
    os._exit(0)


Run = tuple[Callable[[], Vector], Callable[[int, Any], None], Callable[[], tuple[int, int]]]


def _role(scene: _Scene, number: int) -> Run:
    assert scene.method is not None
    task, flat = scene.task, Flat(scene.task.model(scene.seed))
    optimizer = task.optimizer(flat.model, scene.lr)
    address = f"redis://{_STORE}:{scene.port}/0?prefix=bench"
    channel = open_channel(scene.channel, address if scene.channel == "redis" else str(scene.folder / "channel"))
    settings = scene.method.at(scene.workers, scene.significance)
    kind = ChangeCollective if settings.pattern == "isp" else MeanCollective
    collective: Any = kind(settings, Member(number, scene.workers, 1), channel, "c", flat.vector.size)
    before, ones = np.empty_like(flat.vector), np.ones_like(flat.vector)

    def sharing(step: int, batch: Any) -> None:
        before[:] = flat.vector
        flat.gradient.zero_()
        task.module.loss(flat.model, batch).backward()
        optimizer.step()
        np.subtract(flat.vector, before, out=before)
        for each in collective.merge(step, before, 1.0, flat.vector):
            np.add(flat.vector, each.vector, out=flat.vector)

    def synchronous(step: int, batch: Any) -> None:
        flat.gradient.zero_()
        task.module.loss(flat.model, batch).backward()
        gradient = flat.gradient.numpy()
        if isinstance(collective, ChangeCollective):
            (others,) = collective.merge(step, gradient, 1.0, ones)
            gradient += others.vector
            gradient /= scene.workers
        else:
            (mean,) = collective.merge(step, gradient, 1.0)
            gradient[:] = mean.vector
        optimizer.step()

    def close() -> tuple[int, int]:
        collective.close()
        channel.close()
        return channel.usage.bytes_in, channel.usage.bytes_out

    of_gradients = scene.method.synchronous or scene.method.means
    return lambda: flat.vector, synchronous if of_gradients else sharing, close


def _ddp(scene: _Scene, number: int) -> Run:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://10.77.0.1:{scene.port + 1}", rank=number, world_size=scene.workers
    )
    task, model = scene.task, scene.task.model(scene.seed)
    wrapped = DistributedDataParallel(_Loss(task, model), gradient_as_bucket_view=True)
    optimizer = task.optimizer(model, scene.lr)

    def step_once(step: int, batch: Any) -> None:
        optimizer.zero_grad()
        wrapped(batch).backward()
        optimizer.step()

    def vector() -> Vector:
        return np.asarray(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy())

    def close() -> tuple[int, int]:
        dist.destroy_process_group()
        return 0, 0

    return vector, step_once, close


class _Loss(torch.nn.Module):
    """The task's loss as a forward pass, which is what DDP wraps."""

    def __init__(self, task: Task, model: torch.nn.Module) -> None:
        super().__init__()
        self.task, self.inner = task, model

    def forward(self, batch: Any) -> Any:
        return self.task.module.loss(self.inner, batch)


# Links and the store


def _ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def _bridge() -> Iterator[None]:
    subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True)
    _ip("ip", "link", "add", _BRIDGE, "type", "bridge")
    try:
        _ip("ip", "addr", "add", f"{_STORE}/24", "dev", _BRIDGE)
        _ip("ip", "link", "set", _BRIDGE, "up")
        yield
    finally:
        subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True)


def _connect(number: int, pid: int, link: Link) -> None:
    """A link from the bridge to the namespace of a process."""
    here, inside = f"{_BRIDGE}{number}", ["nsenter", "-t", str(pid), "-n"]
    _ip("ip", "link", "add", here, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _ip("ip", "link", "set", here, "master", _BRIDGE, "up")
    _ip(*inside, "ip", "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
    _ip(*inside, "ip", "link", "set", "lo", "up")
    _ip(*inside, "ip", "link", "set", "eth0", "up")
    if link.mbps is not None:
        shape = ["root", "tbf", "rate", f"{link.mbps:g}mbit", "burst", "256kb", "latency", "200ms"]
        _ip("tc", "qdisc", "add", "dev", here, *shape)
        _ip(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)


def _moved(workers: int) -> tuple[int, int]:
    """Bytes that workers have sent and got."""

    def total(counter: str) -> int:
        return sum(
            int(Path(f"/sys/class/net/{_BRIDGE}{number}/statistics/{counter}").read_text()) for number in range(workers)
        )

    return total("rx_bytes"), total("tx_bytes")


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind((_STORE, 0))
        port = int(probe.getsockname()[1])
    argv = ["redis-server", "--port", str(port), "--bind", _STORE, "--save", "", "--appendonly", "no"]
    argv += ["--dir", str(folder), "--protected-mode", "no"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(OSError), socket.create_connection((_STORE, port), 1):
                break
            if time.monotonic() > deadline:
                raise RuntimeError("redis-server does not answer")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()
