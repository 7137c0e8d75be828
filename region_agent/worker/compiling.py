"""Calls of the model compiled by `torch.compile`, with `train.compile`."""

from __future__ import annotations

import os
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from geofed_pb.errors import GeofedError

__all__ = ["check_compiler", "compile_calls"]

_HINT = (
    "the region's workers need g++ or clang and Python's headers, with a GPU also triton; install them there, "
    "or leave out train.compile"
)
"""Hint of an error about a compiler that cannot be used."""
_compiled: type[torch.nn.Module] | None = None
"""Class of the module that was compiled last."""


@lru_cache(maxsize=1)
def check_compiler(folder: Path, where: torch.device) -> None:
    """Compile and call a small function on a device, once in a process. Compiled code is kept in ``folder``.

    It shows whether there is a compiler that may be started, and whether its output can be loaded. What it takes, the
    first call of a model need not take again. Raises ``GeofedError("TASK_FAILED")``.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    from torch._inductor import config  # takes a second, which only jobs with `train.compile` should need

    # One thread of this process: a pool of processes would outlive the call, and count for the worker's memory.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Any compiler of C++17 knows AVX2 and AVX-512. For each of them torch would compile a program and load it in a
    # process of its own: 9 s of processor time. Torch has read the variable already; further ranks read it.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    config.cpp.vec_isa_ok = True
    sample = torch.ones(8, device=where, requires_grad=True)
    try:
        torch.compile(_small)(sample).backward()  # type: ignore[no-untyped-call]
    except (GeofedError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - the compiler's errors have no common type
        traceback.print_exception(error, file=sys.stderr)
        why = str(error).strip().partition("\n")[0]
        text = f"torch.compile cannot be used here: {type(error).__name__}: {why}"
        raise GeofedError("TASK_FAILED", text, hint=_HINT) from None


def _small(values: torch.Tensor) -> torch.Tensor:
    return (values.sin() * 2).sum()


def compile_calls(module: torch.nn.Module) -> None:
    """Have calls of a module compiled, from its next one on. Names of its parameters and buffers stay as they are.

    Modules of the same class and shapes share what is compiled, so that later invocations of a process compile
    nothing. What was compiled for a module of another class is dropped: it would count for torch's limit of versions
    of the same code, above which calls are no longer compiled.
    """
    global _compiled
    if _compiled is not type(module):
        torch.compiler.reset()
        _compiled = type(module)

    def call(*arguments: Any, **named: Any) -> Any:
        return module._call_impl(*arguments, **named)  # type: ignore[no-untyped-call]

    # `module.compile()` compiles nothing where `forward` is torch's own, as of `nn.Sequential`: torch traces no frame
    # of its own modules from outside. The frame of `call` is traced, and what it calls is inlined.
    module._compiled_call_impl = torch.compile(call)
