"""Options of `export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["As", "ChosenRound", "ExportKind", "Inputs", "OfRegion", "OutputFile", "TaskFolder"]


class ExportKind(StrEnum):
    """What `export` writes."""

    WHOLE = "whole"
    TRAINED = "trained"
    PEFT = "peft"
    STATE_DICT = "state-dict"
    HUB = "hub"
    TORCH_EXPORT = "torch-export"
    ONNX = "onnx"

    @property
    def is_folder(self) -> bool:
        """Whether it is several files."""
        return self in (ExportKind.PEFT, ExportKind.HUB)

    @property
    def is_program(self) -> bool:
        """Whether it is made of the task's model, and runs without its class."""
        return self in (ExportKind.TORCH_EXPORT, ExportKind.ONNX)

    @property
    def ending(self) -> str:
        """Of the file's name, if none is given."""
        return _ENDINGS.get(self, ".safetensors")


_ENDINGS = {ExportKind.STATE_DICT: ".pt", ExportKind.TORCH_EXPORT: ".pt2", ExportKind.ONNX: ".onnx"}


OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output-file",
        metavar="FILE",
        help="File to write; default: JOB.safetensors. With `--as peft` and `hub` a folder; default: JOB.",
        show_default=False,
    ),
]

ChosenRound = Annotated[
    str | None,
    typer.Option(
        "--round",
        metavar="N|best",
        help="The model of a kept round, or the best one by `train.best`; default: the last one.",
        show_default=False,
    ),
]

OfRegion = Annotated[
    str | None,
    typer.Option(
        "--region",
        metavar="NAME",
        help="A region's own model, of a job with `train.local`: that of its last evaluation. Also as a program.",
        show_default=False,
    ),
]

As = Annotated[
    ExportKind,
    typer.Option(
        "--as",
        help="`whole` model; what was `trained`, such as an adapter; a LoRA adapter in the layout of `peft`, into "
        "a folder; a `state-dict` for `torch.load`; a folder for a model `hub`, with a model card; or a program "
        "that runs without the task module: `torch-export` or `onnx`.",
    ),
]

TaskFolder = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="FOLDER|FILE",
        help="For `torch-export` and `onnx`: your folder of the job file, or the task module. It is run here.",
        show_default=False,
    ),
]

Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE[:DTYPE]",
        help="For `torch-export` and `onnx`: an input of the model, batch first, as 1x1x28x28 or 1x128:int64; "
        "repeatable. Default: `example_input(config)` of the task module.",
        show_default=False,
    ),
]
