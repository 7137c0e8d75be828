"""The proximal term of FedProx (Li et al. 2020, arXiv 1812.06127): workers stay close to the round's model."""

from __future__ import annotations

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync.flat import FlatModel
from sync.layout import Vector

__all__ = ["ProximalTerm"]


class ProximalTerm:
    """Adds the gradient of mu / 2 * |w - w_round|^2 to the gradients of the trained parameters."""

    def __init__(self, flat: FlatModel, mu: float) -> None:
        self.flat, self._mu = flat, mu
        self._anchors: list[torch.Tensor] = []

    def begin_round(self, model: Vector, *, lasting: bool = False) -> None:
        """Set w_round, the model with which the round began, shape (flat.layout.size,). ``lasting``: the vector stays
        as it is during the round, so that no copy of it is needed."""
        parameters = self.flat.parameters()
        self._anchors = []
        for parameter, (slot, at) in zip(parameters, self.flat.layout.places(), strict=False):
            # A copy, where the vector may be in the channel's memory, which is freed in the next round.
            own = model[at] if lasting else np.array(model[at], np.float32)
            value = torch.from_numpy(own).reshape(slot.shape)
            self._anchors.append(value.to(parameter.device, parameter.dtype))

    def add(self) -> None:
        """Add the term's gradient; a parameter without a gradient is not trained in this step.

        Raises ``GeofedError("TASK_INVALID")`` for a sparse gradient.
        """
        with torch.no_grad():
            for parameter, anchor in zip(self.flat.parameters(), self._anchors, strict=True):
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided:
                    text = "`advanced.wan.policy: fedprox` needs dense gradients"
                    raise GeofedError("TASK_INVALID", text, hint="make embeddings with sparse=False")
                parameter.grad.add_(parameter - anchor, alpha=self._mu)
