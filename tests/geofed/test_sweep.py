"""What a sweep tries: the file's mistakes, and the values that each search proposes."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.running import TEMPLATES

from geofed.sweep import SweepFile, load_sweep
from geofed.sweep._search import Optuna, Random, search_of
from geofed_pb.errors import GeofedError

FILE = {
    "apiVersion": "geofed/v1", "kind": "Sweep", "metadata": {"name": "rates"}, "job": "job.yaml",
    "parameters": {"task.config.lr": [0.1, 0.01], "advanced.wan.interval": [5, 10, 20]},
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    shutil.copytree(TEMPLATES / "image-classification", folder, dirs_exist_ok=True)
    path = folder / "sweep.yaml"
    path.write_text(json.dumps({**FILE, **changes}, indent=1))
    return path


def test_a_grid_tries_every_combination_once() -> None:
    search = search_of(SweepFile.model_validate(FILE), maximise=False)
    tried = [tuple(search.propose(number).values()) for number in range(1, search.trials + 1)]
    assert tried == list(itertools.product([0.1, 0.01], [5, 10, 20]))


def test_a_sweep_compares_what_the_job_compares(tmp_path: Path) -> None:
    loaded = load_sweep(written(tmp_path))
    best = loaded.spec.train.compared
    assert (loaded.metric, loaded.maximise) == (best.metric, best.mode == "max")
    other = load_sweep(written(tmp_path, metric="recall", mode="max"))
    assert (other.metric, other.maximise) == ("recall", True)


def test_another_file_or_code_is_another_sweep(tmp_path: Path) -> None:
    first = load_sweep(written(tmp_path)).id
    assert load_sweep(written(tmp_path)).id == first
    assert load_sweep(written(tmp_path, seed=1)).id != first
    (tmp_path / "task.py").write_text((tmp_path / "task.py").read_text() + "\n# changed\n")
    assert load_sweep(written(tmp_path).with_name("sweep.yaml")).id == first, "the template's code again"
    (tmp_path / "other.py").write_text("value = 1\n")
    assert load_sweep(tmp_path / "sweep.yaml").id != first


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"search": "random"}, "`search: random` requires `trials`"),
        ({"trials": 3}, "`trials` cannot be used with a grid"),
        ({"parameters": {"a.b": []}}, "`a.b` has no values"),
        ({"parameters": {"a.b": {"min": 0, "max": 1}}}, "a grid requires a list of values"),
        ({"parameters": {"a.b": {"min": 1, "max": 1}}, "search": "random", "trials": 1}, "`min` must be less"),
        (
            {"parameters": {"a.b": {"min": 0, "max": 1, "scale": "log"}}, "search": "random", "trials": 1},
            "`scale: log` requires `min` greater than 0",
        ),
        ({"parameters": {"a.b": list(range(40)), "c": list(range(40))}}, "1,600 combinations; the limit is 1000"),
        (
            {"parameters": {"wan.codec": ["fp32"], "advanced.wan.codec": ["int8"]}},
            "`advanced.wan.codec` and `wan.codec` are the same key",
        ),
        ({"metric": "recall"}, "give `metric` and `mode` together"),
        ({"parallell": 2}, "parallel"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(GeofedError, match=r"sweep.yaml:\d+") as raised:
        load_sweep(path)
    assert raised.value.code == "SPEC_INVALID"
    assert told in raised.value.message


def test_a_sweep_without_its_files_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", written(tmp_path, job="none.yaml")):
        with pytest.raises(GeofedError, match=r"none.yaml") as raised:
            load_sweep(path)
        assert raised.value.code == "SPEC_NOT_FOUND"


RANGES = st.builds(
    lambda low, width, log, whole: {
        "min": math.ceil(low) if whole else low, "max": math.ceil(low) + math.ceil(width) if whole else low + width,
        "scale": "log" if log else "linear", "integer": whole,
    },
    st.floats(0.001, 100), st.floats(0.01, 1000), st.booleans(), st.booleans(),
)  # fmt: skip


def _file(ranges: list[dict[str, Any]], search: str) -> SweepFile:
    parameters = {f"p.{number}": values for number, values in enumerate(ranges)}
    return SweepFile.model_validate({**FILE, "parameters": parameters, "search": search, "trials": 5, "seed": 3})


@given(st.lists(RANGES, min_size=1, max_size=4))
def test_draws_stay_in_their_range_and_depend_on_nothing_else(ranges: list[dict[str, Any]]) -> None:
    file = _file(ranges, "random")
    backwards = [Random(file).propose(number) for number in range(5, 0, -1)]
    assert backwards[::-1] == [Random(file).propose(number) for number in range(1, 6)]
    for values in backwards:
        for value, bounds in zip(values.values(), ranges, strict=True):
            assert bounds["min"] <= value <= bounds["max"]
            assert isinstance(value, int) or not bounds["integer"]


def test_a_logarithmic_range_draws_each_power_of_ten_equally_often() -> None:
    parameters = {"a": {"min": 0.001, "max": 1.0, "scale": "log"}, "b": {"min": 1, "max": 4, "scale": "log",
                  "integer": True}}  # fmt: skip
    file = SweepFile.model_validate({**FILE, "parameters": parameters, "search": "random", "trials": 1000})
    drawn = [Random(file).propose(number) for number in range(1, 1001)]
    decades = [math.floor(math.log10(values["a"])) for values in drawn]
    assert all(250 < decades.count(decade) < 420 for decade in (-3, -2, -1))
    assert {values["b"] for values in drawn} == {1, 2, 3, 4}


def test_optuna_learns_from_trials_of_an_earlier_run() -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    parameters = {"a.lr": {"min": 0.0001, "max": 10.0, "scale": "log"}, "kind": [1, 1.0, True, {"deep": [1, 2]}, None]}
    file = SweepFile.model_validate({**FILE, "parameters": parameters, "search": "optuna", "trials": 60})

    def outcome(values: dict[str, Any]) -> float:
        return abs(math.log10(values["a.lr"]) + 2) + (0.0 if values["kind"] == {"deep": [1, 2]} else 1.0)

    first = Optuna(file, maximise=False)
    history = []
    for number in range(1, 41):
        values = first.propose(number)
        history.append((values, first.stored(number)))
        first.learn(number, None if number == 3 else outcome(values))
    again = Optuna(file, maximise=False)
    for number, (values, stored) in enumerate(history, start=1):
        assert again.recall(number, stored) == values
        again.learn(number, None if number == 3 else outcome(values))
    later = []
    for number in range(41, 61):
        values = again.propose(number)
        again.learn(number, outcome(values))
        later.append(values)
    assert sum(values["kind"] == {"deep": [1, 2]} for values in later) >= 8, "by chance it would be 4"
    middle = sorted(abs(math.log10(values["a.lr"]) + 2) for values in later)[10]
    assert middle < 1.0, "half of them are within a factor of ten of the best"
