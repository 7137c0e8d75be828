"""Files of a model that torch writes: a state dict, and programs that run without the model's class.

A program is the model's graph in eval mode, traced by ``torch.export`` from the user's own task module. The code of a
job that a control plane holds is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError, install_hint
from geofed_pb.user_code.modules import drop_task_modules, import_task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

__all__ = ["Input", "TaskCopy", "find_packages", "write_program", "write_state_dict"]

_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_SHAPE = re.compile(r"(?P<shape>[1-9][0-9]{0,8}(?:x[1-9][0-9]{0,8}){0,7})(?::(?P<dtype>[a-z0-9]+))?")
_MOST_ELEMENTS = 1 << 28
"""Limit of the elements of an example input: 1 GiB in float32."""
_MOST_ONNX_BYTES = 2_000_000_000
"""Protocol Buffers, of which an ONNX file is one message, end at 2 GiB."""
_LOCAL_FACT = "local"
"""In the header of a model's file, the names of the tensors that stay in their region, as a JSON list."""
_MESSAGE_BYTES = 500
"""Limit of a message that names a PyTorch error: a few lines of a terminal."""
_EXAMPLE = "example_input"
_NOT_EXPORTED = "forward may not branch on the values of tensors, and returns tensors in tuples, lists and dicts"


@dataclass(frozen=True)
class Input:
    """An input of a model: its shape, of which the first dimension is the batch, and its dtype."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> Input:
        """Read ``1x1x28x28`` or ``1x128:int64``. Raises ``GeofedError("USAGE")``."""
        found = _SHAPE.fullmatch(text)
        hint = f"as 1x1x28x28 or 1x128:int64; types: {', '.join(_DTYPES)}"
        if found is None or (found["dtype"] or "float32") not in _DTYPES:
            raise GeofedError("USAGE", f"invalid value {clean(text, 80)!r} for --input", hint=hint)
        shape = tuple(int(size) for size in found["shape"].split("x"))
        if math.prod(shape) > _MOST_ELEMENTS:
            raise GeofedError("USAGE", f"--input {text} has more than {_MOST_ELEMENTS:,} elements", hint=hint)
        return cls(shape, found["dtype"] or "float32")


@dataclass(frozen=True)
class TaskCopy:
    """The user's own copy of a job's task module, and the configuration of the job."""

    root: Path
    """The task folder."""
    module: Path
    config: dict[str, Any]

    @classmethod
    def find(cls, place: Path, module: str, config: dict[str, Any]) -> TaskCopy:
        """Find a task module in a task folder, or take the file that is named. Raises ``GeofedError("USAGE")``."""
        place = place.resolve()
        if place.is_file() and place.suffix == ".py":
            # Of a module in a subfolder of the task folder.
            depth = len(Path(module).parts) if place.parts[-len(Path(module).parts) :] == Path(module).parts else 1
            return cls(place.parents[depth - 1], place, config)
        path = (place / module).resolve()
        # The path comes from the control plane: it must not name another file of this machine.
        if not (path.is_relative_to(place) and path.is_file() and path.suffix == ".py"):
            hint = "give the folder of the job file, or the task module itself"
            raise GeofedError("USAGE", f"there is no task module {clean(module, 200)} in {place}: --task", hint=hint)
        return cls(place, path, config)


def find_packages(*names: str, option: str, extra: str) -> None:
    """Raise ``GeofedError("USAGE")`` if a package is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        hint = f"{install_hint(extra)}; or export it as safetensors"
        verb = "is" if len(missing) == 1 else "are"
        text = f"--as {option} needs {' and '.join(missing)}, which {verb} not installed"
        raise GeofedError("USAGE", text, hint=hint)


def write_state_dict(whole: Path, target: Path) -> dict[str, object]:
    """Write a model as `torch.save` does. Return what the manifest says of the file."""
    import torch
    from safetensors.torch import load_file

    def write(draft: Path) -> None:
        # With a path, torch raises RuntimeError also for what the system refuses.
        with draft.open("wb") as file:
            torch.save(load_file(whole), file)

    return _written(target, ".pt", write) | {"format": "state_dict"}


