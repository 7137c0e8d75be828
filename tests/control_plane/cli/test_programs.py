"""A model as a program, which runs without the model's class: as torch.export saves it, and as ONNX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from control_plane.cli.commands.export._program import Input, TaskCopy, find_packages, write_program
from geofed_pb.errors import GeofedError
from tests.control_plane.cli.conftest import Run

CONVOLUTION = """
import torch
from .parts import norm  # a file beside it

def model(config):
    print("made")
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, config["width"], 3), norm(config["width"]), torch.nn.ReLU(), torch.nn.Dropout(0.5),
        torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(4 * config["width"], 10),
    )
"""
TRANSFORMER = """
import torch
from torch import nn

class Transformer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, width), nn.Parameter(torch.randn(32, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True)
        self.encoder, self.scores = nn.TransformerEncoder(layer, 2), nn.Linear(width, 50)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.scores(self.encoder(self.tokens(x) + self.places[: x.shape[1]], mask=mask, is_causal=True))

def model(config):
    return Transformer(config["width"])

def example_input(config):
    return torch.zeros(1, 16, dtype=torch.int64)
"""
BRANCHING = """
import torch

class Branching(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

def model(config):
    return Branching(4, 4)
"""
FIXED = """
import torch

class Fixed(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(4))

def model(config):
    return Fixed(4, 4)
"""
LAYERS = """
import torch

def layers(config):
    return [lambda: torch.nn.Linear(4, 4)] * 2
"""
RUN = """
import json, sys
import numpy as np

file, *batches = sys.argv[1:]
inputs = [np.load(batch) for batch in batches]
if file.endswith(".onnx"):
    import onnx
    from onnx.reference import ReferenceEvaluator

    onnx.checker.check_model(file)
    program = ReferenceEvaluator(file)
    outputs = [program.run(None, {program.input_names[0]: batch})[0] for batch in inputs]
    assert "torch" not in sys.modules
else:
    import torch

    program = torch.export.load(file).module()
    outputs = [program(torch.from_numpy(batch)).detach().numpy() for batch in inputs]
assert not {name.partition(".")[0] for name in sys.modules} & {"geofed", "control_plane", "geofed_pb", "task", "parts"}
for batch, output in zip(batches, outputs):
    np.save(batch + ".out.npy", output)
"""
FORMS = {"torch-export": ".pt2", "onnx": ".onnx"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "task"
    made.mkdir()
    (made / "parts.py").write_text("import torch\nnorm = torch.nn.BatchNorm2d\n")
    return made


def trained(folder: Path, code: str, batch: torch.Tensor | None = None) -> tuple[TaskCopy, torch.nn.Module, Path]:
    """A task in a folder, its model after some steps in training mode, and the model's file."""
    (folder / "task.py").write_text(code)
    names: dict[str, Any] = {"__name__": "task"}
    exec(code.replace("from .parts import norm", "from torch.nn import BatchNorm2d as norm"), names)
    task = TaskCopy.find(folder, "task.py", {"width": 8})
    torch.manual_seed(0)
    if "model" in names:
        model: torch.nn.Module = names["model"](task.config)
    else:
        model = torch.nn.Sequential(*[make() for make in names["layers"](task.config)])
    for _ in range(3 if batch is not None else 0):
        model(batch)
    whole = folder.parent / "whole"
    save_file(model.state_dict(), whole)
    return task, model.eval(), whole


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("net", ["convolution", "transformer"])
def test_a_program_gives_the_outputs_of_the_model_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], net: str, form: str
) -> None:
    if form == "onnx":
        pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    torch.manual_seed(1)
    if net == "convolution":
        batches = [3 * torch.randn(size, 1, 9, 9) + 1 for size in (1, 5)]
        task, model, whole = trained(folder, CONVOLUTION, batches[1])
        inputs, shape = [Input.parse("1x1x9x9")], "Nx1x9x9:float32"
    else:
        batches = [torch.randint(50, (size, 16)) for size in (1, 5)]
        task, model, whole = trained(folder, TRANSFORMER)
        inputs, shape = [], "Nx16:int64"
    target = tmp_path / f"model{FORMS[form]}"
    before, paths = os.getcwd(), list(sys.path)
    capsys.readouterr()
    told = write_program(whole, target, task, inputs, as_onnx=form == "onnx")
    assert (told["inputs"], told["bytes"]) == ([shape], target.stat().st_size)
    assert (os.getcwd(), sys.path, "parts" in sys.modules) == (before, paths, False)
    assert capsys.readouterr() == ("", "made\n" if net == "convolution" else "")
    assert str(tmp_path).encode() not in target.read_bytes(), "it names folders of this machine"
    assert {path.name for path in tmp_path.iterdir()} == {"task", "whole", target.name}
    for number, batch in enumerate(batches):
        np.save(tmp_path / f"{number}.npy", batch.numpy())
    files = [str(tmp_path / f"{number}.npy") for number in range(len(batches))]
    ran = subprocess.run(
        [sys.executable, "-I", "-c", RUN, str(target), *files], cwd="/", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for file, batch in zip(files, batches, strict=True):
        np.testing.assert_allclose(np.load(f"{file}.out.npy"), model(batch).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_batch_that_cannot_be_of_any_size_is_told(folder: Path, tmp_path: Path) -> None:
    task, model, whole = trained(folder, FIXED)
    told = write_program(whole, tmp_path / "model.pt2", task, [Input((1, 4))])
    assert told["inputs"] == ["1x4:float32"]
    batch = torch.randn(1, 4)
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(batch), model(batch))


def test_a_model_of_layers_is_written(folder: Path, tmp_path: Path) -> None:
    task, model, whole = trained(folder, LAYERS)
    assert write_program(whole, tmp_path / "model.pt2", task, [Input((2, 4))])["inputs"] == ["Nx4:float32"]
    batch = torch.randn(3, 4)
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(batch), model(batch))


