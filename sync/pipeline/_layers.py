"""The layers of a model, each of which can be made without the others."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from geofed_pb.errors import GeofedError
from sync.seeding import seed_all

__all__ = ["Layers"]

_DECLARE = "define layers(config) in the task module: a list of functions without arguments, one for each layer"


class Layers:
    """A model as a chain of layers: the output of one is the input of the next.

    Each layer's parameters follow from the seed and the layer's number alone, so any worker that makes a layer makes
    the same one. Raises ``GeofedError("TASK_INVALID")``, which says what to do, for a model that cannot be made layer
    by layer, and lets through what job code raises.
    """

    def __init__(self, make: Sequence[Callable[[], nn.Module]], names: Sequence[str], seed: int) -> None:
        if not make:
            raise GeofedError("TASK_INVALID", "the model has no layers")
        self._make, self.names, self._seed = list(make), list(names), seed

    @classmethod
    def declared(cls, factories: Sequence[Callable[[], nn.Module]], seed: int) -> Layers:
        """Of functions, each of which makes one layer, with its values."""
        made = list(factories)
        odd = next((number for number, factory in enumerate(made) if not callable(factory)), None)
        if odd is not None:
            raise GeofedError("TASK_INVALID", f"layer {odd} of layers(config) is no function", hint=_DECLARE)
        return cls(made, [str(number) for number in range(len(made))], seed)

    @classmethod
    def of(cls, build: Callable[[], nn.Module], seed: int) -> Layers:
        """Of a function that makes an ``nn.Sequential``; it is called without memory for any parameter.

        A layer's values are then set by the ``reset_parameters`` of its modules.
        """
        try:
            with torch.device("meta"):
                whole = build()
        except (NotImplementedError, RuntimeError) as error:
            text = f"model(config) needs the values of its parameters while it makes them ({error})"
            raise GeofedError("TASK_INVALID", text, hint=_DECLARE) from None
        if type(whole) is not nn.Sequential:
            text = f"model(config) returns a {type(whole).__name__}; only an nn.Sequential can be cut into stages"
            raise GeofedError("TASK_INVALID", text, hint=f"return an nn.Sequential, or {_DECLARE}")
        _refuse_shared(whole)
        layers = dict(whole.named_children())
        return cls([_initialiser(name, layer) for name, layer in layers.items()], list(layers), seed)

    def __len__(self) -> int:
        return len(self._make)

    def make(self, number: int) -> nn.Module:
        """One layer with its initial values, on the CPU."""
        seed_all(self._seed, number)
        layer = self._make[number]()
        if not isinstance(layer, nn.Module):
            text = f"layer {number} of layers(config) is a {type(layer).__name__}, not a torch.nn.Module"
            raise GeofedError("TASK_INVALID", text)
        return layer

    def stage(self, first: int, last: int) -> nn.Sequential:
        """Some consecutive layers, both ends included, with the names that the whole model has for them."""
        return nn.Sequential(OrderedDict((self.names[at], self.make(at)) for at in range(first, last + 1)))

    def shell(self) -> nn.Sequential:
        """The whole model without values: it takes no memory, and shows what each tensor is called and how long it is.

        A function that insists on making real tensors is called with room for its one layer.
        """
        shell: OrderedDict[str, nn.Module] = OrderedDict()
        for number, name in enumerate(self.names):
            try:
                with torch.device("meta"):
                    shell[name] = self.make(number).to("meta")
            except (NotImplementedError, RuntimeError):
                shell[name] = self.make(number).to("meta")
        return nn.Sequential(shell)


def _refuse_shared(whole: nn.Sequential) -> None:
    """What two places share would become two things."""
    seen: dict[int, str] = {}
    for name, tensor in whole.named_parameters(remove_duplicate=False):
        if id(tensor) in seen:
            text = f"{name} is the same parameter as {seen[id(tensor)]}; a model that is cut into stages shares none"
            raise GeofedError("TASK_INVALID", text, hint="give each its own, or train it data parallel")
        seen[id(tensor)] = name


def _initialiser(name: str, shell: nn.Module) -> Callable[[], nn.Module]:
    """Makes a layer out of its shell; the shell itself stays what it is."""

    def make() -> nn.Module:
        if torch.get_default_device().type == "meta":
            return shell
        layer = copy.deepcopy(shell).to_empty(device="cpu")
        _spoil(layer)
        layer.apply(_reset)
        for place, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if _spoilt(tensor):
                text = f"layer {name}: {place} has no value after reset_parameters()"
                hint = f"set it in a reset_parameters() of its module, or {_DECLARE}"
                raise GeofedError("TASK_INVALID", text, hint=hint)
        return layer

    return make


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()


def _spoil(layer: nn.Module) -> None:
    """Mark every value as not set, so that one which stays so is seen."""
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype is not torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).min)


def _spoilt(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype is torch.bool:
        # There is no third value: nothing says whether it was set.
        return True
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