def write_program(
    whole: Path, target: Path, task: TaskCopy, inputs: Sequence[Input], *, as_onnx: bool = False
) -> dict[str, object]:
    """Write a model in eval mode as a program: an archive of ``torch.export.save``, or ONNX.

    ``inputs``: those of the model, in order; none: what `example_input` of the task module returns. The first dimension
    is of any size if the model allows it. Return what the manifest says of the file. Raises ``GeofedError``.
    """
    import torch

    if as_onnx and whole.stat().st_size > _MOST_ONNX_BYTES:
        text = f"the model has {whole.stat().st_size / 1e9:.1f} GB, and an ONNX file holds 2 GB at most"
        raise GeofedError("USAGE", text, hint="use `--as torch-export`")
    target = target.absolute()
    with _imported(task) as module:
        model = _model(task, module, whole)
        examples = _examples(task, module, inputs)
        program, is_dynamic = _traced(task, model, examples, "--input" if inputs else _EXAMPLE)
        batch: Any = tuple({0: "batch"} for _ in examples) if is_dynamic else None

        def write(draft: Path) -> None:
            if as_onnx:
                made = torch.onnx.export(program, dynamo=True, verbose=False, dynamic_shapes=batch)
                assert made is not None
                made.save(draft)
            else:
                torch.export.save(program, draft)

        with _refused(task, "the model cannot be exported", hint=_NOT_EXPORTED, passed=OSError), _silent():
            told = _written(target, ".onnx" if as_onnx else ".pt2", write)
    shapes = [
        f"{'x'.join(['N', *map(str, one.shape[1:])] if is_dynamic else map(str, one.shape))}:{_dtype(one)}"
        for one in examples
    ]
    return {**told, "format": "onnx" if as_onnx else "torch_export", "inputs": shapes}


def _written(target: Path, ending: str, write: Callable[[Path], object]) -> dict[str, object]:
    """Write a complete file, or nothing."""
    draft = target.with_name(f".{target.name}.{os.getpid()}{ending}")
    try:
        # If the system refuses the file, by OSError; torch would raise others.
        draft.touch()
        write(draft)
        with draft.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return {"digest": digest, "bytes": target.stat().st_size}


@contextmanager
def _imported(task: TaskCopy) -> Iterator[ModuleType]:
    """Import a task module as workers do. Until the end its folder is the working directory, and what it prints goes
    to stderr."""
    with chdir(task.root), redirect_stdout(sys.stderr):
        try:
            with _refused(task, f"{task.module.name} raised", code="TASK_FAILED"):
                module = import_task(task.root, str(task.module.relative_to(task.root)))
            yield module
        finally:
            drop_task_modules()


@contextmanager
def _refused(
    task: TaskCopy,
    text: str,
    *,
    code: str = "TASK_INVALID",
    hint: str | None = None,
    passed: type[Exception] = GeofedError,
) -> Iterator[None]:
    """Turn what a task's code, or torch about it, raises into one sentence with the line of the task. ``passed``:
    exceptions that are passed on."""
    try:
        yield
    except passed:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        if isinstance(error, ModuleNotFoundError):
            hint = f"install {error.name} beside geofed"
        lines = [line for line in str(error).splitlines() if line.strip()]
        told = clean(f"{text}: {type(error).__name__}: {' '.join(lines[:1])}", _MESSAGE_BYTES)
        hint = hint or "the module runs here as in its workers, but without data, secrets and `task.env`"
        raise GeofedError(code, f"{told}{_place(error, task)}", hint=hint) from None


