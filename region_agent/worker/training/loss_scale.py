"""The scale of the loss with `train.precision: fp16` (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

Gradients of a scaled loss are large enough for float16. They are divided by the scale again before they are added up
and merged, so all workers see the same merged gradient, and change the scale alike: where it is not finite, which
means that a gradient has overflowed in some worker, none of them makes the step.
"""

from __future__ import annotations

import sys

import torch

from geofed_pb.errors import GeofedError

__all__ = ["LossScale"]

_FIRST = 2.0**16
"""First scale; as that of torch's GradScaler."""
_LARGEST = 2.0**24
"""Largest scale. Powers of two change no bits of a float32 gradient."""
_SMALLEST = 2.0**-10
"""Smallest scale; where it overflows, too, float16 does not suffice for the model."""
_STEPS = 2000
"""Steps without an overflow after which the scale is doubled; as in torch's GradScaler."""


class LossScale:
    """The scale, which depends only on the steps made. Raises ``GeofedError("TASK_INVALID")`` for parameters of 16
    bits, whose gradients would vanish when they are divided by it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._scale, self._since, self.skipped = _FIRST, 0, 0
        self._trained = [one for one in module.parameters() if one.requires_grad]
        for parameter in self._trained:
            if parameter.dtype in (torch.float16, torch.bfloat16):
                text = f"`train.precision: fp16` with trained parameters of {parameter.dtype}"
                raise GeofedError("TASK_INVALID", text, hint="let model(config) make them as torch.float32")
            parameter.register_hook(lambda gradient: gradient / self._scale)  # type: ignore[no-untyped-call]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss that gradients are computed of; they arrive at the parameters unscaled."""
        return loss * self._scale

    def accepts(self) -> bool:
        """Whether the merged gradients are finite, so that the step is made; changes the scale.

        Raises ``GeofedError("TASK_FAILED")`` if gradients overflow even with the smallest scale.
        """
        if all(_finite(one.grad) for one in self._trained if one.grad is not None):
            self._since += 1
            if self._since >= _STEPS:
                self._scale, self._since = min(_LARGEST, 2 * self._scale), 0
            return True
        if self._scale <= _SMALLEST:
            hint = "use `train.precision: bf16`, or lower the learning rate"
            raise GeofedError("TASK_FAILED", "gradients are not finite in float16 with any scale", hint=hint)
        self._scale, self._since, self.skipped = self._scale / 2, 0, self.skipped + 1
        return False

    def state(self) -> dict[str, float]:
        """Return the numbers that the next invocation needs."""
        return {"loss_scale": self._scale, "loss_scale_since": float(self._since)}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the result of `state`; without one, the first scale stays."""
        self._scale = state.get("loss_scale", self._scale)
        self._since = int(state.get("loss_scale_since", self._since))

    def close(self) -> None:
        """Log how many steps were skipped in this invocation."""
        if self.skipped:
            text = f"{self.skipped} steps of this invocation were skipped, since gradients overflowed in float16"
            print(text, file=sys.stderr, flush=True)


def _finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())
