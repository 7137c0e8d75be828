"""How a model is cut into stages, and which worker has which place."""

from __future__ import annotations

from dataclasses import dataclass

from geofed_pb.errors import GeofedError

__all__ = ["Pipeline", "Position"]


@dataclass(frozen=True)
class Position:
    """A worker's place."""

    stage: int
    """From 0."""
    replica: int
    """Among the workers of its stage, from 0."""


@dataclass(frozen=True)
class Pipeline:
    """Stages of consecutive layers, each run by as many workers; the same for all of them.

    Raises ``GeofedError("CONFIG_INVALID")`` for stages that leave out or repeat a layer.
    """

    stages: tuple[tuple[int, int], ...]
    """First and last layer of each, counted from 0, both included."""
    degree: int = 1
    """Replicas of each stage; they share out the samples of a step, and merge their gradients."""
    micro_batch: int = 1
    """Samples; the last one of a step may have fewer."""
    order: str = "1f1b"
    """Or "gpipe"."""
    rematerialise: tuple[bool, ...] = ()
    """By stage: whether it keeps only its inputs, and makes its activations again before each backward. Empty: none."""

    def __post_init__(self) -> None:
        follows = 0
        for first, last in self.stages:
            if first != follows or last < first:
                raise GeofedError("CONFIG_INVALID", f"stage {first}-{last} does not begin with layer {follows}")
            follows = last + 1
        if not self.stages or self.degree < 1 or self.micro_batch < 1 or self.order not in ("gpipe", "1f1b"):
            raise GeofedError("CONFIG_INVALID", f"not a pipeline: {self}")
        if self.rematerialise and len(self.rematerialise) != len(self.stages):
            text = f"rematerialise speaks of {len(self.rematerialise)} stages, there are {len(self.stages)}"
            raise GeofedError("CONFIG_INVALID", text)

    @property
    def workers(self) -> int:
        return len(self.stages) * self.degree

    @property
    def layers(self) -> int:
        return self.stages[-1][1] + 1

    def position(self, worker: int) -> Position:
        """Of a worker by its number: ``stage * degree + replica``."""
        if not 0 <= worker < self.workers:
            raise GeofedError("CONFIG_INVALID", f"worker {worker} of {self.workers}")
        return Position(*divmod(worker, self.degree))

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Of the micro-batches that a replica's samples of a step are cut into."""
        whole, rest = divmod(samples, self.micro_batch)
        return (self.micro_batch,) * whole + ((rest,) if rest else ())

    def rematerialises(self, stage: int) -> bool:
        return bool(self.rematerialise) and self.rematerialise[stage]
