"""A task's imports: its own modules first, as `python task.py` has it, and nothing of them for anybody else."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from support.jobs import LINEAR_TASK, pack

import sync
from geofed_pb.errors import GeofedError
from geofed_pb.user_code.modules import drop_task_modules
from region_agent.worker.task import TaskModule, load_task, unpack


def _load(tmp_path: Path, files: dict[str, str], module: str = "task.py") -> TaskModule:
    return load_task(unpack(pack(files), tmp_path), module, {})


def _found(task: TaskModule) -> object:
    """What the task's `loss` looks up, at run time."""
    return task.functions["loss"](None, None)


def _task(imports: str, found: str) -> str:
    return f"{imports}\ndef model(config): ...\ndef dataset(*_): ...\ndef loss(model, batch):\n    return {found}\n"


@pytest.mark.parametrize("name", ["scheduler", "sync", "region_agent", "tests", "deploy", "control_plane", "proto"])
@pytest.mark.parametrize("kind", ["a file", "a package", "a folder"])
def test_a_module_called_like_one_of_ours_is_the_tasks(tmp_path: Path, name: str, kind: str) -> None:
    place = {"a file": f"{name}.py", "a package": f"{name}/__init__.py", "a folder": f"{name}/part.py"}[kind]
    what = f"{name}.part" if kind == "a folder" else name
    ours = sys.modules.get(name)
    task = _load(tmp_path, {"task.py": _task(f"from {what} import VALUE", "VALUE"), place: "VALUE = 'own'"})
    assert _found(task) == "own"
    assert sys.modules.get(name) is ours


def test_our_own_later_imports_are_ours(tmp_path: Path) -> None:
    files = {"sync/__init__.py": "1 / 0", "scheduler.py": "1 / 0", "region_agent.py": "1 / 0", "redis.py": "1 / 0"}
    _load(tmp_path, {"task.py": LINEAR_TASK, **files})
    for name in ("sync.framing", "scheduler", "redis", "region_agent.worker.training.rounds"):
        kept = sys.modules.pop(name, None)
        again = importlib.import_module(name)
        assert str(tmp_path) not in str(again.__file__)
        if kept is not None:
            sys.modules[name] = kept
    from sync import channel

    assert channel is sync.channel


@pytest.mark.parametrize("name", ["json", "statistics", "profile", "numpy", "yaml", "redis"])
def test_a_module_called_like_a_library_is_the_tasks_alone(tmp_path: Path, name: str) -> None:
    files = {f"{name}.py": "VALUE = 'own'", "other.py": f"import {name}\nVALUE = {name}.VALUE"}
    task = _load(tmp_path, {"task.py": _task(f"import {name}, other", f"({name}.VALUE, other.VALUE)"), **files})
    assert _found(task) == ("own", "own")
    assert not hasattr(importlib.import_module(name), "VALUE")
    assert json.loads("1") == 1


def test_what_is_built_into_python_cannot_be_replaced(tmp_path: Path) -> None:
    files = {"time.py": "1 / 0", "os.py": "1 / 0"}
    task = _load(tmp_path, {"task.py": _task("import time, os", "time.sleep and os.sep"), **files})
    assert _found(task) == os.sep


def test_a_folder_of_data_called_like_a_library_hides_nothing(tmp_path: Path) -> None:
    task = _load(tmp_path, {"task.py": _task("import json", "json.loads('2')"), "json/data.txt": "x"})
    assert _found(task) == 2


def test_imports_in_functions_and_by_name_find_the_same(tmp_path: Path) -> None:
    files = {
        "task.py": _task("import importlib\nimport helper, sync", "(late(), [importlib.import_module(n) for n in N])")
        + "N = ['helper', 'sync', 'sync.deep', 'json']\n"
        + "def late():\n    import sync.deep\n    import helper as h\n    from sync import deep\n"
        + "    return h is helper and sync.deep is deep and deep.VALUE\n",
        "helper.py": "",
        "sync/__init__.py": "",
        "sync/deep.py": "VALUE = 3",
    }
    late, (helper, own_sync, deep, plain_json) = _found(_load(tmp_path, files))  # type: ignore[misc]
    assert late == 3
    assert (helper, own_sync.deep) == (sys.modules["helper"], deep)
    assert own_sync is not sync
    assert plain_json is json


