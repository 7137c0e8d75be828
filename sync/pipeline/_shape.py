"""The shape of a pipeline: how the model is divided into stages, and the position of each worker."""

from __future__ import annotations

from dataclasses import dataclass

from geofed_pb.errors import GeofedError

__all__ = ["Pipeline", "StagePosition"]


@dataclass(frozen=True)
class StagePosition:
    """The position of a worker."""

    stage: int
    """From 0."""
    replica: int
    """Number among the workers of its stage, from 0."""


@dataclass(frozen=True)
class Pipeline:
    """Stages of consecutive layers, each run by the same number of workers.

    Raises ``GeofedError("CONFIG_INVALID")`` for stages that omit or repeat a layer.
    """

    stages: tuple[tuple[int, int], ...]
    """First and last layer of each stage, counted from 0, both inclusive."""
    degree: int = 1
    """Replicas of each stage, which divide the samples of a step among themselves and merge their gradients."""
    micro_batch: int = 1
    """Samples of a micro-batch; the last one of a step may have fewer."""
    order: str = "1f1b"
    """Order of a step's passes: "1f1b" or "gpipe"."""
    rematerialise: tuple[bool, ...] = ()
    """By stage: whether it stores only its inputs, and computes its activations again before each backward pass. Empty:
    no stage does."""

    def __post_init__(self) -> None:
        follows = 0
        for first, last in self.stages:
            if first != follows or last < first:
                raise GeofedError("CONFIG_INVALID", f"stage {first}-{last} does not begin with layer {follows}")
            follows = last + 1
        if not self.stages or self.degree < 1 or self.micro_batch < 1 or self.order not in ("gpipe", "1f1b"):
            raise GeofedError("CONFIG_INVALID", f"not a pipeline: {self}")
        if self.rematerialise and len(self.rematerialise) != len(self.stages):
            text = f"rematerialise has {len(self.rematerialise)} entries for {len(self.stages)} stages"
            raise GeofedError("CONFIG_INVALID", text)

    @property
    def workers(self) -> int:
        """Number of workers of the pipeline, over all stages and replicas."""
        return len(self.stages) * self.degree

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1][1] + 1

    def position(self, worker: int) -> StagePosition:
        """Return the position of a worker, whose number is ``stage * degree + replica``."""
        if not 0 <= worker < self.workers:
            raise GeofedError("CONFIG_INVALID", f"worker {worker} of {self.workers}")
        return StagePosition(*divmod(worker, self.degree))

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Return the sizes of the micro-batches into which a replica's samples of a step are divided."""
        whole, rest = divmod(samples, self.micro_batch)
        return (self.micro_batch,) * whole + ((rest,) if rest else ())

    def rematerialises(self, stage: int) -> bool:
        """Whether a stage computes its activations again before each backward pass."""
        return bool(self.rematerialise) and self.rematerialise[stage]
