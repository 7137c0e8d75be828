"""`geofed.simulate` over the regions of a profile: what is refused before a process starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.running import TEMPLATES

import geofed
from geofed import _simulate

DATA = {split: (np.zeros((12, 1, 8, 8), np.float32), np.arange(12) % 3) for split in ("train", "test")}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return TEMPLATES / "image-classification"


def _refused(task: Path, data: Any, regions: Any) -> geofed.GeofedError:
    with pytest.raises(geofed.GeofedError) as caught:
        geofed.simulate(task, data, regions=regions)
    return caught.value


def test_an_unknown_profile_is_told_with_those_that_there_are(task: Path, tmp_path: Path) -> None:
    error = _refused(task, DATA, "china")
    assert error.code == "CONFIG_INVALID"
    assert "no profile 'china'; shipped are: china-eu-us-3, " in error.message
    (tmp_path / "mine.yaml").write_text("name: mine\nregions: [a, b]\n")
    assert f"{tmp_path / 'mine.yaml'}" in _refused(task, DATA, tmp_path / "mine.yaml").message


def test_a_machine_without_an_emulator_is_told_what_it_lacks(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.emulator._namespaces._search_path", lambda: [str(tmp_path)])
    error = _refused(task, DATA, "lan")
    assert error.code == "EMULATOR_UNSUPPORTED"
    assert (
        error.message == "the WAN of lan cannot be emulated: `ip` is not installed (packages iproute2 and util-linux)"
    )
    assert "give `regions` as a number" in error.hint


def test_data_of_a_region_that_the_profile_has_not_are_refused(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.emulator.Emulator.supported", lambda: None)
    files = dict.fromkeys(("train", "test"), tmp_path / "x.npz")
    error = _refused(task, {"shanghai": files, "lyon": files}, "china-eu-us-3")
    assert (error.code, "lyon" in error.message, "shanghai, frankfurt" in error.message) == (
        "CONFIG_INVALID",
        True,
        True,
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"regions": -2}, "`regions` must be at least 1, not -2"),
        ({"regions": 0}, "`regions` must be at least 1, not 0"),
        ({"regions": 2, "workers": 0}, "`workers` must be at least 1, not 0"),
        ({"clients": 0}, "`clients` must be at least 1, not 0"),
        ({"regions": "3"}, "there is no profile '3'"),
        ({"regions": 13}, "12 samples of train cannot be partitioned over 13 regions"),
    ],
)
def test_wrong_counts_are_refused(task: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(geofed.GeofedError, match=told) as caught:
        geofed.simulate(task, DATA, **given)
    assert caught.value.code == "CONFIG_INVALID"
    if given["regions" if "regions" in given else "clients"] == "3":
        assert caught.value.hint == "give the number: regions=3"


def test_arrays_that_do_not_match_are_refused(task: Path) -> None:
    x, y = DATA["train"]
    assert "a label for each sample" in _refused(task, {"train": (x, y[:5])}, 2).message
    assert "must be a pair of arrays" in _refused(task, {"train": "train.npz"}, 2).message


def test_what_no_simulation_has_written_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "work" / "job"
    shutil.copytree(TEMPLATES / "image-classification", own)
    before = {path: path.read_bytes() for path in own.iterdir() if path.is_file()}
    for task in (own, own / "task.py"):
        with pytest.raises(geofed.GeofedError, match="holds files that `simulate` has not written") as caught:
            geofed.simulate(task, DATA, folder=tmp_path / "work", regions=2)
        assert caught.value.code == "CONFIG_INVALID"
    assert "in the folder of the task" in _refused_in(own, own / "run").message
    assert {path: path.read_bytes() for path in own.iterdir() if path.is_file()} == before


def test_the_folder_of_an_earlier_simulation_is_used_again_unless_it_was_changed(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("def loss(model, batch): ...\n")
    folder = tmp_path / "run"
    # There is no dataset: it ends after the folder is written, before a process starts.
    assert _refused_in(tmp_path / "task.py", folder).code == "TASK_INVALID"
    written = folder / "job" / "task.py"
    assert _refused_in(written, folder).code == "TASK_INVALID"
    assert written.read_text() == "def loss(model, batch): ...\n"
    written.write_text("mine = 1\n")
    assert "was added or changed" in _refused_in(tmp_path / "task.py", folder).message
    assert written.read_text() == "mine = 1\n"


def test_a_simulation_that_was_killed_leaves_a_folder_that_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, folder = tmp_path / "task.py", tmp_path / "run"
    for step in ("rmtree", "rename", "_mark"):
        task.write_text(f"# {step}\ndef loss(model, batch): ...\n")
        with monkeypatch.context() as changed:
            owner = {"rmtree": _simulate.shutil, "rename": Path}.get(step, _simulate)
            kept = getattr(owner, step)

            def killed(*given: Any, kept: Any = kept, **named: Any) -> None:
                kept(*given, **named)
                raise KeyboardInterrupt

            changed.setattr(owner, step, killed)
            with pytest.raises(KeyboardInterrupt):
                geofed.simulate(task, DATA, folder=folder, regions=2)
        assert _refused_in(task, folder).code == "TASK_INVALID", step
    (folder / ".job-x").mkdir()
    (folder / ".geofed-simulation.json").write_text("[]")
    assert "has not written" in _refused_in(task, folder).message


def test_the_task_is_imported_as_by_its_workers(tmp_path: Path) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "beside.py").write_text("def dataset(uri, split, config):\n    raise ValueError('read by a sibling')\n")
    (task / "task.py").write_text("from beside import dataset\n")
    error = _refused(task, DATA, 2)
    assert (error.code, error.message) == ("TASK_FAILED", "the task raised ValueError: read by a sibling")
    assert "beside" not in sys.modules
    (task / "task.py").write_text("import not_there\n")
    error = _refused(task, DATA, 2)
    assert (error.code, error.hint) == ("TASK_FAILED", "install not_there")
    (task / "task.py").unlink()
    assert _refused(task, DATA, 2).code == "SPEC_NOT_FOUND"


def _refused_in(task: Path, folder: Path) -> geofed.GeofedError:
    with pytest.raises(geofed.GeofedError) as caught:
        geofed.simulate(task, DATA, folder=folder, regions=2)
    return caught.value
