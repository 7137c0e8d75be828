"""The user's task module: unpacked, loaded and checked."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import shutil
import sys
import tarfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from geofed_pb.bounds import TEXT_BYTES, clean
from geofed_pb.errors import GeofedError
from sync.pipeline import Layers

__all__ = ["Task", "load_task", "task_errors", "unpack"]

_LARGEST_BUNDLE_BYTES = 64 << 20
_MOST_FILES = 10_000
_DEFAULT_LEARNING_RATE = 0.05
_GPU_TOO_SMALL = "a smaller batch, fewer workers on each GPU, or a plan that cuts the model into stages needs less"


@dataclass(frozen=True)
class Task:
    """The functions of a task module, with its configuration bound."""

    folder: Path
    config: dict[str, Any]
    _functions: Mapping[str, Callable[..., Any]]

    def model(self, seed: int = 0) -> torch.nn.Module:
        """The whole model. A task that declares layers has it made of them, with values that follow from the seed;
        otherwise they are drawn from the generators as they stand."""
        if "model" not in self._functions:
            layers = self.layers(seed)
            with task_errors(self.folder, "layers"):
                return layers.stage(0, len(layers) - 1)
        with task_errors(self.folder, "model"):
            module = self._functions["model"](dict(self.config))
        if not isinstance(module, torch.nn.Module):
            raise GeofedError("TASK_INVALID", f"model(config) returned {type(module).__name__}, not a torch.nn.Module")
        return module

    def layers(self, seed: int) -> Layers:
        """The model as layers that are made one by one; raises ``GeofedError("TASK_INVALID")`` where it cannot be."""
        if "layers" not in self._functions:
            with task_errors(self.folder, "model"):
                return Layers.of(lambda: self._functions["model"](dict(self.config)), seed)
        with task_errors(self.folder, "layers"):
            return Layers.declared(self._functions["layers"](dict(self.config)), seed)

    def dataset(self, path: str, split: str) -> Any:
        with task_errors(self.folder, "dataset"):
            data = self._functions["dataset"](path, split, dict(self.config))
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise GeofedError("TASK_INVALID", "dataset(...) must return something with a length and items")
        return data

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        with task_errors(self.folder, "loss"):
            value = self._functions["loss"](module, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            text = f"loss(model, batch) returned {_kind_of(value)}, not a tensor of one element"
            raise GeofedError("TASK_INVALID", text, hint="return the mean as a tensor, without .item() or float()")
        return value

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if "optimizer" not in self._functions:
            rate = float(self.config.get("lr", _DEFAULT_LEARNING_RATE))
            return torch.optim.SGD(parameters, lr=rate)
        with task_errors(self.folder, "optimizer"):
            made = self._functions["optimizer"](parameters, dict(self.config))
        if not isinstance(made, torch.optim.Optimizer):
            raise GeofedError("TASK_INVALID", "optimizer(parameters, config) must return a torch.optim.Optimizer")
        return made

    def metrics(self, module: torch.nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        """Of one part of the test data, each a mean over its samples."""
        if "metrics" not in self._functions:
            losses = [float(self.loss(module, batch)) for batch in batches]
            return {"loss": sum(losses) / len(losses)} if losses else {}
        with task_errors(self.folder, "metrics"):
            return {str(name): float(value) for name, value in self._functions["metrics"](module, batches).items()}


def _kind_of(value: Any) -> str:
    shaped = isinstance(value, torch.Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if shaped else f"a {type(value).__name__}"


def unpack(bundle: bytes | memoryview, into: Path) -> Path:
    """Unpack a task folder under its digest, once; refuses links, absolute paths and bombs."""
    folder = into / hashlib.sha256(bundle).hexdigest()[:16]
    if folder.exists():
        return folder
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as archive:
            _extract(archive, partial)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise GeofedError("TASK_INVALID", f"the packed task folder cannot be read: {error}") from None
    partial.rename(folder)
    return folder


def _extract(archive: tarfile.TarFile, into: Path) -> None:
    """Names and bytes only; what an entry claims is looked at before the next byte is read."""
    total = 0
    for number, member in enumerate(archive):
        total += member.size
        if total > _LARGEST_BUNDLE_BYTES or number >= _MOST_FILES:
            text = f"the task folder unpacks to more than {_LARGEST_BUNDLE_BYTES >> 20} MiB or {_MOST_FILES} files"
            raise GeofedError("LIMIT_EXCEEDED", text)
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise GeofedError("TASK_INVALID", f"{member.name} lies outside of the task folder")
        if not (member.isfile() or member.isdir()):
            raise GeofedError("TASK_INVALID", f"{member.name}: the task folder may hold files and folders only")
        place = into / name
        (place if member.isdir() else place.parent).mkdir(parents=True, exist_ok=True)
        if (content := archive.extractfile(member)) is not None:
            place.write_bytes(content.read())


def load_task(folder: Path, module: str, config: dict[str, Any]) -> Task:
    """Import a task module from its folder.

    The folder goes to the end of ``sys.path``, so that a file of the user's never hides a library's or ours.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    path = folder / module
    spec = importlib.util.spec_from_file_location("geofed_task", path)
    inside = path.resolve().is_relative_to(folder.resolve())
    if spec is None or spec.loader is None or not (inside and path.is_file()):
        raise GeofedError("TASK_INVALID", f"there is no task module {module}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["geofed_task"] = loaded
    with task_errors(folder, "import"):
        spec.loader.exec_module(loaded)
    functions = {
        name: function
        for name in ("model", "layers", "dataset", "loss", "metrics", "optimizer")
        if callable(function := getattr(loaded, name, None))
    }
    missing = [name for name in ("dataset", "loss") if name not in functions]
    if "model" not in functions and "layers" not in functions:
        missing.insert(0, "model")
    if missing:
        raise GeofedError("TASK_INVALID", f"{module} does not define {', '.join(missing)}")
    return Task(folder, config, functions)


@contextmanager
def task_errors(folder: Path, doing: str) -> Iterator[None]:
    """What the user's code raises becomes TASK_FAILED, named by the innermost line of the user's own files."""
    try:
        yield
    except (GeofedError, MemoryError):
        raise
    except torch.OutOfMemoryError as error:
        text = f"the GPU ran out of memory in {doing}{_place(error, folder)}"
        raise GeofedError("FUNCTION_OUT_OF_MEMORY", text, hint=_GPU_TOO_SMALL) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the user's code: anything may come
        traceback.print_exc(file=sys.stderr)
        # Where it was raised stands behind a message of any length.
        text = clean(f"{doing} raised {type(error).__name__}: {error}", TEXT_BYTES // 2)
        raise GeofedError("TASK_FAILED", f"{text}{_place(error, folder)}") from None


def _place(error: BaseException, folder: Path) -> str:
    """ " at FILE:LINE" of the user's file that an error came from, if it came from one."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    own = [(Path(name), line) for name, line in frames if Path(name).is_relative_to(folder)]
    return f" at {own[-1][0].relative_to(folder)}:{own[-1][1]}" if own else ""
