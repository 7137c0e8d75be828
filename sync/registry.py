"""Methods by name: those of this package, one file each, and those that other packages bring."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from geofed_pb.errors import GeofedError

__all__ = ["Registry"]

_log = logging.getLogger("geofed.methods")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


MethodT = TypeVar("MethodT", bound=_Named)


class Registry(Generic[MethodT]):
    """All methods of one kind.

    Built-in methods are what the public modules of ``package`` name in ``METHODS``; a module whose name begins with an
    underscore holds none. Other packages add theirs by entry points of the group ``group``, each a method or what makes
    one without arguments. Both are imported at the first use. A built-in name can't be taken by another package, and a
    plug-in that fails to load is reported when it is asked for, and stops nothing else.
    """

    def __init__(self, kind: str, package: str, group: str, check: Callable[[MethodT], str] = lambda _: "") -> None:
        """``kind``: as error texts name it. ``check``: what is wrong with a plug-in's method; empty: nothing."""
        self._kind, self._package, self._group, self._check = kind, package, group, check
        self._failed: dict[str, str] = {}

    @cached_property
    def all(self) -> dict[str, MethodT]:
        """By name: the built-in ones, then those of other packages, each sorted by module or entry point."""
        found: dict[str, MethodT] = {}
        for module in sorted(
            module.name for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__)
        ):
            if not module.startswith("_"):
                methods: Iterable[MethodT] = importlib.import_module(f"{self._package}.{module}").METHODS
                found |= {method.name: method for method in methods}
        for point in sorted(entry_points(group=self._group), key=lambda point: point.name):
            method = self._loaded(point, found)
            if method is not None:
                found[method.name] = method
        return found

    def named(self, name: str) -> MethodT:
        """Raises ``GeofedError("CONFIG_INVALID")`` for a name that is not known."""
        if name in self.all:
            return self.all[name]
        why = self._failed.get(name)
        raise GeofedError(
            "CONFIG_INVALID",
            f"{self._kind} {name!r} cannot be loaded: {why}" if why else f"unknown {self._kind} {name!r}",
            hint=f"known: {', '.join(sorted(self.all))}",
        )

    def _loaded(self, point: EntryPoint, known: dict[str, MethodT]) -> MethodT | None:
        try:
            loaded = point.load()
            method: MethodT = loaded() if callable(loaded) else loaded
            name = method.name
            why = f"it is named {name!r}, its entry point {point.name!r}" if name != point.name else self._check(method)
            if name in known:
                why = f"{self._kind} {name!r} is there already"
        except Exception as error:  # noqa: BLE001 - code of another package, which may fail in any way
            why = f"{type(error).__name__}: {error}"
        if not why:
            return method
        self._failed[point.name] = why
        _log.warning("%s %r of %s cannot be loaded: %s", self._kind, point.name, point.value, why)
        return None
