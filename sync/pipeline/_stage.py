"""The computation of one stage: forward and backward passes of micro-batches through its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from geofed_pb.errors import GeofedError
from sync.pipeline._contract import Answering, Loss, model_input
from sync.pipeline._stage_tensors import Carried, as_tuple, like
from sync.seeding import reseed

__all__ = ["Stage"]


@dataclass
class _Arrived:
    """The received activations of a micro-batch, and their gradients."""

    value: Carried
    gradients: tuple[torch.Tensor | None, ...] = ()


@dataclass
class _Live:
    """A micro-batch between its forward and its backward pass."""

    arrived: _Arrived | None
    """None in the first stage."""
    batch: Any
    """The batch, in the first and in the last stage."""
    output: Carried | None
    """The output with its graph; None if it will be computed again."""


class _Gate(torch.autograd.Function):
    """The entry of received activations into a stage's graph: its backward pass yields the gradients to send.

    They are not leaves of the graph, because a layer may modify its input in place.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, arrived: _Arrived, again: bool) -> tuple[torch.Tensor, ...]:
        ctx.arrived = arrived
        tensors = as_tuple(arrived.value, "what the stage before passes on")
        # These are other objects than those received: they hold the graph, and the graph holds the received ones.
        passed = tuple(one.clone() if again else one.detach() for one in tensors)
        ctx.mark_non_differentiable(*(one for one in passed if not one.is_floating_point()))
        return passed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.arrived.gradients = gradients
        return None, None, None


class Stage:
    """The layers of one stage, and the micro-batches that are in it. Not thread-safe."""

    def __init__(
        self, layers: nn.Sequential, loss: Loss, *, first_layer: int, is_first: bool, is_last: bool, rematerialise: bool
    ) -> None:
        """``first_layer``: its number in the whole model; ``loss``: used in the first and in the last stage."""
        self.layers, self._loss = layers, loss
        self.is_first, self.is_last, self._again = is_first, is_last, rematerialise
        self._live: dict[int, _Live] = {}
        self._draws: tuple[int, ...] = ()
        self._number = 0
        """Number of the current micro-batch."""
        for at, layer in enumerate(layers, first_layer):
            layer.register_forward_pre_hook(lambda module, _, at=at: self._seed(module, at))
        self.loss_sum = 0.0
        """Loss of the current step, in the last stage: the sum over the micro-batches so far, weighted by their
        shares."""

    @property
    def live(self) -> int:
        """Number of micro-batches between their forward and their backward pass."""
        return len(self._live)

    def begin(self, draws: tuple[int, ...], *, add: bool = False) -> None:
        """Begin a step.

        ``draws``: together with the micro-batch and the layer, these numbers alone determine the layers' random
        numbers, so that they are the same for every division into stages and every order, and when a layer runs again.
        ``add``: add to the existing gradients and loss, as another replica's part of the same step.
        """
        self._live.clear()
        self._draws = draws
        self.layers.train()
        if not add:
            self.loss_sum = 0.0
            self.layers.zero_grad(set_to_none=True)

    def forward(self, number: int, given: Carried | None, batch: Any) -> Carried | None:
        """Run one micro-batch forward; return the value to pass on, None in the last stage. ``given`` is None in the
        first stage."""
        arrived = None if self.is_first else _Arrived(_there(given))
        if self.is_first and not self.is_last:
            # From here on only the model's argument is needed.
            reseed(*self._draws, number, -1)
            batch = model_input(self._loss, batch)
        self._live[number] = live = _Live(arrived, batch, None)
        if not self._again:
            live.output = self._through(number, live)
            return None if self.is_last else _apart(live.output)
        if self.is_last:
            # The loss is computed together with the gradients; with GPipe, running statistics are then updated in that
            # order.
            return None
        with torch.no_grad():
            return self._through(number, live)

    def backward(self, number: int, gradients: tuple[torch.Tensor, ...], share: float) -> tuple[torch.Tensor, ...]:
        """Run one micro-batch backward; return the gradients to pass on, none in the first stage.

        ``share``: this micro-batch's fraction of the step's samples. ``gradients``: those of the output's
        floating-point tensors; none in the last stage.
        """
        live = self._live.pop(number)
        output, counted = live.output, {}
        if output is None:
            if not self.is_last:
                # Running statistics include this micro-batch already, and computing its activations again would include
                # it twice.
                counted = {name: buffer.clone() for name, buffer in self.layers.named_buffers()}
            output = self._through(number, live)
        if self.is_last:
            (loss,) = as_tuple(output, "the loss")
            self.loss_sum += float(loss.detach()) * share
            (loss * share).backward()  # type: ignore[no-untyped-call]
        else:
            _back_through(output, gradients)
        if counted:
            _put_back(self.layers, counted)
        return () if live.arrived is None else _filled(live.arrived)

    def evaluate(self, value: Carried) -> Carried:
        """Run forward only, as when a model is used. The caller must ensure that no graph is recorded."""
        out: Carried = self.layers(value)
        return out

    def _through(self, number: int, live: _Live) -> Carried:
        """Return the stage's output, or the loss in the last stage."""
        self._number = number
        if live.arrived is not None:
            root = torch.zeros((), requires_grad=True)
            tensors = _Gate.apply(root, live.arrived, self._again)  # type: ignore[no-untyped-call]
            value = like(live.arrived.value, tensors)
            return self._value(value, live.batch) if self.is_last else self._run(value)
        if self.is_last:
            reseed(*self._draws, number, -1)
            loss: torch.Tensor = self._loss(self.layers, live.batch)
            return loss
        value = live.batch
        if self._again:
            value = like(value, tuple(one.clone() for one in as_tuple(value, "what the task passes to the model")))
        return self._run(value)

    def _value(self, value: Carried, batch: Any) -> torch.Tensor:
        reseed(*self._draws, self._number, -1)
        model = Answering(lambda: self._run(value))
        loss: torch.Tensor = self._loss(model, batch)
        if model.calls != 1:
            text = f"the task's loss calls the model {model.calls} times; in stages it is called once"
            raise GeofedError("TASK_INVALID", text)
        return loss

    def _run(self, value: Carried) -> Carried:
        out: Carried = self.layers(value)
        return out

    def _seed(self, module: nn.Module, layer: int) -> None:
        if module.training:
            reseed(*self._draws, self._number, layer)


def _there(given: Carried | None) -> Carried:
    if given is None:
        raise GeofedError("INTERNAL", "a micro-batch has no activations")
    return given


def _apart(value: Carried) -> Carried:
    """Return the value without its graph."""
    return like(value, tuple(one.detach() for one in as_tuple(value, "the output of a stage")))


def _back_through(output: Carried, gradients: tuple[torch.Tensor, ...]) -> None:
    floating = [one for one in as_tuple(output, "the output of a stage") if one.is_floating_point()]
    pairs = [(one, grad) for one, grad in zip(floating, gradients, strict=True) if one.requires_grad]
    if pairs:
        torch.autograd.backward([one for one, _ in pairs], [grad.to(one.dtype) for one, grad in pairs])


def _filled(arrived: _Arrived) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the floating-point tensors; zeros if the loss does not depend on a tensor."""
    tensors = as_tuple(arrived.value, "what the stage before passes on")
    gradients = arrived.gradients or (None,) * len(tensors)
    return tuple(
        torch.zeros_like(one) if gradient is None else gradient
        for one, gradient in zip(tensors, gradients, strict=True)
        if one.is_floating_point()
    )


def _put_back(module: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