def _place(error: BaseException, task: TaskCopy) -> str:
    """Return where in the task an exception was raised, as " at FILE:LINE"."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(task.root)]
    return f" at {Path(own[-1].filename).relative_to(task.root)}:{own[-1].lineno}" if own else ""


@contextmanager
def _silent() -> Iterator[None]:
    """Leave out what torch's exporters print and warn of: graphs, and packages that they could also use."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _model(task: TaskCopy, module: ModuleType, whole: Path) -> nn.Module:
    """Create the task's model with the trained values, in eval mode."""
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import nn

    made: object = None
    if callable(function := getattr(module, "model", None)):
        with _refused(task, "model(config) raised", code="TASK_FAILED"):
            made = function(dict(task.config))
    elif callable(function := getattr(module, "layers", None)):
        with _refused(task, "layers(config) raised", code="TASK_FAILED"):
            made = nn.Sequential(*[make() for make in function(dict(task.config))])
    if not isinstance(made, nn.Module):
        text = f"{task.module.name} has no model(config) that returns a torch.nn.Module"
        raise GeofedError("TASK_INVALID", text, hint="--task names the task module of the job")
    with safe_open(whole, "pt") as file:
        local = json.loads((file.metadata() or {}).get(_LOCAL_FACT, "[]"))
        absent = sorted(set(local) - set(file.keys()))
    if absent:
        text = f"the model lacks {clean(absent[0], 200)}, which stays in its region by `train.local`"
        raise GeofedError("MODEL_MISMATCH", text, hint="--region NAME takes a region's own model, which is whole")
    try:
        made.load_state_dict(load_file(whole))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = clean(f"the model of {task.module.name} is not that of the job: {' '.join(lines[1:2])}", _MESSAGE_BYTES)
        hint = "give the task folder as it was when the job was submitted"
        raise GeofedError("MODEL_MISMATCH", text, hint=hint) from None
    return made.eval()


def _examples(task: TaskCopy, module: ModuleType, inputs: Sequence[Input]) -> tuple[Tensor, ...]:
    import torch

    if inputs:
        return tuple(torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in inputs)
    function = getattr(module, _EXAMPLE, None)
    if not callable(function):
        hint = f"give it, as --input 1x1x28x28 or --input 1x128:int64, or define {_EXAMPLE}(config) in the task module"
        raise GeofedError("USAGE", "the shape of the model's input is not known", hint=hint)
    with _refused(task, f"{_EXAMPLE}(config) raised", code="TASK_FAILED"):
        found = function(dict(task.config))
    examples = tuple(found) if isinstance(found, tuple | list) else (found,)
    if not examples or not all(isinstance(one, torch.Tensor) for one in examples):
        raise GeofedError("TASK_INVALID", f"{_EXAMPLE}(config) returned no tensor, nor a tuple of tensors")
    return examples


def _traced(
    task: TaskCopy, model: nn.Module, examples: tuple[Tensor, ...], source: str
) -> tuple[ExportedProgram, bool]:
    """Trace a model. Return whether the first dimension of its inputs is of any size."""
    import torch
    from torch.export import Dim, export

    shapes = ", ".join(f"{'x'.join(map(str, one.shape))}:{_dtype(one)}" for one in examples)
    sizes = {one.shape[0] if one.dim() else None for one in examples}
    with torch.no_grad():
        hint = f"{source} states the inputs in the order of forward, each with the batch as its first dimension"
        with _refused(task, f"the model does not take an input of {shapes}", code="USAGE", hint=hint), _silent():
            model(*examples)
        program, is_dynamic = None, False
        if len(sizes) == 1 and None not in sizes:
            # torch.export takes a size of 1 for a constant.
            more = tuple(torch.cat([one, one]) if sizes == {1} else one for one in examples)
            batch = Dim("batch")
            try:
                with _silent():
                    program = export(model, more, dynamic_shapes=tuple({0: batch} for _ in more), strict=False)
                is_dynamic = True
            except (Exception, SystemExit):  # noqa: BLE001 - the reason, if it is not the batch, is told below
                program = None
        if program is None:
            with _refused(task, "the model cannot be exported", hint=_NOT_EXPORTED), _silent():
                program = export(model, examples, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has paths of this machine
    return program, is_dynamic


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
