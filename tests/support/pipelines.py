"""All workers of a pipeline as threads of this process, each with a channel of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sync.channel import Channel
from sync.collective import Settings
from sync.flat import FlatModel
from sync.merging import Member
from sync.pipeline import GroupMerge, Layers, Pipeline, StageRunner, StepDone

__all__ = ["Worker", "WorkerGroup", "cut", "in_threads", "mse", "shares"]


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def shares(total: int, degree: int) -> list[int]:
    """Samples of each replica, as `BatchStream` partitions them."""
    return [(replica + 1) * total // degree - replica * total // degree for replica in range(degree)]


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """A batch's micro-batches."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [tuple(part[end - size : end] for part in batch) for end, size in zip(ends, sizes, strict=True)]


@dataclass
class Worker:
    """One of them."""

    runner: StageRunner
    flat: FlatModel
    layers: nn.Sequential
    merge: GroupMerge
    channel: Channel
    device: torch.device
    done: list[StepDone] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        shape: Pipeline,
        number: int,
        layers: Layers,
        channel: Channel,
        loss: Callable[[nn.Module, Any], Any] = mse,
        *,
        settings: Settings = Settings(pattern="pipelined-scatter-reduce", timeout_seconds=30),  # noqa: B008
        codec: str = "fp32",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        overlap: bool = True,
        timeout_seconds: float = 30.0,
        logs: bool = False,
    ) -> Worker:
        position, where = shape.position(number), torch.device(device)
        module = layers.stage(*shape.stages[position.stage]).to(where, dtype)
        flat = FlatModel(module, part=True)
        member = Member(position.replica, shape.degree, 1)
        merge = GroupMerge(flat, settings, member, channel, f"p/1/c{position.stage}", overlap=overlap)
        runner = StageRunner(
            shape, number, module, loss, channel, "p/1", merge, device=where, codec=codec,
            timeout_seconds=timeout_seconds, logs=logs,
        )  # fmt: skip
        return cls(runner, flat, module, merge, channel, where)

    def step(self, step: int, batch: Any, *, then: bool = False) -> StepDone:
        """This worker's part of a step of the whole batch."""
        parts, replica = shares(len(batch[0]), self.runner.shape.degree), self.runner.position.replica
        start = sum(parts[:replica])
        own = tuple(part[start : start + parts[replica]].to(self.device) for part in batch)
        micro = cut(own, self.runner.shape.sizes(parts[replica])) if self.runner.reads_data else []
        self.done.append(self.runner.step(step, parts[replica], micro, then=parts[replica] if then else None))
        return self.done[-1]

    def close(self) -> None:
        self.runner.close()
        self.merge.close()
        self.channel.close()


class WorkerGroup:
    """A pipeline's workers. Use as a context manager."""

    def __init__(
        self,
        shape: Pipeline,
        layers: Layers,
        open_channel: Callable[[], Channel],
        loss: Callable[[nn.Module, Any], Any] = mse,
        **settings: Any,
    ) -> None:
        """``settings``: as `Worker.of` takes them."""
        self.shape = shape
        self.workers = [
            Worker.of(shape, number, layers, open_channel(), loss, **settings) for number in range(shape.workers)
        ]

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def step(self, step: int, batch: Any, *, then: bool = False) -> float:
        """All workers make one step of the whole batch; the mean loss over its samples."""
        parts = shares(len(batch[0]), self.shape.degree)
        in_threads([lambda worker=worker: worker.step(step, batch, then=then) for worker in self.workers])
        losses = [worker.done[-1].loss for worker in self.workers]
        total = zip(losses[-self.shape.degree :], parts, strict=True)
        return sum(loss * part for loss, part in total) / sum(parts)  # type: ignore[operator]

    def gradients(self, replica: int = 0) -> dict[str, torch.Tensor]:
        """Of the whole model, as one replica of each stage holds them."""
        found: dict[str, torch.Tensor] = {}
        for worker in self.workers:
            if worker.runner.position.replica == replica:
                for name, parameter in worker.layers.named_parameters():
                    found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return found


def in_threads(works: Sequence[Callable[[], object]]) -> list[Any]:
    """Do things beside each other; what each returns. Raises the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