@pytest.mark.slow
def test_a_file_called_as_a_library_is_the_tasks_alone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    for name in ("onnx", "onnxscript", "onnx_ir"):
        (folder / f"{name}.py").write_text("WIDTH = 4\n")
    task, _, whole = trained(folder, "import torch\ndef model(config):\n    return torch.nn.Linear(4, 4)\n")
    with (folder / "task.py").open("a") as file:
        file.write("from onnx import WIDTH\n")
    told = write_program(whole, tmp_path / "model.onnx", task, [Input((2, 4))], as_onnx=True)
    assert told["inputs"] == ["Nx4:float32"]


@pytest.mark.parametrize(
    ("code", "shape", "error", "says"),
    [
        ("import sys\nsys.exit(0)", "1x4", "TASK_FAILED", r"task.py raised: SystemExit: 0 at task.py:2$"),
        ("def model(config):\n    raise SystemExit", "1x4", "TASK_FAILED", r"raised: SystemExit: +at task.py:2$"),
        (BRANCHING, "1x4", "TASK_INVALID", r"the model cannot be exported: \w+: Could not guard .+ at task.py:7$"),
        (BRANCHING, "1x5", "USAGE", r"does not take an input of 1x5:float32: RuntimeError: mat1 .+ at task.py:6$"),
        (BRANCHING, None, "USAGE", "the shape of the model's input is not known"),
        ("import nowhere", "1x4", "TASK_FAILED", r"task.py raised: ModuleNotFoundError: .*nowhere' at task.py:1$"),
        (
            "def model(config):\n    return config['size']",
            "1x4",
            "TASK_FAILED",
            r"raised: KeyError: 'size' at task.py:2",
        ),
        ("model = dict", "1x4", "TASK_INVALID", r"has no model\(config\) that returns a torch.nn.Module"),
        (LAYERS, "1x4", "MODEL_MISMATCH", r'is not that of the job: Missing key\(s\) in state_dict: "0.weight"'),
        (f"{BRANCHING}\ndef example_input(config):\n    return 4", None, "TASK_INVALID", "returned no tensor"),
    ],
)
def test_what_cannot_be_written_is_told_in_a_sentence(
    folder: Path, tmp_path: Path, code: str, shape: str | None, error: str, says: str
) -> None:
    task, _, whole = trained(folder, BRANCHING)
    task.module.write_text(code)
    with pytest.raises(GeofedError, match=says) as raised:
        write_program(whole, tmp_path / "model.pt2", task, [Input.parse(shape)] if shape else [])
    assert raised.value.code == error
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.parametrize("text", ["", "1x", "0x4", "1x4:float31", "1x4:float32:", "x4", "1x1000000000", "99999x99999"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(GeofedError, match="--input") as raised:
        Input.parse(text)
    assert raised.value.code == "USAGE"


def test_a_task_is_found_in_its_folder_only(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "task.py").touch()
    (folder.parent / "other.py").touch()
    for place in (folder, folder / "sub" / "task.py"):
        found = TaskCopy.find(place, "sub/task.py", {})
        assert (found.root, found.module) == (folder, folder / "sub" / "task.py")
    assert TaskCopy.find(folder.parent / "other.py", "sub/task.py", {}).root == folder.parent
    for module in ("../other.py", str(folder.parent / "other.py"), "none.py", "sub"):
        with pytest.raises(GeofedError, match="there is no task module"):
            TaskCopy.find(folder, module, {})


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(GeofedError, match="--as onnx needs onnx and onnxscript, which are not installed") as raised:
        find_packages("torch", "onnx", "onnxscript", option="onnx", extra="onnx")
    assert "pip install '.[onnx]'" in str(raised.value.hint)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--as", "onnx"), "--as onnx needs --task"),
        (("--as", "torch-export", "--task", ".", "--input", "1y2"), "invalid value '1y2' for --input"),
        (("--task", "."), "--task and --input are for"),
        (("--as", "hub", "--input", "1x2"), "--task and --input are for"),
    ],
)
def test_options_are_checked_before_anything_is_asked(run: Run, options: tuple[str, ...], says: str) -> None:
    ran = run("export", "none", *options, "-o", "json")
    assert (ran.status, says in ran.error["message"]) == (2, True), ran.err


@pytest.mark.processes
def test_the_commands_start_without_torch() -> None:
    code = "import json, sys; import control_plane.cli.commands.export._program; print(json.dumps(list(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "onnx", "numpy", "safetensors"} & set(json.loads(ran.stdout))
