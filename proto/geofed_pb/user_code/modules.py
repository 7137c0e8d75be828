"""Imports of a task's modules: the task's own code finds them as ``python task.py`` does, and no other code finds them.

A file of the task may have the name of a library or of a package of geofed. The task's code then imports the file, and
all other code in the process still gets the library, also in later imports. For that the task's folders are at the end
of ``sys.path``, and ``__import__`` looks at the importing module. A task module that would hide another module is
loaded as part of the package `PACKAGE`; all others keep their plain names.

``sys.modules``, ``sys.path`` and the working directory belong to the process, so one task is loaded at a time.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["PACKAGE", "drop_task_modules", "import_task"]

PACKAGE = "geofed_task"
"""Package of task modules whose plain names are those of other modules."""
_OURS = frozenset(
    {"control_plane", "deploy", "geofed", "geofed_pb", "proto", "region_agent", "scheduler", "sync", "tests"}
)
"""Packages of geofed. A task's folder of such a name is meant instead of them, also without ``__init__.py``."""


def import_task(root: Path, module: str) -> ModuleType:
    """Import a task module, a path below ``root``; it replaces the task that was loaded before.

    Until `drop_task_modules` the task's folder is the working directory. If the module raises, everything is restored
    and the exception is passed on.
    """
    global _loaded
    drop_task_modules()
    _loaded = _TaskModules(Path(os.path.abspath(root)), module)
    with contextlib.ExitStack() as undo:
        undo.callback(drop_task_modules)
        loaded = _loaded.run()
        undo.pop_all()
    return loaded


def drop_task_modules() -> None:
    """Remove the loaded task's modules, if there is one, and restore ``sys.path`` and the working directory."""
    global _loaded
    if _loaded is not None:
        _loaded.close()
        _loaded = None


