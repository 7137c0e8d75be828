"""All collectives by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from sync.collective._contract import CollectiveMethod
from sync.registry import Registry

__all__ = ["collective_named", "collectives"]


def _check(method: CollectiveMethod, _: Mapping[str, CollectiveMethod]) -> str:
    if not isinstance(method, CollectiveMethod):
        return f"it is a {type(method).__name__}, not a CollectiveMethod"
    if wrong := [workers for workers in (1, 2, 64) if not 0 <= method.owners(workers, None) <= workers]:
        return f"its owners are {method.owners(wrong[0], None)} of {wrong[0]} workers"
    return ""


_REGISTRY: Registry[CollectiveMethod] = Registry("collective", "sync.collective", "geofed.collectives", _check)


@cache
def _in_order() -> tuple[CollectiveMethod, ...]:
    """Simple ones come first, so that of two equal ones the simpler is chosen."""
    return tuple(sorted(_REGISTRY.all.values(), key=lambda one: (one.takes_k, one.worker != "", one.name)))


@cache
def _names() -> tuple[str, ...]:
    return tuple(method.name for method in _in_order())


def collectives(having: Callable[[CollectiveMethod], object] | None = None) -> tuple[str, ...]:
    """Return the names of the collectives that have a trait, or of all, the simple ones first."""
    return _names() if having is None else tuple(method.name for method in _in_order() if having(method))


def collective_named(name: str) -> CollectiveMethod:
    """Return the collective of that name. Raises ``GeofedError("CONFIG_INVALID")`` if it is unknown."""
    return _REGISTRY.named(name)