# Where modules are looked for


def test_a_module_in_a_folder_finds_its_neighbours_and_the_root(tmp_path: Path) -> None:
    imports = "import helper, common, src.helper\nfrom . import helper as near\nfrom ..common import VALUE"
    files = {
        "src/task.py": _task(imports, "(helper.VALUE, common.VALUE, src.helper.VALUE, VALUE, near is helper)"),
        "src/helper.py": "VALUE = 1",
        "common.py": "VALUE = 2",
        "helper.py": "VALUE = 'hidden by the neighbour'",
    }
    assert _found(_load(tmp_path, files, "src/task.py")) == (1, 2, 1, 2, True)


@pytest.mark.parametrize(
    "line",
    [
        "from .helper import VALUE",
        "from . import helper; VALUE = helper.VALUE",
        "from .parts import VALUE",
        "from .parts.deep import VALUE",
        "from .parts.deep.below import VALUE",
        "from .spread.part import VALUE",
        "from .sync import VALUE",
        "from .sync.inner import VALUE",
        "from .types import VALUE",
        "from .time import VALUE",
        "from . import VALUE",
    ],
)
def test_relative_imports(tmp_path: Path, line: str) -> None:
    files = {
        "__init__.py": "VALUE = 7",
        "helper.py": "VALUE = 7",
        "parts/__init__.py": "from .one import VALUE",
        "parts/one.py": "from ..helper import VALUE",
        "parts/deep/__init__.py": "from ..one import VALUE",
        "parts/deep/below.py": "from ...helper import VALUE",
        "spread/part.py": "from .other import VALUE",
        "spread/other.py": "from .. import helper\nVALUE = helper.VALUE",
        "sync/__init__.py": "from .inner import VALUE",
        "sync/inner.py": "from ..helper import VALUE\nimport helper\nassert helper.VALUE is VALUE",
        "types.py": "VALUE = 7",
        "time.py": "VALUE = 7",
    }
    assert _found(_load(tmp_path, {"task.py": _task(line, "VALUE"), **files})) == 7


def test_a_module_is_loaded_once_however_it_is_imported(tmp_path: Path) -> None:
    imports = "import helper, task\nfrom . import helper as near\nfrom .helper import one"
    helper = "import task\nmade = []\nmade.append(1)\ndef one(): return task"
    files = {"task.py": _task(imports, "(helper is near, one() is task, helper.made, loss is task.loss)")}
    assert _found(_load(tmp_path, files | {"helper.py": helper})) == (True, True, [1], True)


@pytest.mark.parametrize(
    "line", ["from .nowhere import x", "from .json import x", "from . import nowhere", "import q.r"]
)
def test_what_is_not_there_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    before = sys.modules.get("task")
    with pytest.raises(GeofedError, match=r"import raised \w+: .* at task\.py:2") as raised:
        _load(tmp_path, {"task.py": _task(f"# one\n{line}", "0")})
    assert raised.value.code == "TASK_FAILED"
    assert sys.modules.get("task") is before


def test_a_folder_that_the_task_adds_to_the_path(tmp_path: Path) -> None:
    imports = "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), 'lib'))\nimport extra, sync"
    files = {"lib/extra.py": "VALUE = 1", "lib/sync.py": "VALUE = 2"}
    before = list(sys.path)
    task = _load(tmp_path, {"task.py": _task(imports, "(extra.VALUE, sync.VALUE)"), **files})
    assert _found(task) == (1, 2)
    drop_task_modules()
    assert sys.path == before
    assert "extra" not in sys.modules


# Tasks one after the other


