"""Serialisation, without pickle, of nested Python values that contain torch tensors, to the tensors of a frame.

None, booleans, integers, floats, strings, tensors (dense, or sparse in COO layout), and lists, tuples and dicts of
these are restored as they were; tensors keep their bits and their dtype.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync.framing import Array

__all__ = ["Unsupported", "dump_tree", "load_tree"]

_TREE = "tree"
_MAX_DEPTH = 64
"""Deepest nesting that is accepted."""


class Unsupported(Exception):
    """Raised for a value that cannot be serialised; the message states where it is, and what it is."""


def dump_tree(value: Any, prefix: str = "") -> dict[str, Array]:
    """Return the arrays of a value, whose names begin with the prefix. Tensors on the CPU are not copied. Raises
    `Unsupported`."""
    arrays: dict[str, Array] = {}
    tree = _dump(value, prefix, arrays, "", 0)
    arrays[f"{prefix}{_TREE}"] = np.frombuffer(json.dumps(tree, separators=(",", ":")).encode(), np.uint8)
    return arrays


def load_tree(arrays: Mapping[str, Array], prefix: str = "", device: torch.device | None = None) -> Any:
    """Return the value that `dump_tree` serialised; tensors are copies. ``device``: the device of tensors that were not
    on the CPU.

    Raises ``GeofedError("FRAME_INVALID")`` if the arrays are invalid, and ``KeyError`` if dense is no value under the
    prefix.
    """
    text = arrays[f"{prefix}{_TREE}"]
    try:
        return _load(json.loads(np.asarray(text, np.uint8).tobytes()), prefix, arrays, device)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError, RuntimeError) as error:
        raise GeofedError("FRAME_INVALID", f"not a tree of tensors: {type(error).__name__}: {error}") from None


def _dump(value: Any, prefix: str, arrays: dict[str, Array], path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise Unsupported(f"{path}: values are nested deeper than {_MAX_DEPTH}")
    if isinstance(value, torch.Tensor):
        return _dump_tensor(value, prefix, arrays, path)
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if kind in (list, tuple):
        parts = [_dump(one, prefix, arrays, f"{path}[{at}]", depth + 1) for at, one in enumerate(value)]
        return ["l" if kind is list else "u", *parts]
    if kind in (dict, OrderedDict):
        pairs = [
            [_dump_key(key, path), _dump(one, prefix, arrays, f"{path}[{key!r}]", depth + 1)]
            for key, one in value.items()
        ]
        return ["d", *pairs]
    raise Unsupported(f"{path or 'it'} is a {kind.__name__}")


def _dump_key(key: Any, path: str) -> Any:
    if key is None or type(key) in (bool, int, float, str):
        return key
    raise Unsupported(f"{path}: a key is a {type(key).__name__}")


def _dump_tensor(tensor: torch.Tensor, prefix: str, arrays: dict[str, Array], path: str) -> Any:
    if tensor.layout == torch.sparse_coo:
        parts = [
            _dump_tensor(part.contiguous(), prefix, arrays, path) for part in (tensor._indices(), tensor._values())
        ]
        return ["s", *parts, list(tensor.shape), int(tensor.is_coalesced())]
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        raise Unsupported(f"{path or 'it'} is a tensor that is not dense, or has no values")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    number = len(arrays)
    arrays[f"{prefix}{number}"] = dense.reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ["t", number, dtype, list(tensor.shape), int(tensor.device.type == "cpu")]


def _load(tree: Any, prefix: str, arrays: Mapping[str, Array], device: torch.device | None) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "t":
        number, name, shape, on_cpu = rest
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is not a dtype")
        # Arrays from a channel are read-only, so this copies.
        held = np.array(arrays[f"{prefix}{int(number)}"], np.uint8)
        flat = torch.from_numpy(held).view(dtype) if held.size else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(shape)
        return tensor if on_cpu or device is None else tensor.to(device)
    if kind == "s":
        indices, values = (_load(one, prefix, arrays, device) for one in rest[:2])
        return torch.sparse_coo_tensor(indices, values, rest[2], check_invariants=True, is_coalesced=bool(rest[3]))
    if kind in ("l", "u"):
        parts = [_load(one, prefix, arrays, device) for one in rest]
        return parts if kind == "l" else tuple(parts)
    if kind == "d":
        return {key: _load(one, prefix, arrays, device) for key, one in rest}
    raise ValueError(f"unknown kind of value {kind!r}")
