"""A round as a worker counts it, and its end while the server has not answered yet."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from geofed_pb.v1 import worker_pb2
from sync.layout import Vector

__all__ = ["Answer", "Ended", "Sums"]

Answer = tuple[worker_pb2.BoundaryReply, Vector | None]
"""To the end of a round, with background exchange; with the correction, if there is one."""


@dataclass
class Sums:
    """What a worker sums up within a round."""

    samples: float = 0.0
    loss_sum: float = 0.0
    """Loss times samples."""
    compute_seconds: float = 0.0

    def rescale(self, factor: float) -> None:
        """What it would be with so many times the samples in each step."""
        self.samples, self.loss_sum = self.samples * factor, self.loss_sum * factor

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else 0.0

    def facts(self, prefix: str = "") -> dict[str, float]:
        """As numbers that a frame keeps."""
        return {f"{prefix}{name}": float(getattr(self, name)) for name in _NAMES}

    @classmethod
    def of(cls, facts: Mapping[str, float], prefix: str = "") -> Sums:
        """What `facts` made."""
        return cls(*(facts[f"{prefix}{name}"] for name in _NAMES))


_NAMES = ("samples", "loss_sum", "compute_seconds")


@dataclass(frozen=True)
class Ended:
    """A round whose end is told to the server while the next one has begun."""

    request: worker_pb2.BoundaryRequest
    sums: Sums
    due: int
    """After this step the answer counts, in all workers of the partition."""
    reply: Future[Answer]
