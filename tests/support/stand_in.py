"""CPUs of workers in place of GPUs."""

from __future__ import annotations

__all__ = ["in_place_of_devices"]

_SITE_CUSTOMIZE = """
import importlib.util
import sys


class _Finder:
    def find_spec(self, name, path, target=None):
        if name != "region_agent.worker.ranks.devices":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGE

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
"""


def in_place_of_devices(change: str) -> str:
    """Return the `sitecustomize` of the processes from which workers are forked: ``change`` is a statement about
    ``module``, `region_agent.worker.ranks.devices`, made once that is imported."""
    return _SITE_CUSTOMIZE.replace("CHANGE", change)
