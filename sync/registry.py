"""Methods by name: built-in ones, one per file, and those of other packages."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping
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
    """The registry of all methods of one kind.

    Built-in methods are listed in ``METHODS`` of the public modules of ``package``; modules whose name begins with an
    underscore have none. Other packages add methods by entry points of the group ``group``, each a method or a callable
    without arguments that returns one. Both are imported at the first use. Another package cannot replace a built-in
    name. A plug-in that fails to load is reported when its name is requested, and does not affect others.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        group: str,
        check: Callable[[MethodT, Mapping[str, MethodT]], str] = lambda *_: "",
    ) -> None:
        """``kind``: name of the kind in error texts. ``check``: returns what is wrong with a plug-in's method, "" if
        nothing."""
        self._kind, self._package, self._group, self._check = kind, package, group, check
        self._failed: dict[str, str] = {}

    @cached_property
    def all(self) -> dict[str, MethodT]:
        """All methods by name: the built-in ones, then those of other packages, each sorted by module or entry
        point."""
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
        """Return the method of that name. Raises ``GeofedError("CONFIG_INVALID")`` if it is unknown or failed to
        load."""
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
            if name != point.name:
                why = f"it is named {name!r}, its entry point {point.name!r}"
            elif name in known:
                why = f"{self._kind} {name!r} exists already"
            else:
                why = self._check(method, known)
        except Exception as error:  # noqa: BLE001 - code of another package, which may fail in any way
            why = f"{type(error).__name__}: {error}"
        if not why:
            return method
        self._failed[point.name] = why
        _log.warning("%s %r of %s cannot be loaded: %s", self._kind, point.name, point.value, why)
        return None
