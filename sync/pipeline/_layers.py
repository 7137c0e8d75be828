"""The layers of a model, each of which can be created without the others."""

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

    Each layer's initial parameters are determined by the seed and the layer's number alone, so that every worker
    creates the same layer. Raises ``GeofedError("TASK_INVALID")``, with a hint, for a model that cannot be created
    layer by layer. Exceptions of job code are passed on.
    """

    def __init__(self, make: Sequence[Callable[[], nn.Module]], names: Sequence[str], seed: int) -> None:
        if not make:
            raise GeofedError("TASK_INVALID", "the model has no layers")
        self._make, self.names, self._seed = list(make), list(names), seed

    @classmethod
    def declared(cls, factories: Sequence[Callable[[], nn.Module]], seed: int) -> Layers:
        """Create from functions, each of which returns one initialised layer."""
        made = list(factories)
        odd = next((number for number, factory in enumerate(made) if not callable(factory)), None)
        if odd is not None:
            raise GeofedError("TASK_INVALID", f"layer {odd} of layers(config) is not a function", hint=_DECLARE)
        return cls(made, [str(number) for number in range(len(made))], seed)

    @classmethod
    def of(cls, build: Callable[[], nn.Module], seed: int) -> Layers:
        """Create from a function that returns an ``nn.Sequential``, which is called without allocating memory for
        parameters.

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
        """Create one layer with its initial values, on the CPU."""
        seed_all(self._seed, number)
        layer = self._make[number]()
        if not isinstance(layer, nn.Module):
            text = f"layer {number} of layers(config) is a {type(layer).__name__}, not a torch.nn.Module"
            raise GeofedError("TASK_INVALID", text)
        return layer

    def stage(self, first: int, last: int) -> nn.Sequential:
        """Create consecutive layers, both ends inclusive, with their names in the whole model."""
        return nn.Sequential(OrderedDict((self.names[at], self.make(at)) for at in range(first, last + 1)))

    def shell(self) -> nn.Sequential:
        """Create the whole model without values: it takes no memory, and shows the name and size of each tensor.

        A factory that must create real tensors needs memory for its one layer.
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
    """Raise ``GeofedError("TASK_INVALID")`` if layers share a parameter, which would become two parameters in two
    stages."""
    seen: dict[int, str] = {}
    for name, tensor in whole.named_parameters(remove_duplicate=False):
        if id(tensor) in seen:
            text = f"{name} is the same parameter as {seen[id(tensor)]}; a model that is cut into stages shares none"
            raise GeofedError("TASK_INVALID", text, hint="give each its own, or train it data parallel")
        seen[id(tensor)] = name


def _initialiser(name: str, shell: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that creates an initialised copy of a layer without values."""

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
    """Mark every value as not set, so that values which remain unset are detected."""
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
        # Booleans have no third value to mark them as not set.
        return True
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
