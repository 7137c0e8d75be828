"""Serialises an optimiser's state as named tensors, so that the next invocation can continue with it.

The state of parameter n has names ``n/...``; state of the whole optimiser, such as the groups' values, ``-1/...``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.tensor_tree import Unsupported, dump_tree, load_tree
from sync import framing

__all__ = ["State", "dump_state", "load_state", "loads_itself"]

State = tuple[dict[str, framing.Array], dict[str, float]]
"""Tensors and numbers, by name."""

_WHOLE = -1
"""Used in place of a parameter's number for state of the whole optimiser."""
_PARAMS = "params"


def dump_state(
    optimizer: torch.optim.Optimizer, read: Callable[[int, str, Any], Any] = lambda _, __, value: value
) -> State:
    """Serialise the optimiser's `state_dict`; raises ``GeofedError("TASK_INVALID")`` for objects that it cannot.

    ``read`` returns the value to serialise, given the parameter's number, the key in its state, and the value there.
    """
    dumped = optimizer.state_dict()
    state = dumped.get("state", {})
    arrays: dict[str, framing.Array] = {}
    for key, entry in state.items():
        if _is_number(key):
            whole = (
                {name: read(key, name, value) for name, value in entry.items()} if isinstance(entry, dict) else entry
            )
            arrays |= _dumped(whole, f"{key}/", "state of a parameter")
    groups = [_kept(group) for group in dumped.get("param_groups", ())]
    whole = {
        "groups": groups,
        "state": {key: entry for key, entry in state.items() if not _is_number(key)},
        "more": {key: value for key, value in dumped.items() if key not in ("state", "param_groups")},
    }
    return {**arrays, **_dumped(whole, f"{_WHOLE}/", "state")}, {}


def load_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, framing.Array], numbers: Mapping[str, float]
) -> None:
    """Load a dumped state into a new optimiser over the same parameters, without rounding.

    ``torch.optim.Optimizer.load_state_dict`` converts state to the parameter's type, so it is not called. A method that
    the optimiser's class overrides is called, and tensors that it has converted are replaced.
    """
    # Tensors of earlier versions of geofed have no tree: the optimiser's state starts empty after them.
    owners = sorted(int(name.split("/", 1)[0]) for name in tensors if name.endswith("/tree"))
    device = next((p.device for group in optimizer.param_groups for p in group[_PARAMS]), None)
    state = {owner: load_tree(tensors, f"{owner}/", device) for owner in owners if owner != _WHOLE}
    whole = load_tree(tensors, f"{_WHOLE}/", device) if _WHOLE in owners else {"groups": [], "state": {}, "more": {}}
    parameters = [parameter for group in optimizer.param_groups for parameter in group[_PARAMS]]
    if loads_itself(optimizer):
        fresh = optimizer.state_dict()
        groups = [
            {**group, **(whole["groups"][at] if at < len(whole["groups"]) else {}), _PARAMS: group[_PARAMS]}
            for at, group in enumerate(fresh.get("param_groups", ()))
        ]
        loaded = {"state": {**state, **whole["state"]}, "param_groups": groups}
        optimizer.load_state_dict({**whole["more"], **loaded})
        for number, entry in state.items():
            _unround(optimizer.state.get(parameters[number]), entry)
        return
    for number, entry in state.items():
        optimizer.state[parameters[number]] = entry
    for key, entry in whole["state"].items():
        optimizer.state[key] = entry
    for group, values in zip(optimizer.param_groups, whole["groups"], strict=False):
        group.update(values)


def loads_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser's class loads a state by code of its own."""
    hooked = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    return bool(hooked) or type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def _unround(held: Any, entry: Any) -> None:
    """Replace tensors whose type loading has changed by the original ones."""
    if not (isinstance(held, dict) and isinstance(entry, dict)):
        return
    for key, value in entry.items():
        now = held.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            held[key] = value
        else:
            _unround(now, value)


def _is_number(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool)


def _kept(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's values without those that cannot be serialised, such as functions; the task sets them again."""
    kept = {}
    for key, value in group.items():
        if key == _PARAMS:
            continue
        try:
            dump_tree(value)
        except Unsupported:
            continue
        kept[key] = value
    return kept


def _dumped(value: Any, prefix: str, what: str) -> dict[str, framing.Array]:
    try:
        return dump_tree(value, prefix)
    except Unsupported as error:
        text = f"the optimiser's {what} cannot be carried over from one invocation to the next: {error}"
        hint = "keep tensors, numbers, strings, and lists, tuples and dicts of them in the optimiser's state"
        raise GeofedError("TASK_INVALID", text, hint=hint) from None