class _TaskModules:
    def __init__(self, root: Path, module: str) -> None:
        self._root, self._path = root, root / module
        self._prefix = f"{root}{os.sep}"
        self._names: dict[tuple[str, ...], str | None] = {}
        self._sys_path = list(sys.path)
        self._cwd: str | None = None
        with contextlib.suppress(FileNotFoundError):
            self._cwd = os.getcwd()
        # Relative entries, such as "", must not mean the task's folder from now on.
        sys.path[:] = [os.path.abspath(one) for one in sys.path]
        sys.path += dict.fromkeys([str(self._path.parent), str(root)])
        os.chdir(root)
        self._package = ModuleType(PACKAGE)
        self._package.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
        self._package.__path__ = self._folders()
        sys.modules[PACKAGE] = self._package
        self._plain_import, self._plain_import_module = builtins.__import__, importlib.import_module
        # Bound once each, so that `close` can recognise them if other code has replaced them.
        self._hook, self._module_hook = self._import, self._import_module
        builtins.__import__ = self._hook
        importlib.import_module = self._module_hook

    def run(self) -> ModuleType:
        stem = self._path.stem
        spec = PathFinder.find_spec(stem, self._folders())
        importable = spec is not None and spec.origin == str(self._path)
        name = self._relative_name(stem) if importable else f"{PACKAGE}.__task__"
        spec = importlib.util.spec_from_file_location(str(name), self._path)
        assert spec is not None, f"{self._path} is no Python file"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    def close(self) -> None:
        if builtins.__import__ is self._hook:
            builtins.__import__ = self._plain_import
        if importlib.import_module is self._module_hook:
            importlib.import_module = self._plain_import_module
        for name in [name for name in list(sys.modules) if self._is_task_module(name)]:
            del sys.modules[name]
        for folder in [one for one in sys.path_importer_cache if self._is_below(one)]:
            del sys.path_importer_cache[folder]
        sys.path[:] = self._sys_path
        self._names.clear()
        if self._cwd is not None:
            with contextlib.suppress(OSError):
                os.chdir(self._cwd)

    # Imports

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Replacement of ``__import__``."""
        caller = sys._getframe(1).f_globals if globals is None else globals
        if not self._is_task_code(caller):
            return self._plain_import(name, globals, locals, fromlist or (), level)
        if level:
            absolute = self._absolute(name, str(caller.get("__package__") or ""), level)
            if absolute is None:
                return self._plain_import(name, globals, locals, fromlist or (), level)
            if not absolute:
                return self._members(fromlist or ())
            first, _, rest = absolute.partition(".")
            found = self._relative_name(first)
            if found is None:
                raise ModuleNotFoundError(f"No module named {absolute!r} in the task folder", name=absolute)
            return self._plain_import(f"{found}.{rest}" if rest else found, globals, locals, fromlist or (), 0)
        first = name.partition(".")[0]
        if self._name(first) in (None, first):
            return self._plain_import(name, globals, locals, fromlist or (), 0)
        imported = self._plain_import(f"{PACKAGE}.{name}", globals, locals, fromlist or (), 0)
        return imported if fromlist else sys.modules[f"{PACKAGE}.{first}"]

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Replacement of ``importlib.import_module``."""
        first = name.partition(".")[0]
        if first and self._is_task_code(sys._getframe(1).f_globals) and self._name(first) not in (None, first):
            name = f"{PACKAGE}.{name}"
        return self._plain_import_module(name, package)

    def _members(self, names: Sequence[str]) -> ModuleType:
        """Import names for ``from . import names`` in the task module: modules next to it, or names that an
        ``__init__.py`` next to it defines."""
        for name in names:
            if (found := self._relative_name(name)) is not None:
                self._plain_import_module(found)
                setattr(self._package, name, sys.modules[found])
            elif not hasattr(self._package, name) and not hasattr(self._package, "__file__"):
                self._initialise()
        return self._package

    def _initialise(self) -> None:
        spec = importlib.util.spec_from_file_location(PACKAGE, self._path.parent / "__init__.py")
        if spec is not None and spec.loader is not None and Path(str(spec.origin)).exists():
            self._package.__file__ = spec.origin
            spec.loader.exec_module(self._package)

    def _absolute(self, name: str, package: str, level: int) -> str | None:
        """Return the absolute name of a relative import; None: it stays within a package, or leads outside the task."""
        above = [one for one in package.split(".") if one]
        if above[:1] == [PACKAGE]:
            del above[0]
        beyond = level - 1 - len(above)
        if beyond < 0:
            return None
        folders = self._path.parent.relative_to(self._root).parts
        if beyond > len(folders):
            return None
        # The task module's folder is itself a top level; above it, names begin at the root folder.
        leading = folders[: len(folders) - beyond] if beyond else ()
        return ".".join([*leading, name]) if name else ".".join(leading)

    # Ownership of modules

    def _name(self, first: str) -> str | None:
        """Return the name under which the task's module ``first`` is loaded.

        None: the task has no such module, or another module takes precedence, as built-in ones always do.
        """
        folders = self._folders()
        key = first, *folders
        if key not in self._names:
            self._names[key] = self._decide_name(first, folders)
            self._package.__path__ = folders
        return self._names[key]

    def _decide_name(self, first: str, folders: list[str]) -> str | None:
        if first in sys.builtin_module_names or FrozenImporter.find_spec(first) is not None:
            return None
        own = PathFinder.find_spec(first, folders)
        if own is None:
            return None
        if not self._is_elsewhere(first):
            return first
        # Python also prefers any other module to a folder without __init__.py.
        return f"{PACKAGE}.{first}" if own.loader is not None or first in _OURS else None

    def _relative_name(self, first: str) -> str | None:
        """Return the same for a relative import, which never leads outside the task."""
        found = self._name(first)
        if found is None and PathFinder.find_spec(first, self._folders()) is not None:
            return f"{PACKAGE}.{first}"
        return found

    def _is_elsewhere(self, first: str) -> bool:
        if first in sys.modules:
            return not self._is_task_module(first)
        others = [one for one in sys.path if not self._is_below(one)]
        for finder in sys.meta_path:
            spec = (
                PathFinder.find_spec(first, others) if finder is PathFinder else finder.find_spec(first, None)
            )  # fmt: skip
            if spec is not None and not self._is_in_task_folder(spec):
                return True
        return False

    def _folders(self) -> list[str]:
        """Return the folders on ``sys.path`` that belong to the task, with those that it has added itself."""
        return [one for one in sys.path if self._is_below(one)]

    def _is_task_module(self, name: str) -> bool:
        return (
            name == PACKAGE
            or name.startswith(f"{PACKAGE}.")
            or self._is_in_task_folder(getattr(sys.modules[name], "__dict__", {}).get("__spec__"))
        )

    def _is_in_task_folder(self, spec: ModuleSpec | None) -> bool:
        """Whether a module is stored in the task's folder."""
        if not isinstance(spec, ModuleSpec):
            return False
        if spec.has_location and spec.origin is not None:
            return self._is_below(spec.origin)
        try:
            return any(self._is_below(one) for one in spec.submodule_search_locations or ())
        except KeyError:
            # A namespace package whose parent is no longer in sys.modules.
            return False

    def _is_task_code(self, module: Mapping[str, Any]) -> bool:
        file = module.get("__file__")
        return isinstance(file, str) and file.startswith(self._prefix)

    def _is_below(self, path: str) -> bool:
        # Called for every loaded module, of which nearly none is in the task; abspath takes twenty times longer.
        if path.startswith(os.sep) and self._root.name not in path:
            return False
        whole = os.path.abspath(path)
        return whole.startswith(self._prefix) or f"{whole}{os.sep}" == self._prefix


_loaded: _TaskModules | None = None
