"""Unpacks, loads and checks the user's task module."""

from __future__ import annotations

import gzip
import inspect
import io
import itertools
import math
import operator
import shutil
import sys
import tarfile
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from geofed_pb.bounds import TEXT_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import disk_full_as_error
from geofed_pb.files.task_folder import LISTED, MAX_FILES, MAX_FOLDER_BYTES, MAX_UNPACKED_BYTES, Part, read_parts
from geofed_pb.user_code.modules import import_task
from geofed_pb.user_code.recording import log_losses
from region_agent.worker.data.streamed import Rows, Streamed
from region_agent.worker.invocation import Precision
from region_agent.worker.measures import measure
from sync.histograms import Histogram
from sync.pipeline import Layers, Taken

__all__ = ["TaskModule", "load_task", "task_errors", "task_fault", "unpack"]

_TYPES: dict[Precision, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type for autocast by the name of the precision; None: no autocast."""
_FUNCTIONS = ("model", "layers", "dataset", "loss", "metrics", "optimizer", "collate", "schedule", "on_round")
"""Functions of a task module."""
_NEEDED = ("model", "loss")
"""Functions that a task module that trains must define."""
_MOST_READ = 50_000_000
"""Most samples of an iterable dataset, so that an endless one is reported instead of filling the memory for ever."""
_MOST_WORKERS = 32
"""Most processes that make samples in a worker: more than a function has cores."""
_AHEAD, _MOST_AHEAD = 2, 64
"""Steps for which data with a format is read ahead: usually, and at most."""
_DEFAULT_LEARNING_RATE = 0.05
"""Learning rate of the default optimiser, SGD, where ``task.config.lr`` is not set."""
_SOURCE = 80
"""Characters of a source line that an error shows: such a line is usually recognised by its beginning."""
_CALLERS = 3
"""Lines of a traceback that an error shows besides the innermost one, which is mostly enough to find the cause."""
_PACKAGE_MISSING = (
    "install {} where the region's workers run, in the environment of `region-agent` or in the image of its functions, "
    "list it in a file of task.requirements, or put it into the task folder"
)
"""Hint of an error about a module that cannot be imported."""


@dataclass(frozen=True)
class TaskModule:
    """The functions of a task module, called with the task's configuration."""

    folder: Path
    config: dict[str, Any]
    functions: Mapping[str, Callable[..., Any]]
    """Those that the task module defines, by name."""
    precision: Precision = "fp32"
    """Precision in which losses and metrics are computed."""
    ahead: Any = _AHEAD
    """What the task module states as `prefetch`."""
    tokenizer: Any = None
    """What the task module states as `tokenizer`; None: nothing."""
    makers: Any = 0
    """What the task module states as `num_workers`."""

    def calling(self, doing: str) -> AbstractContextManager[None]:
        """Return the context for a call of user code, which turns its exceptions into errors: see `task_errors`."""
        return task_errors(self.folder, doing)

    def model(self, seed: int = 0) -> torch.nn.Module:
        """Create the whole model.

        Of a task that declares layers it is made of these, with values that depend only on ``seed``. Otherwise the
        values are drawn from torch's random generators.
        """
        if "model" not in self.functions:
            layers = self.layers(seed)
            with self.calling("layers"):
                return layers.stage(0, len(layers) - 1)
        with self.calling("model"):
            module = self.functions["model"](dict(self.config))
        if not isinstance(module, torch.nn.Module):
            raise GeofedError("TASK_INVALID", f"model(config) returned {type(module).__name__}, not a torch.nn.Module")
        if isinstance(module, torch.jit.ScriptModule):
            hint = "return the module that it was made of; `train.compile` compiles it"
            raise GeofedError(
                "TASK_INVALID", "model(config) returned a ScriptModule, which cannot be trained", hint=hint
            )
        return module

    def layers(self, seed: int) -> Layers:
        """Return the model as layers that can be created one by one.

        Raises ``GeofedError("TASK_INVALID")`` if the model is not a chain of layers.
        """
        if "layers" not in self.functions:
            with self.calling("model"):
                return Layers.of(lambda: self.functions["model"](dict(self.config)), seed)
        with self.calling("layers"):
            return Layers.declared(self.functions["layers"](dict(self.config)), seed)

    def streamed(self, rows: Rows, split: str) -> Streamed:
        """Return data that geofed reads itself, with what the task's `dataset` makes of its rows, if it defines one.

        Raises ``GeofedError("TASK_INVALID")``.
        """
        if self.tokenizer is not None:
            rows.use_tokenizer(self._tokenizer_file())
        items = self.dataset(rows, split) if "dataset" in self.functions else rows
        if len(items) != len(rows):
            text = f"dataset(...) returned {len(items):,} samples for {len(rows):,} rows"
            hint = "of data with a format, item i of what dataset returns must be made of row i; leave out by None"
            raise GeofedError("TASK_INVALID", text, hint=hint)
        return Streamed(rows, items, self.prefetch)

    def _tokenizer_file(self) -> Path:
        path = (self.folder / str(self.tokenizer)).resolve()
        if not path.is_relative_to(self.folder.resolve()) or not path.is_file():
            raise GeofedError("TASK_INVALID", f"there is no file {self.tokenizer} in the task folder: `tokenizer`")
        return path

    @property
    def prefetch(self) -> int:
        """Steps for which data is read ahead: `prefetch` of the task module.

        Raises ``GeofedError("TASK_INVALID")``.
        """
        return _number(self.ahead, "prefetch", "steps", _MOST_AHEAD)

    @property
    def num_workers(self) -> int:
        """Processes that make samples: `num_workers` of the task module; 0: none, the worker makes them itself.

        Raises ``GeofedError("TASK_INVALID")``.
        """
        return _number(self.makers, "num_workers", "processes", _MOST_WORKERS)

    def dataset(self, path: str | Rows, split: str) -> Any:
        """Call the task's `dataset`; returns what has a length and items. Raises ``GeofedError("TASK_INVALID")``.

        An ``IterableDataset`` is read to its end, and its samples are kept.
        """
        if "dataset" not in self.functions:
            text = "the task does not define dataset(uri, split, config), and the region states no format of its data"
            raise GeofedError("TASK_INVALID", text, hint="docs/data.md says which formats need no such function")
        with self.calling("dataset"):
            data = self.functions["dataset"](path, split, dict(self.config))
            if isinstance(data, IterableDataset):
                data = _read_out(data)
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise GeofedError("TASK_INVALID", "dataset(...) must return something with a length and items")
        with self.calling("the length of what dataset(...) returned"):
            len(data)
        return data

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """The task's `collate`; None: that of ``DataLoader``."""
        if "collate" not in self.functions:
            return None

        def collated(samples: list[Any]) -> Any:
            with self.calling("collate"):
                return self.functions["collate"](samples)

        return collated

    def on_round(self, module: torch.nn.Module, completed: int) -> None:
        """Call the task's `on_round`, if it defines one, with the model and the number of completed rounds."""
        if "on_round" in self.functions:
            with self.calling("on_round"), torch.no_grad():
                self.functions["on_round"](module, completed)

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Call the task's `loss`; returns a tensor of one element: of several losses the one that is minimised.

        Raises ``GeofedError("TASK_INVALID")``.
        """
        return self.losses(module, batch)["loss"]

    def training_loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Call the task's `loss` for a training step, as ``loss``; several losses are logged by their names."""
        named = self.losses(module, batch)
        parts = {name: one.detach() for name, one in named.items() if name != "loss" and not one.is_complex()}
        if parts:
            log_losses(parts)
        return named["loss"]

    def losses(self, module: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Call the task's `loss`; returns its losses by name, tensors of one element. What is minimised is "loss": the
        task's own of this name, or else their sum.

        Raises ``GeofedError("TASK_INVALID")``.
        """
        with self.calling("loss"), self._autocast():
            value = self.functions["loss"](module, batch)
        named = {str(name): one for name, one in value.items()} if isinstance(value, Mapping) else {"loss": value}
        for name, one in named.items() or [("", value)]:
            if not isinstance(one, torch.Tensor) or one.numel() != 1:
                which = f" as {name}" if one is not value else ""
                text = f"loss(model, batch) returned {_kind_of(one)}{which}, not a tensor of one element"
                raise GeofedError("TASK_INVALID", text, hint="return the mean as a tensor, without .item() or float()")
        if "loss" not in named:
            with self.calling("the sum of the losses"):
                named["loss"] = torch.stack([one.reshape(()) for one in named.values()]).sum()
        return named

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Create the task's optimiser; plain SGD with `task.config.lr` if the task defines none.

        Raises ``GeofedError("TASK_INVALID")``.
        """
        if "optimizer" not in self.functions:
            rate = self.config.get("lr", _DEFAULT_LEARNING_RATE)
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate >= 0:
                text = f"task.config.lr is {rate!r}, not a learning rate"
                raise GeofedError("TASK_INVALID", text, hint="state a number, or define optimizer(parameters, config)")
            return torch.optim.SGD(parameters, lr=rate)
        with self.calling("optimizer"):
            made = self.functions["optimizer"](parameters, dict(self.config))
        if not isinstance(made, torch.optim.Optimizer):
            raise GeofedError("TASK_INVALID", "optimizer(parameters, config) must return a torch.optim.Optimizer")
        if _needs_closure(made):
            text = f"the step of {type(made).__name__} takes a closure, which is not supported"
            raise GeofedError(
                "TASK_INVALID", text, hint="return an optimiser that steps with the gradients as they are"
            )
        return made

    def schedule(self, parameters: Iterable[torch.nn.Parameter]) -> LRScheduler | None:
        """Return the task's learning-rate scheduler; None: it defines none.

        Its optimiser is one over parameters like these without values. Raises ``GeofedError("TASK_INVALID")``.
        """
        if "schedule" not in self.functions:
            return None
        like = [torch.nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in parameters]
        optimizer = self.optimizer(iter(like))
        with self.calling("schedule"):
            made = self.functions["schedule"](optimizer, dict(self.config))
        if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
            text = (
                f"schedule(optimizer, config) returned {_kind_of(made)}, not a scheduler whose rate depends on the step"
            )
            hint = "return one of torch.optim.lr_scheduler, such as CosineAnnealingLR"
            raise GeofedError("TASK_INVALID", text, hint=hint)
        return made

    def metrics(
        self, module: torch.nn.Module, batches: Iterable[Any], sizes: Sequence[int] = ()
    ) -> dict[str, float | Histogram]:
        """Return the metrics of a part of the test data, each a mean over its samples, or a histogram of them.

        ``sizes``: samples of each batch; empty: all batches have the same size.
        """
        if "metrics" not in self.functions:
            losses = [{name: float(one) for name, one in self.losses(module, batch).items()} for batch in batches]
            weights = [size for size in sizes if size][: len(losses)] or [1] * len(losses)
            return {
                name: math.fsum(map(operator.mul, [one[name] for one in losses], weights)) / sum(weights)
                for name in (losses[0] if losses else ())
            }
        with self.calling("metrics"), self._autocast():
            found = self.functions["metrics"](module, batches)
            return {str(name): measure(str(name), value) for name, value in found.items()}

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _TYPES[self.precision]
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return nullcontext() if dtype is None else torch.autocast(kind, dtype)


def _number(stated: Any, name: str, what: str, most: int) -> int:
    if not isinstance(stated, int) or isinstance(stated, bool) or not 0 <= stated <= most:
        raise GeofedError("TASK_INVALID", f"{name} is {stated!r}, not a number of {what} up to {most}")
    return stated


def _read_out(data: Iterable[Any]) -> list[Any]:
    samples = list(itertools.islice(iter(data), _MOST_READ + 1))
    if len(samples) > _MOST_READ:
        raise GeofedError("TASK_INVALID", f"dataset(...) returned an iterable of more than {_MOST_READ:,} samples")
    return samples


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` cannot be called without arguments, as that of L-BFGS."""
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError:
        return True
    except ValueError:  # it has none, as some of compiled code
        return False
    return False


def _kind_of(value: Any) -> str:
    shaped = isinstance(value, torch.Tensor)
    return f"a tensor of shape {tuple(value.shape)}" if shaped else f"a {type(value).__name__}"


def unpack(
    bundle: bytes | memoryview, into: Path, pieces: Callable[[Part], Iterable[bytes | memoryview]] | None = None
) -> Path:
    """Unpack a task folder into a new folder below ``into``, so that no other job reads the files that the task writes.

    ``pieces`` returns the content of a file that the archive only lists.

    Raises ``GeofedError``, and removes the folder, if the archive cannot be read, has links or paths outside the
    folder, or exceeds the limits of size and number of files; and what ``pieces`` raises.
    """
    parts = read_parts(io.BytesIO(bundle))
    into.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="task-", dir=into))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        try:
            with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as archive:
                _extract(archive, folder, parts)
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise GeofedError("TASK_INVALID", f"the packed task folder cannot be read: {error}") from None
        for part in parts:
            if pieces is None:
                raise GeofedError("TASK_INVALID", f"{part.name} of the task folder is not there")
            with disk_full_as_error(folder):
                _write(part, folder, pieces(part))
        undo.pop_all()
    return folder


def _extract(archive: tarfile.TarFile, into: Path, parts: Sequence[Part]) -> None:
    """Extract names and contents only, and check each entry before its content is read. ``parts`` count as well."""
    total, most = 0, min(MAX_UNPACKED_BYTES, MAX_FOLDER_BYTES - sum(part.bytes for part in parts))
    for number, member in enumerate(archive, len(parts)):
        total += member.size
        if total > most or number >= MAX_FILES:
            text = f"the task folder unpacks to more than {most >> 20} MiB or {MAX_FILES} files"
            raise GeofedError("LIMIT_EXCEEDED", text)
        if member.name == LISTED:
            continue
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise GeofedError("TASK_INVALID", f"{member.name} is outside of the task folder")
        if not (member.isfile() or member.isdir()):
            raise GeofedError("TASK_INVALID", f"{member.name}: the task folder may hold files and folders only")
        path = into / name
        (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
        if (content := archive.extractfile(member)) is not None:
            path.write_bytes(content.read())


def _write(part: Part, into: Path, pieces: Iterable[bytes | memoryview]) -> None:
    path = into / part.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for piece in pieces:
                file.write(piece)
    except (FileExistsError, NotADirectoryError):
        raise GeofedError("TASK_INVALID", f"{part.name}: the task folder has this file twice") from None


def load_task(
    folder: Path,
    module: str,
    config: dict[str, Any],
    made: type[TaskModule] = TaskModule,
    needs: Sequence[str] = _NEEDED,
) -> TaskModule:
    """Import a task module; it replaces the task that is loaded in this process.

    ``made``: what is made of it. ``needs``: functions that it must define; `layers` does for `model`.

    The folder becomes the working directory. The task's own imports find files in it, and next to the module, before
    anything else; other code's imports never do (`geofed_pb.user_code.modules`). Raises
    ``GeofedError("TASK_INVALID")`` if the module is missing or incomplete, "TASK_FAILED" if it raises.
    """
    path = folder / module
    inside = path.resolve().is_relative_to(folder.resolve())
    if not (inside and path.is_file() and path.suffix == ".py"):
        raise GeofedError("TASK_INVALID", f"there is no task module {module}")
    with task_errors(folder, "import"):
        loaded = import_task(folder, module)
    functions = {name: function for name in _FUNCTIONS if callable(function := getattr(loaded, name, None))}
    # Whether dataset is needed depends on the region's data.
    missing = [name for name in needs if name not in functions and not (name == "model" and "layers" in functions)]
    if missing:
        raise GeofedError("TASK_INVALID", f"{module} does not define {', '.join(missing)}")
    return made(
        folder,
        config,
        functions,
        ahead=getattr(loaded, "prefetch", _AHEAD),
        tokenizer=getattr(loaded, "tokenizer", None),
        makers=getattr(loaded, "num_workers", 0),
    )


@contextmanager
def task_errors(folder: Path, doing: str) -> Iterator[None]:
    """Turn an exception of the user's code into TASK_FAILED, with the lines of the user's own files.

    ``doing`` names the call in the message.
    """
    try:
        yield
    except (GeofedError, MemoryError):
        raise
    except torch.OutOfMemoryError as error:
        text = f"the GPU ran out of memory in {doing}{_place(error, folder)}"
        raise GeofedError("GPU_MEMORY", text) from None
    except Taken:
        # Not an error: the stand-in for a model has recorded the input and ends the call this way.
        raise
    except BaseException as error:  # noqa: BLE001 - the user's code may raise anything
        raise task_fault(error, folder, doing) from None


def task_fault(error: BaseException, folder: Path, doing: str) -> GeofedError:
    """Return TASK_FAILED for an exception of the user's code, and print its traceback to the log."""
    try:
        traceback.print_exception(error, file=sys.stderr)
        message = str(error)
    except Exception:  # noqa: BLE001 - the __str__ of a user's exception class may fail
        message = "(its text cannot be printed)"
    # Shortened here, so that the place, which comes last, is always kept.
    text = clean(f"{doing} raised {type(error).__name__}: {message}", TEXT_BYTES // 2)
    hint = _PACKAGE_MISSING.format(error.name) if isinstance(error, ModuleNotFoundError) else None
    return GeofedError("TASK_FAILED", f"{text}{_place(error, folder)}", hint=hint)


def _place(error: BaseException, folder: Path) -> str:
    """Return the traceback in the user's own files, as " at FILE:LINE (SOURCE), called at FILE:LINE (SOURCE)".

    Empty if the error comes from none of their lines.
    """
    frames = [(frame.filename, frame.lineno, frame.line) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno, error.text))
    own = [frame for frame in frames if Path(frame[0]).is_relative_to(folder)]
    shown = [
        f"{Path(name).relative_to(folder)}:{line}" + (f" ({source.strip()[:_SOURCE]})" if source else "")
        for name, line, source in own
    ]
    # A function that calls itself for ever is told once.
    shown = [line for line, _ in itertools.groupby(shown)]
    return f" at {', called at '.join(shown[: -_CALLERS - 2 : -1])}" if shown else ""