def test_no_task_sees_modules_of_another(tmp_path: Path) -> None:
    def files(value: int) -> dict[str, str]:
        return {
            "task.py": _task("import helper, parts.deep, spread.part, json", "[m.VALUE for m in ALL]")
            + "ALL = helper, parts.deep, spread.part, json\n",
            **dict.fromkeys(("helper.py", "parts/deep.py", "spread/part.py", "json.py"), f"VALUE = {value}"),
            "parts/__init__.py": "",
        }

    cwd, path, modules = os.getcwd(), list(sys.path), set(sys.modules)
    for value in (1, 2, 1):
        assert _found(_load(tmp_path, files(value))) == [value] * 4
    with pytest.raises(GeofedError, match="No module named 'helper'"):
        _load(tmp_path, {"task.py": _task("import helper", "0")})
    drop_task_modules()
    assert (os.getcwd(), sys.path) == (cwd, path)
    assert not {"helper", "parts", "spread", "task", "geofed_task"} & (set(sys.modules) - modules)


# What looks modules up by their names


def test_data_classes_and_pickles(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Point:\n    x: int\n    unit: ClassVar[str] = 'm'\n"
    )
    imports = text + "import sync, helper\nfrom dataclasses import fields"
    files = {"task.py": _task(imports, "[Point, sync.Point, helper.Point]"), "sync.py": text, "helper.py": text}
    for point in _found(_load(tmp_path, files)):  # type: ignore[attr-defined]
        assert list(point.__dataclass_fields__) == ["x", "unit"]
        assert repr(point(1)) == "Point(x=1)"
        assert pickle.loads(pickle.dumps(point(2))) == point(2)


@pytest.mark.processes
def test_processes_that_load_data_have_the_tasks_modules(tmp_path: Path) -> None:
    helper = (
        "from dataclasses import dataclass\n@dataclass\nclass Item:\n    x: int\n"
        "class Items:\n    def __len__(self): return 4\n    def __getitem__(self, i):\n"
        "        import deploy\n        return Item(deploy.VALUE + i)\n"
    )
    imports = "from sync import Items\nfrom torch.utils.data import DataLoader"
    loaded = "[b[0].x for b in DataLoader(Items(), batch_size=1, num_workers=2, collate_fn=list)]"
    files = {"task.py": _task(imports, loaded), "sync.py": helper, "deploy.py": "VALUE = 10"}
    assert _found(_load(tmp_path, files)) == [10, 11, 12, 13]


# Files


def test_files_are_opened_from_the_task_folder(tmp_path: Path) -> None:
    imports = "from pathlib import Path\nWORDS = Path('words.txt').read_text()\nfrom helper import MORE"
    files = {
        "src/task.py": _task(imports, "[WORDS, MORE, Path('words.txt').read_text()]"),
        "src/helper.py": "from pathlib import Path\nMORE = Path('lists/more.txt').read_text()",
        "words.txt": "no yes",
        "lists/more.txt": "maybe",
    }
    assert _found(_load(tmp_path, files, "src/task.py")) == ["no yes", "maybe", "no yes"]


def test_what_a_task_writes_is_not_there_for_the_next(tmp_path: Path) -> None:
    text = "from pathlib import Path\nwith open('words.txt', 'a') as out:\n    out.write(' more')"
    files = {"task.py": _task(text, "Path('words.txt').read_text()"), "words.txt": "one"}
    for _ in range(2):
        assert _found(_load(tmp_path, files)) == "one more"


def test_the_place_of_an_error_is_the_users_own_line(tmp_path: Path) -> None:
    files = {"src/task.py": LINEAR_TASK + "from sync import broken\n\n\ndef model(config):\n    return broken()\n"}
    task = _load(tmp_path, files | {"src/sync.py": "def broken():\n    1 / 0\n"}, "src/task.py")
    with pytest.raises(GeofedError, match=r"model raised ZeroDivisionError: division by zero at src/sync\.py:2"):
        task.model()


def test_models_of_the_tasks_own_classes_are_saved_and_read_again(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Net(nn.Linear):\n    pass\n"
    task = _load(tmp_path, {"task.py": _task("from utils import Net", "Net(1, 1)"), "utils.py": text})
    model = _found(task)
    torch.save(model, tmp_path / "model.pt")
    assert type(torch.load(tmp_path / "model.pt", weights_only=False)) is type(model)
