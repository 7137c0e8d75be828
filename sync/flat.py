"""Conversion between a torch module and its flat vector. Besides this module, only `sync.base`, `sync.device`,
`sync.merging.gradients`, `sync.module_tensors` and `sync.pipeline` need torch in this package."""

from __future__ import annotations

import warnings
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync.base import Base
from sync.coordinates import coding_of
from sync.layout import Layout, Slot, Vector
from sync.mapped_files import buffer_of, windows
from sync.module_tensors import (
    KINDS,
    Access,
    Found,
    Place,
    memory_of,
    refused,
    tensors_of,
    unlisted_buffers,
    version_of,
)

__all__ = ["Apart", "FlatModel", "layout_of"]

# Vectors from frames are read-only, which torch does not support; nothing here writes to them. torch warns of that once
# per process. Trigger the warning now, so that it is not raised in the middle of a step where warnings are errors.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))

_PLAIN = ("float32", "float64", "float16", "bfloat16")

Calling = Callable[[str], AbstractContextManager[object]]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of_the_module(
    method: Callable[Concatenate[FlatModel, _Arguments], _Result],
) -> Callable[Concatenate[FlatModel, _Arguments], _Result]:
    """Decorate a method that calls into the module."""

    @wraps(method)
    def guarded(flat: FlatModel, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        with flat._calling("the model's state"):
            return method(flat, *arguments, **named)

    return guarded


class FlatModel:
    """A module and its layout; reads and writes the flat vector and gradients.

    Tied parameters are contained once in the layout. Buffers are looked up each time, since modules may reassign them.
    Not thread-safe. Raises ``GeofedError("TASK_INVALID")``, with the tensor's name, for tensors that cannot be
    exchanged.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        part: bool = False,
        base: Collection[str] = (),
        local: Collection[str] = (),
        calling: Calling = nullcontext,
    ) -> None:
        """``part``: the module is part of a larger model, so it needn't have trained parameters. ``base``: names of the
        tensors that never change. ``local``: names of those that stay in the region. ``calling``: returns a context
        manager that is entered around all calls into the module, given their purpose; it can distinguish errors of the
        module from others."""
        self.module, self._calling, self._access = module, calling, Access()
        found = tensors_of(module)
        for place, tensor, _ in found:
            _check_values(place, tensor)
        # The stages of a model agree on a layout that is made without values.
        self.layout, order = _layout(module, found, base, local, marks=not part)
        self.base, self.local = (
            Base([place for place, _, _ in found if place.name in {slot.name for slot in slots}])
            for slots in (self.layout.base, self.layout.local)
        )
        self._places = [found[at][0] for at in order]
        self._trained = self._places[: self.layout.trainable]
        self._bound = [place.tensor() for place in self._trained]
        """The parameters that the optimiser has."""
        self._sparse: set[int] = set()
        """Numbers of the trained parameters whose gradient has been sparse."""
        self._plain = [slot.coding.coordinates == 1 and slot.dtype in _PLAIN for slot in self.layout.slots]
        """By slot: whether coordinates are the values, and torch computes with their type."""
        self._unlisted = {place.name: (tensor, version_of(tensor)) for place, tensor in unlisted_buffers(module)}
        if not self.layout.trainable and not part:
            raise GeofedError("TASK_INVALID", "the model has no trainable parameters")

    def use(self, access: Access) -> None:
        """Read and write tensors by ``access`` from now on; parameters may have been replaced by others of their
        shapes."""
        self._access = self.base.access = self.local.access = access
        self._bound = [place.tensor() for place in self._trained]

    # The whole state

    @_of_the_module
    def vector(self, out: Vector | None = None) -> Vector:
        """Return a copy of the whole state, shape (layout.size,), in ``out`` if it is given."""
        if out is None:
            out = np.frombuffer(buffer_of(4 * self.layout.size), np.float32)
        with torch.no_grad():
            self._copy_out(out, 0)
        return out

    @_of_the_module
    def views(self) -> list[Vector] | None:
        """Return the whole state as consecutive vectors in the module's own memory, which the next step changes.

        Only coordinates that are not the values of their tensor are copied, such as counters'. None: the tensors are
        not all in this process's main memory as float32.
        """
        here = [self._access.is_whole(tensor) and tensor.device.type == "cpu" for tensor in self._now()]
        if not all(here):
            return None
        found: list[Vector] = []
        for number, slot in enumerate(self.layout.slots):
            tensor = self._tensor(number)
            if not self._plain[number]:
                found.append(slot.encode(_as_array(tensor)))
            elif slot.dtype == "float32" and tensor.is_contiguous():
                found.append(tensor.reshape(-1).numpy())
            else:
                return None
        return found or None

    @_of_the_module
    def load(self, vector: Vector) -> None:
        """Write a whole state into the module."""
        with torch.no_grad():
            for number, (_, at) in enumerate(self.layout.places()):
                self._put(number, vector[at])

    @_of_the_module
    def add(self, change: Vector) -> None:
        """Add a change to the whole state; values that are not floating-point numbers are rounded. One that is mapped
        from a file is read a part at a time, so that little of it counts as memory of the process.

        Tensors that share memory receive the change once.
        """
        with torch.no_grad():
            now = self._now()
            here = [tensor for tensor in now if self._access.is_whole(tensor)]
            shared = Counter(tensor.untyped_storage().data_ptr() for tensor in here if tensor.numel())
            later: list[tuple[int, torch.Tensor]] = []
            for number, (slot, at) in enumerate(self.layout.places()):
                tensor, part = now[number], change[at]
                whole = self._plain[number] and self._access.is_whole(tensor)
                if whole and tensor.is_contiguous() and shared[tensor.untyped_storage().data_ptr()] <= 1:
                    values = tensor.reshape(-1)
                    for window in windows(slot.size, part):
                        values[window] += _as_tensor(part[window]).to(tensor.device, tensor.dtype)
                elif self._plain[number]:
                    moved = _as_tensor(part).reshape(slot.shape).to(tensor.device, tensor.dtype)
                    if not self._access.is_whole(tensor):
                        self._access.write(tensor, self._access.read(tensor) + moved)
                    elif shared[tensor.untyped_storage().data_ptr()] > 1:
                        later.append((number, tensor + moved))
                    elif self._writable(tensor):
                        tensor += moved
                    else:
                        self._write(number, tensor + moved)
                else:
                    coordinates = slot.encode(_as_array(self._access.read(tensor))) + part
                    later.append((number, _from_array(slot.decode(coordinates))))
            for number, value in later:
                self._write(number, value)

    @_of_the_module
    def exact(self) -> dict[str, torch.Tensor]:
        """Return the parameters that the vector rounds, by name: those wider than float32."""
        wide = [place for place, slot in zip(self._places, self.layout.slots, strict=False) if slot.dtype == "float64"]
        return {place.name: self._access.read(place.tensor()) for place in wide if place.kind == "parameter"}

    @_of_the_module
    def scratch(self) -> dict[str, torch.Tensor]:
        """Return the buffers, by name, that are not part of the model's state but have changed since the module was
        made."""
        return {
            place.name: tensor.detach()
            for place, tensor in unlisted_buffers(self.module)
            if not self._unchanged(place.name, tensor)
        }

    @_of_the_module
    def load_named(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors of `exact` or `scratch` into the module."""
        unlisted = {place.name: place for place, _ in unlisted_buffers(self.module)}
        numbers = {place.name: number for number, place in enumerate(self._places)}
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name in numbers:
                    self._write(numbers[name], tensor)
                elif name in unlisted:
                    device = unlisted[name].tensor().device
                    unlisted[name].replace(tensor.to(device))

    # Gradients

    @_of_the_module
    def gradient(self) -> Vector:
        """Return the gradient vector, shape (layout.gradient_size,): the gradients of the trained parameters (zero if
        dense is none), the rest of the state, and for each trained parameter whether it has a gradient."""
        out = np.empty(self.layout.gradient_size, np.float32)
        flat = torch.from_numpy(out)
        at = 0
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                part = flat[at : at + parameter.numel()]
                grad = self._dense_gradient(number, parameter)
                part.zero_() if grad is None else part.copy_(grad.reshape(-1))
                at += parameter.numel()
        out[at:] = self.gradient_tail()
        return out

    def gradient_of(self, number: int) -> Vector:
        """Return the gradient of the trained parameter of this number, shape (n,); zeros if it has none."""
        parameter = self.parameters()[number]
        grad = self._dense_gradient(number, parameter)
        if grad is None:
            return np.zeros(parameter.numel(), np.float32)
        flat: Vector = grad.detach().reshape(-1).to("cpu", torch.float32).numpy()
        return flat

    @_of_the_module
    def gradient_tail(self) -> Vector:
        """Return the part of `gradient` that follows the gradients."""
        head = self.layout.trainable_size
        out = np.empty(self.layout.gradient_size - head, np.float32)
        with torch.no_grad():
            self._copy_out(out, self.layout.trainable)
        self.base.check()
        for place in self._places[self.layout.trainable :]:
            if place.kind == "parameter" and place.tensor().grad is not None:
                text = "was frozen when model(config) returned it, and has a gradient now"
                hint = "let it require a gradient in model(config); where it is not to move, give its group a rate of 0"
                raise refused(place, text, hint)
        given = [parameter.grad is not None for parameter in self.parameters()]
        out[self.layout.size - head :] = given
        return out

    @_of_the_module
    def gradient_parts(self) -> list[Vector]:
        """Return `gradient` as consecutive vectors, one for each trained parameter and a last one, for `load_parts`:
        in the memory of ``.grad`` where that is float32 and in this process's main memory, otherwise copies."""
        apart = Apart()
        return [*(apart.of(self.gradient_of(n)) for n in range(self.layout.trainable)), self.gradient_tail()]

    @_of_the_module
    def load_parts(self, parts: Sequence[Vector]) -> None:
        """Write merged gradients, as `load_gradient` does, given as `gradient_parts` returned them."""
        *gradients, tail = parts
        given = tail[self.layout.size - self.layout.trainable_size :]
        with torch.no_grad():
            for parameter, merged, some in zip(self.parameters(), gradients, given, strict=True):
                grad = parameter.grad
                there = grad is not None and not grad.is_sparse and grad.data_ptr() == merged.ctypes.data
                if some > 0 and not there:
                    _set_gradient(parameter, merged)
        self.load_gradient(tail, self.layout.trainable_size)

    @_of_the_module
    def load_gradient(self, vector: Vector, start: int = 0) -> None:
        """Write merged gradients into ``.grad``, and the merged rest of the state into the module. A parameter without
        a gradient on any worker gets none, so that the optimiser does not change it.

        ``start`` is the vector's first coordinate; it and the vector's end must be between two tensors. Of several
        parts, the last one must be loaded last.
        """
        stop = start + vector.size
        parameters = self.parameters()
        with torch.no_grad():
            for number, (_, at) in enumerate(self.layout.places()):
                if not (start <= at.start and at.stop <= stop):
                    continue
                part = vector[at.start - start : at.stop - start]
                if number >= len(parameters):
                    self._put(number, part)
                    continue
                _set_gradient(parameters[number], part)
            if stop >= self.layout.gradient_size:
                given = vector[self.layout.size - start :]
                for number, parameter in enumerate(parameters):
                    if not given[number] > 0:
                        parameter.grad = None
                    elif number in self._sparse and parameter.grad is not None:
                        parameter.grad = _rows_of(parameter.grad)

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the trained parameters, in the order of the layout.

        Raises ``GeofedError("TASK_INVALID")`` if one was replaced by another, which the optimiser does not train.
        """
        for place, bound in zip(self._trained, self._bound, strict=True):
            if place.tensor() is not bound:
                raise refused(place, "was replaced by another one, which the optimiser does not train")
        return self._bound

    def _dense_gradient(self, number: int, parameter: torch.Tensor) -> torch.Tensor | None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            self._sparse.add(number)
            return parameter.grad.to_dense()
        return parameter.grad

    # Between tensors and coordinates

    def _copy_out(self, out: Vector, first: int) -> None:
        """Write the coordinates of the tensors from number ``first`` on into ``out``."""
        at = 0
        for number in range(first, len(self._places)):
            slot, tensor = self.layout.slots[number], self._tensor(number)
            if self._plain[number]:
                torch.from_numpy(out[at : at + slot.size]).copy_(tensor.reshape(-1))
            else:
                out[at : at + slot.size] = slot.encode(_as_array(tensor))
            at += slot.size

    def _now(self) -> list[torch.Tensor]:
        return [place.tensor() for place in self._places]

    def _put(self, number: int, coordinates: Vector) -> None:
        slot = self.layout.slots[number]
        if self._plain[number]:
            self._write(number, _as_tensor(coordinates).reshape(slot.shape))
        else:
            self._write(number, _from_array(slot.decode(coordinates)))

    def _tensor(self, number: int) -> torch.Tensor:
        place, slot = self._places[number], self.layout.slots[number]
        tensor = place.tensor()
        if tuple(tensor.shape) != slot.shape or tensor.dtype != getattr(torch, slot.dtype):
            text = f"is {_described(tensor)} now; model(config) returned it as {slot.dtype} {list(slot.shape)}"
            raise refused(place, text, "let model(config) make it with the type and shape that it will have")
        return self._access.read(tensor)

    def _write(self, number: int, value: torch.Tensor) -> None:
        place = self._places[number]
        tensor = place.tensor()
        if place.kind == "extra state":
            place.replace(value.to(tensor.device, tensor.dtype))
        elif self._writable(tensor) or place.kind == "parameter":
            self._access.write(tensor, value)
        else:
            place.replace(value.to(tensor.device, tensor.dtype, copy=True))

    @staticmethod
    def _writable(tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() or not (tensor.is_inference() or _overlaps(tensor))

    @_of_the_module
    def check_names(self) -> None:
        """Raise ``GeofedError("TASK_INVALID")`` for a tensor that no vector contains: it was added after the model was
        made, or was another name of a tensor that the layout has."""
        layout = self.layout
        known, aliases = {slot.name for slot in (*layout.slots, *layout.base, *layout.local)}, dict(layout.aliases)
        for place, _, _ in tensors_of(self.module):
            if place.name in aliases:
                text = f"was {aliases[place.name]}'s memory when model(config) returned the model, and is not now"
                raise refused(place, text, "make it a tensor of its own in model(config), with .clone()")
            if place.name not in known:
                text = "was not in the model that model(config) returned, or was not dense there"
                raise refused(place, text, "register it in model(config), with the type and shape that it will have")

    def _unchanged(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a buffer that is not part of the state is still the same tensor, and was not written to."""
        before, version = self._unlisted.get(name, (None, 0))
        return before is tensor and version == version_of(tensor)


class Apart:
    """Vectors whose memory does not overlap, though gradients may be views of the same memory."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def of(self, vector: Vector) -> Vector:
        """Return the vector, or a copy if it overlaps one of those before."""
        begin, end = vector.ctypes.data, vector.ctypes.data + vector.nbytes
        at = bisect(self._begins, begin)
        if (at and self._ends[at - 1] > begin) or (at < len(self._begins) and self._begins[at] < end):
            return vector.copy()
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        return vector


def layout_of(shell: torch.nn.Module, base: Collection[str] = (), local: Collection[str] = ()) -> Layout:
    """Return the layout of a module that was made without values. ``base``, ``local``: as in `FlatModel`."""
    return _layout(shell, tensors_of(shell), base, local, marks=False)[0]


def _layout(
    module: torch.nn.Module, found: list[Found], base: Collection[str], local: Collection[str], *, marks: bool
) -> tuple[Layout, list[int]]:
    """Return the layout, and the order of its slots in ``found``. ``base``, ``local``: names of tensors without a slot.
    ``marks``: non-finite values are allowed, by marks."""
    order = sorted(range(len(found)), key=lambda at: (not found[at][2], KINDS.index(found[at][0].kind)))
    slots: list[Slot] = []
    kept: list[Slot] = []
    stays: list[Slot] = []
    for at in order:
        place, tensor, trained = found[at]
        constant = place.name in base and not trained
        if trained and tensor.is_complex():
            raise refused(place, "is complex", "keep its two parts as real tensors")
        if tensor.is_complex() and not constant and not _finite(tensor):
            raise refused(place, "is complex and holds values that are not finite")
        dtype = str(tensor.dtype).removeprefix("torch.")
        coding = coding_of(dtype, trained=trained, marked=marks and not (trained or constant) and not _finite(tensor))
        if coding is None:
            raise refused(place, f"is {dtype}, which is not supported")
        if place.name in local or constant:
            (stays if place.name in local else kept).append(Slot(place.name, tuple(tensor.shape), dtype))
            continue
        slots.append(Slot(place.name, tuple(tensor.shape), dtype, coding))
        if coding.parts > 1 and tensor.device.type != "meta":
            _check_exact(place, tensor, slots[-1])
    aliases = _aliases(module, {found[at][0].name: found[at][1] for at in order})
    names = {slot.name for slot in (*kept, *stays)}
    order = [at for at in order if found[at][0].name not in names]
    trainable = sum(found[at][2] for at in order)
    return Layout(tuple(slots), trainable, aliases, tuple(kept), tuple(stays)), order


def _aliases(module: torch.nn.Module, slots: dict[str, torch.Tensor]) -> tuple[tuple[str, str], ...]:
    """Return further names in the state dict, each with the name of its slot."""
    names = {id(tensor): name for name, tensor in slots.items()}
    views = {memory_of(tensor): name for name, tensor in slots.items() if isinstance(tensor, torch.nn.Parameter)}
    found = []
    for alias, tensor in module.state_dict(keep_vars=True).items():
        if alias in slots:
            continue
        name = names.get(id(tensor), views.get(memory_of(tensor)))
        if name is None:
            text = f"{alias} of the model's state_dict() is neither a parameter nor a buffer, and cannot be exchanged"
            raise GeofedError("TASK_INVALID", text, hint="register it as a parameter or a buffer")
        found.append((alias, name))
    return tuple(found)


def _check_values(place: Place, tensor: torch.Tensor) -> None:
    if torch.nn.parameter.is_lazy(tensor):
        text = "has no shape before the model has seen an input"
        raise refused(place, text, "call the model once with an example in model(config), before it is returned")
    if tensor.device.type == "meta":
        text = "has no values: it is on the device `meta`"
        raise refused(place, text, "make it with values in model(config): to_empty(), and then reset_parameters()")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        raise refused(place, f"is {kind}; only dense tensors are supported", "keep it in dense tensors")
    if place.kind == "parameter" and _overlaps(tensor):
        text = "has several elements at the same memory address, so that no optimiser can change it"
        raise refused(place, text, "make it with .clone() or .contiguous()")
    if place.kind == "buffer" and not tensor.is_contiguous() and _overlaps(tensor):
        # A contiguous copy has the same values, and can be written to.
        place.replace(tensor.contiguous())


def _check_exact(place: Place, tensor: torch.Tensor, slot: Slot) -> None:
    values = _as_array(tensor)
    with np.errstate(over="ignore", invalid="ignore"):
        back = slot.decode(slot.encode(values))
    if not np.array_equal(values, back, equal_nan=values.dtype.kind in "fc"):
        raise refused(place, f"holds values that cannot be exchanged: {slot.dtype} beyond the range of float32")


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.device.type == "meta" or not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    with torch.no_grad():
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        real = real.float() if real.itemsize < 2 else real
        least, most = torch.aminmax(real)
        return bool(torch.isfinite(least) & torch.isfinite(most))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may have the same memory address."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient of the non-zero rows, as of an embedding with ``sparse=True``."""
    rows = gradient.reshape(gradient.shape[0], -1).ne(0).any(1).nonzero().reshape(1, -1)
    return torch.sparse_coo_tensor(rows, gradient[rows[0]], gradient.shape, check_invariants=False, is_coalesced=True)


def _set_gradient(parameter: torch.Tensor, gradient: Vector) -> None:
    """Write a gradient into ``.grad``; one that is mapped from a file is read a part at a time."""
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = torch.empty_like(parameter)
    if not parameter.grad.is_contiguous():
        parameter.grad.copy_(_as_tensor(gradient).reshape(parameter.shape))
        return
    values = parameter.grad.view(-1)
    for window in windows(gradient.size, gradient):
        values[window].copy_(_as_tensor(gradient[window]))


def _as_tensor(vector: Vector) -> torch.Tensor:
    """Return a view, which must not be written to."""
    return torch.from_numpy(vector)


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.generic]]:
    dense = tensor.detach()
    if dense.is_floating_point() and dense.dtype not in (torch.float64, torch.float32):
        dense = dense.float()
    return dense.resolve_conj().resolve_neg().cpu().numpy()


def _from_array(array: np.ndarray[Any, np.dtype[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
