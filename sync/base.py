"""The base of a model: the tensors that never change, so that they are neither merged nor exchanged."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from geofed_pb.errors import GeofedError
from sync.framing import Array
from sync.module_tensors import Access, Place, refused, tensors_of, version_of

__all__ = ["Base", "frozen_parameters", "possibly_constant", "written"]

_LET_IT_TRAIN = "let it require a gradient in model(config); where it is not to move, give its group a rate of 0"
_CHANGE_IT_EARLIER = "let the first step write to it, too, for instance with add_(0): then it is exchanged"


def frozen_parameters(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters that do not require a gradient."""
    return frozenset(
        place.name for place, _, trained in tensors_of(module) if place.kind == "parameter" and not trained
    )


def possibly_constant(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the tensors that a step may leave as they are: frozen parameters, and buffers other than the
    statistics of a normalisation."""
    buffers = (
        place.name
        for place, _, _ in tensors_of(module)
        if place.kind == "buffer" and not (isinstance(place.owner, _NormBase) and place.owner.track_running_stats)
    )
    return frozen_parameters(module).union(buffers)


def written(module: torch.nn.Module, names: frozenset[str], step: Callable[[], None]) -> frozenset[str]:
    """Return those of the named tensors that a step writes to, also if their values stay the same."""
    base = Base([place for place, _, _ in tensors_of(module) if place.name in names])
    base.watch()
    step()
    return base.written()


@dataclass(frozen=True)
class _Seen:
    tensor: torch.Tensor
    version: int
    checksum: int

    def is_touched(self, tensor: torch.Tensor) -> bool:
        return tensor is not self.tensor or version_of(tensor) != self.version


class Base:
    """The base of one module. Raises ``GeofedError("TASK_INVALID")``, with the tensor's name, where it changes."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = {place.name: place for place in places}
        self.access = Access()
        """How the tensors are read and written."""
        self._seen: dict[str, _Seen] = {}

    def __len__(self) -> int:
        return len(self._places)

    def contents(self) -> dict[str, Array]:
        """Return the bytes of each tensor, by name; of tensors on the CPU they are not copied."""
        return {name: _bytes(self.access.read(place.tensor())) for name, place in self._places.items()}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each tensor's bytes, by name."""
        return {name: hashlib.sha256(content.data).hexdigest() for name, content in self.contents().items()}

    @property
    def checksum(self) -> int:
        """Checksum of all contents at the time of `watch`."""
        numbers = [self._seen[name].checksum for name in sorted(self._seen)]
        return zlib.crc32(np.array(numbers, np.uint32).data)

    def load(self, contents: Mapping[str, Array]) -> None:
        """Write the bytes of tensors, by name; others than those of this module are ignored."""
        with torch.no_grad():
            for name, place in self._places.items():
                if name not in contents:
                    continue
                tensor = place.tensor()
                content = np.array(contents[name], np.uint8)
                if content.nbytes != tensor.numel() * tensor.element_size():
                    raise GeofedError("MODEL_MISMATCH", f"{name} of the base has {content.nbytes} bytes")
                value = torch.from_numpy(content).view(tensor.dtype).reshape(tensor.shape)
                if place.kind == "buffer" and not tensor.is_contiguous():
                    place.replace(value.to(tensor.device))
                else:
                    self.access.write(tensor, value)

    def watch(self) -> None:
        """Note the present contents, which `check` compares with."""
        self._seen = {
            name: _Seen(tensor := place.tensor(), version_of(tensor), self._checksum(tensor))
            for name, place in self._places.items()
        }

    def written(self) -> frozenset[str]:
        """Return the names of the tensors that were written to since `watch`."""
        now = {name: self._places[name].tensor() for name in self._seen}
        return frozenset(
            name
            for name, seen in self._seen.items()
            if seen.is_touched(now[name]) or self._checksum(now[name]) != seen.checksum
        )

    def check(self, *, values: bool = False) -> None:
        """Raise if a tensor was written to, or has a gradient. ``values``: compare contents, too, which also finds
        writes that torch does not count."""
        for name, seen in self._seen.items():
            place, tensor = self._places[name], self._places[name].tensor()
            if place.kind == "parameter" and tensor.grad is not None:
                raise refused(place, "was frozen when model(config) returned it, and has a gradient now", _LET_IT_TRAIN)
            if (values or seen.is_touched(tensor)) and self._checksum(tensor) != seen.checksum:
                raise refused(place, "was not changed by the first step, and has changed now", _CHANGE_IT_EARLIER)

    def _checksum(self, tensor: torch.Tensor) -> int:
        return zlib.crc32(_bytes(self.access.read(tensor)).data)


def _bytes(tensor: torch.Tensor) -> Array:
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    found: Array = dense.view(torch.uint8).numpy()
    return found
