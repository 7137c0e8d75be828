"""The user's task folder: unpacked without trust, loaded without getting in anybody's way."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
import torch
from support.jobs import LINEAR_TASK, pack

from geofed_pb.errors import GeofedError
from region_agent.worker import task as module
from region_agent.worker.task import load_task, unpack


def _load(tmp_path: Path, files: dict[str, str], name: str = "task.py") -> module.TaskModule:
    return load_task(unpack(pack(files), tmp_path), name, {"a": 1})


def test_a_task_is_found_with_its_other_files(tmp_path: Path) -> None:
    task = _load(tmp_path, {"task.py": "from parts import *\n", "parts/__init__.py": LINEAR_TASK})
    assert sum(p.numel() for p in task.model().parameters()) == 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n1 / 0\n", "import raised ZeroDivisionError: division by zero at task.py:2 (1 / 0)"),
        ("x = 1\n\nif x\n", "import raised SyntaxError: expected ':' (task.py, line 3) at task.py:3 (if x)"),
        (
            "import nowhere\n",
            "import raised ModuleNotFoundError: No module named 'nowhere' at task.py:1 (import nowhere)",
        ),
        (
            "import part\n",
            "import raised ValueError: deep at part.py:2 (raise ValueError('deep')), called at part.py:3 (f()), "
            "called at task.py:1 (import part)",
        ),
        ("import sys\nsys.exit(3)\n", "import raised SystemExit: 3 at task.py:2 (sys.exit(3))"),
    ],
)
def test_errors_name_the_users_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(GeofedError) as raised:
        _load(tmp_path, {"task.py": text, "part.py": "def f():\n    raise ValueError('deep')\nf()\n"})
    assert raised.value.code == "TASK_FAILED"
    assert raised.value.message == says
    assert raised.value.hint.startswith("install nowhere") == ("nowhere" in text)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(GeofedError, match=r"task\.py does not define loss"):
        _load(tmp_path, {"task.py": "def model(config): ...\n"})


@pytest.mark.parametrize("name", ["other.py", "../outside.py", "/etc/hostname", "task"])
def test_a_module_outside_of_the_folder_is_not_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.py").write_text(LINEAR_TASK)
    with pytest.raises(GeofedError, match="there is no task module"):
        _load(tmp_path, {"task.py": LINEAR_TASK}, name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def model(config): return 1", "returned int, not a torch.nn.Module"),
        ("def dataset(uri, split, config): return iter([])", "something with a length and items"),
        ("def optimizer(parameters, config): return None", "must return a torch.optim.Optimizer"),
        (
            "def optimizer(parameters, config): return torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])",
            "the step of LBFGS takes a closure",
        ),
        (
            "def model(config):\n    import warnings\n    warnings.simplefilter('ignore')\n"
            "    return torch.jit.script(nn.Linear(4, 2))",
            "returned a ScriptModule, which cannot be trained",
        ),
        ("def loss(model, batch): return 1.0", "returned a float, not a tensor of one element"),
    ],
)
def test_functions_that_return_something_else_are_refused(tmp_path: Path, text: str, says: str) -> None:
    task = _load(tmp_path, {"task.py": f"{LINEAR_TASK}\n{text}\n"})
    calls = {
        "model": task.model,
        "dataset": lambda: task.dataset("", "train"),
        "optimizer": lambda: task.optimizer([]),
        "loss": lambda: task.loss(torch.nn.Linear(1, 1), None),
    }
    with pytest.raises(GeofedError, match=says) as raised:
        calls[text.split()[1].split("(")[0]]()
    assert raised.value.code == "TASK_INVALID"
    assert "must define" not in str(raised.value.hint), "it defines them all"


def test_a_function_that_calls_itself_for_ever_is_told_once(tmp_path: Path) -> None:
    task = _load(tmp_path, {"task.py": f"{LINEAR_TASK}\ndef loss(model, batch): return loss(model, batch)\n"})
    with pytest.raises(GeofedError, match="RecursionError") as raised:
        task.loss(torch.nn.Linear(1, 1), None)
    assert raised.value.message.count("task.py:") == 1


# What is not trusted


def _archive(*members: tarfile.TarInfo, content: bytes = b"") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(content) if member.isfile() else None)
    return packed.getvalue()


def _member(name: str, kind: bytes = tarfile.REGTYPE, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    for field, value in fields.items():
        setattr(member, field, value)
    return member


@pytest.mark.parametrize(
    "member",
    [
        _member("link", tarfile.SYMTYPE, linkname="/etc/passwd"),
        _member("link", tarfile.LNKTYPE, linkname="task.py"),
        _member("pipe", tarfile.FIFOTYPE),
        _member("device", tarfile.CHRTYPE),
        _member("/etc/geofed"),
        _member("../outside"),
        _member("a/../../outside"),
    ],
)
def test_what_could_leave_the_folder_is_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with pytest.raises(GeofedError) as raised:
        unpack(_archive(_member("task.py"), member), tmp_path / "into")
    assert raised.value.code == "TASK_INVALID"
    assert {path.name for path in tmp_path.iterdir()} <= {"into"}


def test_a_bomb_is_refused_before_it_goes_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1 << 20)
    bomb = _archive(_member("zeros", size=1 << 24), content=bytes(1 << 24))
    assert len(bomb) < 1 << 16
    with pytest.raises(GeofedError) as raised:
        unpack(bomb, tmp_path)
    assert raised.value.code == "LIMIT_EXCEEDED"
    assert not list(tmp_path.iterdir())


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 3)
    with pytest.raises(GeofedError) as raised:
        unpack(_archive(*(_member(str(number)) for number in range(4))), tmp_path)
    assert raised.value.code == "LIMIT_EXCEEDED"


@pytest.mark.parametrize("bundle", [b"", b"no archive", pack({"task.py": LINEAR_TASK})[:-40]])
def test_a_damaged_bundle_is_told(tmp_path: Path, bundle: bytes) -> None:
    with pytest.raises(GeofedError, match="cannot be read") as raised:
        unpack(bundle, tmp_path)
    assert raised.value.code == "TASK_INVALID"


def test_each_bundle_is_unpacked_into_a_folder_of_its_own(tmp_path: Path) -> None:
    """What a job writes there is not there for the next one with the same code."""
    bundle = pack({"task.py": LINEAR_TASK, "a/b/c.txt": "x"})
    folder = unpack(bundle, tmp_path)
    (folder / "a/b/c.txt").write_text("changed")
    again = unpack(bundle, tmp_path)
    assert (again / "a/b/c.txt").read_text() == "x"
    assert again != folder
