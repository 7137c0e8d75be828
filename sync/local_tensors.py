"""The tensors of a model that stay in their region (`train.local`): FedBN (Li et al. 2021, arXiv 2102.07623) for
statistics and scales of normalisations, FedPer (Arivazhagan et al. 2019, arXiv 1912.00818) for heads."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from geofed_pb.errors import GeofedError
from sync.module_tensors import tensors_of

__all__ = ["local_names"]


def local_names(module: torch.nn.Module, patterns: Collection[str]) -> frozenset[str]:
    """Return the names of the tensors that match one of the patterns, such as "head.*".

    Raises ``GeofedError("TASK_INVALID")`` for a pattern that matches none, and if no other trained parameter is left.
    """
    found = [(place.name, trained) for place, _, trained in tensors_of(module)] if patterns else []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in found):
            text = f"`train.local`: no tensor of the model matches {pattern!r}"
            raise GeofedError("TASK_INVALID", text, hint=_hint(pattern, [name for name, _ in found]))
    names = frozenset(name for name, _ in found if any(fnmatchcase(name, pattern) for pattern in patterns))
    if patterns and not any(trained and name not in names for name, trained in found):
        text = "`train.local` matches all trained parameters, so that regions would exchange nothing"
        raise GeofedError("TASK_INVALID", text, hint="leave some of them out")
    return names


def _hint(pattern: str, names: list[str]) -> str:
    """Suggest the nearest pattern among those that match: a name, all names with a prefix, or with a part."""
    below = {".".join(name.split(".")[:length]) for name in names for length in range(1, len(name.split(".")))}
    known = [pattern[2:]] if pattern.startswith("*.") else []
    known += [
        *names,
        *(f"{prefix}.*" for prefix in sorted(below)),
        *(f"*.{one.split('.')[-1]}.*" for one in sorted(below)),
    ]
    known = [one for one in known if any(fnmatchcase(name, one) for name in names)]
    near = known[:1] if known[:1] == [pattern[2:]] else get_close_matches(pattern, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"names are like {', '.join(names[:3])}"
